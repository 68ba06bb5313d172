//! Incremental detokenization: a character is emitted once all of its bytes are decoded, and text that may begin a stop
//! string once it does not.

use candlewick_text::tokenizer::{SpecialTokens, Tokenizer, TokenizerError};

/// Incremental decoder of a generation, which ends before the first stop string.
pub struct StoppableText<'t> {
    stream: TextStream<'t>,
    stop: Vec<String>,
    /// Decoded text that may be the beginning of a stop string.
    held: String,
    has_stopped: bool,
    /// Special tokens that are part of the text.
    visible: Vec<u32>,
}

/// Incremental decoder of a growing token list.
pub struct TextStream<'t> {
    tokenizer: &'t Tokenizer,
    tokens: Vec<u32>,
    /// Start of the tokens that are decoded again with each push.
    window: usize,
    /// End of the tokens whose text was emitted.
    given: usize,
}

impl<'t> StoppableText<'t> {
    /// Creates an empty text. The stop strings must not be empty.
    pub fn new(tokenizer: &'t Tokenizer, stop: &[String]) -> Self {
        let stream = TextStream::new(tokenizer);
        Self { stream, stop: stop.to_vec(), held: String::new(), has_stopped: false, visible: Vec::new() }
    }

    /// Sets special tokens that are part of the text, such as those around a tool call.
    #[must_use]
    pub fn with_visible(self, special_tokens: &[u32]) -> Self {
        Self { visible: special_tokens.to_vec(), ..self }
    }

    /// Adds a token and returns the text that is certain to precede a stop string. It may be empty.
    pub fn push(&mut self, token: u32) -> Result<String, TokenizerError> {
        let text = match self.visible.contains(&token) {
            true => self.stream.finish()? + &self.stream.tokenizer.id_to_token(token).unwrap_or_default(),
            false => self.stream.push(token)?,
        };
        Ok(self.advance(&text))
    }

    /// Returns the remaining text, including incomplete characters.
    pub fn finish(&mut self) -> Result<String, TokenizerError> {
        let text = self.stream.finish()?;
        let text = self.advance(&text);
        Ok(text + &std::mem::take(&mut self.held))
    }

    /// Returns true if the text has reached a stop string.
    pub fn has_stopped(&self) -> bool {
        self.has_stopped
    }

    fn advance(&mut self, text: &str) -> String {
        if self.has_stopped {
            return String::new();
        }
        self.held.push_str(text);
        if let Some(at) = self.stop.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.has_stopped = true;
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let may_begin_a_stop = |at: &usize| self.stop.iter().any(|stop| stop.starts_with(&self.held[*at..]));
        let at = self.held.char_indices().map(|(at, _)| at).find(may_begin_a_stop).unwrap_or(self.held.len());
        let rest = self.held.split_off(at);
        std::mem::replace(&mut self.held, rest)
    }
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
    pub fn finish(&mut self) -> Result<String, TokenizerError> {
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
    fn a_visible_special_token_is_text() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/quickstart/tokenizer");
        let tokenizer = Tokenizer::from_directory(folder).unwrap();
        let ids = tokenizer.encode("Say<|im_start|>wolf<|im_end|> 4", SpecialTokens::Exclude).unwrap();
        let start = tokenizer.token_to_id("<|im_start|>").unwrap();
        for (visible, want) in [(&[][..], "Saywolf 4"), (&[start], "Say<|im_start|>wolf 4")] {
            let mut text = StoppableText::new(&tokenizer, &[]).with_visible(visible);
            let pieces: String = ids.iter().map(|id| text.push(*id).unwrap()).collect();
            assert_eq!(pieces + &text.finish().unwrap(), want);
        }
    }

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

    /// Streams a text token by token; returns the pieces joined by `|`.
    fn streamed(text: &str, stop: &[&str]) -> (String, bool) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/quickstart/tokenizer");
        let tokenizer = Tokenizer::from_directory(folder).unwrap();
        let stop: Vec<String> = stop.iter().map(|stop| (*stop).to_owned()).collect();
        let mut stream = StoppableText::new(&tokenizer, &stop);
        let mut found = String::new();
        for id in tokenizer.encode(text, SpecialTokens::Exclude).unwrap() {
            let piece = stream.push(id).unwrap();
            assert!(!stop.iter().any(|stop| stop.starts_with(&piece) && !piece.is_empty()), "{piece:?}");
            found += &piece;
            if stream.has_stopped() {
                break;
            }
        }
        found += &stream.finish().unwrap();
        (found, stream.has_stopped())
    }

    #[test]
    fn a_text_ends_before_its_first_stop_string() {
        for (text, stop, want) in [
            ("one\n\ntwo", &["\n\n"][..], ("one", true)),
            ("one\ntwo\n", &["\n\n"], ("one\ntwo\n", false)),
            ("a wolf and a sheep", &["sheep", "and a"], ("a wolf ", true)),
            ("aab aaab", &["aaab"], ("aab ", true)),
            ("naïve 🙂 end", &["🙂"], ("naïve ", true)),
            ("whole", &[], ("whole", false)),
            ("stop", &["stop"], ("", true)),
        ] {
            assert_eq!(streamed(text, stop), (want.0.to_owned(), want.1), "{text:?} {stop:?}");
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
