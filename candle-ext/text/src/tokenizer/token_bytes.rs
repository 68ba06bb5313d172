//! Bytes of single tokens, which may be parts of a character.

use super::{SpecialTokens, Tokenizer, TokenizerError};

impl Tokenizer {
    /// Returns the bytes of a token: of its text, or the part of a character that it holds.
    pub fn token_bytes(&self, id: u32) -> Result<Vec<u8>, TokenizerError> {
        let text = self.decode(&[id], SpecialTokens::Include)?;
        if !text.contains(char::REPLACEMENT_CHARACTER) {
            return Ok(text.into_bytes());
        }
        let token = self.id_to_token(id).unwrap_or_default();
        let of_byte_level_bpe = || token.chars().map(byte_of).collect();
        Ok(byte_fallback(&token).or_else(of_byte_level_bpe).unwrap_or(text.into_bytes()))
    }
}

/// Returns the byte of a token of SentencePiece's byte fallback: `<0xF0>`.
fn byte_fallback(token: &str) -> Option<Vec<u8>> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    u8::from_str_radix(digits, 16).ok().map(|byte| vec![byte])
}

/// Returns the byte of a character of byte-level BPE: itself if printable, the n-th of the other bytes for U+0100 + n.
fn byte_of(c: char) -> Option<u8> {
    let is_printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match u8::try_from(c) {
        Ok(byte) => Some(byte).filter(is_printable),
        Err(_) => (0..=0xff).filter(|byte| !is_printable(byte)).nth(u32::from(c) as usize - 0x100),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_characters_of_byte_level_bpe_are_the_256_bytes() {
        let bytes: Vec<u8> = ('\0'..='\u{200}').filter_map(byte_of).collect();
        let mut sorted = bytes.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..=0xff).collect::<Vec<u8>>());
        assert_eq!(
            [byte_of('Ġ'), byte_of('Ċ'), byte_of('ð'), byte_of('Ģ')],
            [Some(b' '), Some(b'\n'), Some(0xf0), Some(0x80)]
        );
    }

    #[test]
    fn bytes_of_tokens_concatenate_to_the_text() {
        for family in ["smollm2", "llama3_2", "qwen3"] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat").join(family);
            let tokenizer = Tokenizer::from_directory(folder).unwrap();
            for text in ["The capital 🙂 中文 é\n", "\u{fffd}", "🙂", "<|im_end|>"] {
                let ids = tokenizer.encode(text, SpecialTokens::Exclude).unwrap();
                let bytes: Vec<u8> = ids.iter().flat_map(|id| tokenizer.token_bytes(*id).unwrap()).collect();
                assert_eq!(
                    bytes,
                    tokenizer.decode(&ids, SpecialTokens::Include).unwrap().as_bytes(),
                    "{family} {text}"
                );
            }
        }
    }

    #[test]
    fn a_byte_fallback_token_is_its_byte() {
        assert_eq!([byte_fallback("<0xF0>"), byte_fallback("<0x0A>")], [Some(vec![0xf0]), Some(vec![b'\n'])]);
        assert_eq!(["<0x>", "<0x1F0>", "0xF0", "<unk>"].map(byte_fallback), [None, None, None, None]);
    }
}
