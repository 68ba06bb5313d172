//! Incremental detokenization: a character is emitted once all of its bytes are decoded.

use candlewick_text::tokenizer::{SpecialTokens, Tokenizer, TokenizerError};

/// Incremental decoder of a growing token list.
pub struct TextStream<'t> {
    tokenizer: &'t Tokenizer,
    tokens: Vec<u32>,
    /// Start of the tokens that are decoded again with each push.
    window: usize,
    /// End of the tokens whose text was emitted.
    given: usize,
}

impl<'t> TextStream<'t> {
    /// Creates an empty stream.
    pub fn new(tokenizer: &'t Tokenizer) -> Self {
        Self { tokenizer, tokens: Vec::new(), window: 0, given: 0 }
    }

    /// Adds a token and returns the newly completed text, which may be empty.
    pub fn push(&mut self, token: u32) -> Result<String, TokenizerError> {
        self.tokens.push(token);
        self.advance(|text| !text.ends_with(char::REPLACEMENT_CHARACTER))
    }

    /// Returns the remaining text, including incomplete characters.
    pub fn finish(mut self) -> Result<String, TokenizerError> {
        self.advance(|_| true)
    }

    fn advance(&mut self, is_complete: impl Fn(&str) -> bool) -> Result<String, TokenizerError> {
        let decode = |tokens: &[u32]| self.tokenizer.decode(tokens, SpecialTokens::Exclude);
        // Decoders strip the first token's whitespace, so the last emitted tokens are decoded together with the new
        // ones.
        let before = decode(&self.tokens[self.window..self.given])?;
        let all = decode(&self.tokens[self.window..])?;
        if all.len() <= before.len() || !is_complete(&all) {
            return Ok(String::new());
        }
        let fresh = all.get(before.len()..).unwrap_or_default().to_owned();
        (self.window, self.given) = (self.given, self.tokens.len());
        Ok(fresh)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn streamed_pieces_concatenate_to_the_whole_text() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/quickstart/tokenizer");
        let tokenizer = Tokenizer::from_directory(folder).unwrap();
        for text in ["", "Say wolf 4 times.", " a  b\n\nc ", "naïve 中文 🙂🙂 end", "🙂"] {
            let ids = tokenizer.encode(text, SpecialTokens::Exclude).unwrap();
            let mut stream = TextStream::new(&tokenizer);
            let mut pieces: Vec<String> = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
            assert!(pieces.iter().all(|piece| !piece.contains(char::REPLACEMENT_CHARACTER)), "{pieces:?}");
            pieces.push(stream.finish().unwrap());
            assert_eq!(pieces.concat(), tokenizer.decode(&ids, SpecialTokens::Exclude).unwrap());
        }
    }

    #[test]
    fn an_incomplete_character_is_printed_at_the_end() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/quickstart/tokenizer");
        let tokenizer = Tokenizer::from_directory(folder).unwrap();
        let ids = tokenizer.encode("🙂", SpecialTokens::Exclude).unwrap();
        assert!(ids.len() > 1);
        let mut stream = TextStream::new(&tokenizer);
        assert_eq!(stream.push(ids[0]).unwrap(), "");
        assert!(stream.finish().unwrap().contains(char::REPLACEMENT_CHARACTER));
    }
}
