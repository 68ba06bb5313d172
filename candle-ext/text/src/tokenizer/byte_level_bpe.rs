//! Fast path for byte-level BPE, which most models use.
//!
//! A text is split into words by the tokenizer's own rules. The tokenizers crate encodes each distinct word once;
//! the result is cached.

use std::sync::{Mutex, PoisonError};

use regex_automata::meta::Cache;
use tokenizers::models::ModelWrapper;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::processors::PostProcessorWrapper;
use tokenizers::{Model, OffsetType, PreTokenizedString, PreTokenizer};
use unicode_normalization_alignments::{IsNormalized, is_nfc_quick};

use super::added_tokens::AddedTokenSearch;
use super::split_rule::{SplitRule, words};
use super::word_cache::{WordCache, WordToken};

/// Byte-level BPE tokenizer with a word cache.
pub(super) struct ByteLevelBpe {
    added: AddedTokenSearch,
    normalizes: bool,
    cuts: Vec<SplitRule>,
    trim: TrimOffsets,
    /// Scratch memory of threads that are not encoding.
    idle: Mutex<Vec<ThreadScratch>>,
}

/// White space that the post-processor trims from a token's byte range.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TrimOffsets {
    Nothing,
    Spaces {
        /// True if one space at the beginning of a text is kept, as an added prefix space.
        but_the_first: bool,
    },
}

/// Scratch memory of one thread.
struct ThreadScratch {
    known: WordCache,
    searches: Vec<Option<Cache>>,
}

impl ByteLevelBpe {
    /// Builds the fast path. `None` for other kinds of tokenizers.
    pub(super) fn of(tokenizer: &tokenizers::Tokenizer) -> Option<Self> {
        let ModelWrapper::BPE(model) = tokenizer.get_model() else { return None };
        // With BPE dropout the tokens of a word are random.
        if model.dropout.is_some_and(|dropout| dropout > 0.0) {
            return None;
        }
        let normalizes = match tokenizer.get_normalizer() {
            None => false,
            Some(NormalizerWrapper::NFC(_)) => true,
            Some(_) => return None,
        };
        Some(Self {
            added: AddedTokenSearch::of(tokenizer)?,
            normalizes,
            cuts: SplitRule::all_of(tokenizer.get_pre_tokenizer()?)?,
            trim: TrimOffsets::of(tokenizer.get_post_processor())?,
            idle: Mutex::default(),
        })
    }

    /// Calls `token` with the id and the byte range of each token. `None` if the text needs the tokenizers crate.
    pub(super) fn encode(
        &self,
        tokenizer: &tokenizers::Tokenizer,
        text: &str,
        mut token: impl FnMut(u32, usize, usize),
    ) -> Option<()> {
        if self.normalizes && !text.is_ascii() && is_nfc_quick(text.chars()) != IsNormalized::Yes {
            return None;
        }
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let mut memory = idle().pop().unwrap_or_else(|| self.memory());
        let encoded = self.pieces(tokenizer, &mut memory, text, &mut token);
        idle().push(memory);
        encoded
    }

    fn memory(&self) -> ThreadScratch {
        ThreadScratch { known: WordCache::default(), searches: self.cuts.iter().map(SplitRule::cache).collect() }
    }

    fn pieces(
        &self,
        tokenizer: &tokenizers::Tokenizer,
        memory: &mut ThreadScratch,
        text: &str,
        token: &mut impl FnMut(u32, usize, usize),
    ) -> Option<()> {
        let ThreadScratch { known, searches } = memory;
        let mut start = 0;
        self.added.pieces(text, &mut |piece, id| {
            if let Some(id) = id {
                let (from, to) = self.trim.token(piece, 0, piece.len(), start == 0);
                token(id, start + from, start + to);
                start += piece.len();
                return Some(());
            }
            words(&self.cuts, searches, piece, &mut |word| {
                let mut give = |tokens: &[WordToken]| {
                    for &WordToken { id, start: from, end: to } in tokens {
                        token(id, start + from as usize, start + to as usize);
                    }
                };
                // The first word of a text has other offsets, so it is not cached.
                match known.get(word).filter(|_| start > 0) {
                    Some(tokens) => give(tokens),
                    None => {
                        let tokens = self.tokenize_word(tokenizer, word, start == 0)?;
                        give(&tokens);
                        if start > 0 {
                            known.learn(word, &tokens);
                        }
                    }
                }
                start += word.len();
                Some(())
            })
        })
    }

    /// Encodes a word with the tokenizers crate.
    fn tokenize_word(&self, tokenizer: &tokenizers::Tokenizer, word: &str, is_first: bool) -> Option<Vec<WordToken>> {
        let mut split = PreTokenizedString::from(word);
        ByteLevel::new(false, false, false).pre_tokenize(&mut split).ok()?;
        tokenizer.get_model().tokenize_in_pretokenized(&mut split, None).ok()?;
        let encoding = split.into_encoding(None, 0, OffsetType::Byte).ok()?;
        let tokens = encoding.get_ids().iter().zip(encoding.get_tokens()).zip(encoding.get_offsets());
        let tokens = tokens.enumerate().map(|(i, ((&id, written), &(start, end)))| {
            let (start, end) = self.trim.token(written, start, end, is_first && (i == 0 || start == 0));
            Some(WordToken { id, start: u32::try_from(start).ok()?, end: u32::try_from(end).ok()? })
        });
        let tokens = tokens.collect::<Option<Vec<_>>>()?;
        // If all characters are unknown, the first token of the text is undefined here.
        (!tokens.is_empty()).then_some(tokens)
    }
}

impl TrimOffsets {
    /// Returns the trimming of a post-processor. `None` if it changes more than that.
    fn of(processor: Option<&PostProcessorWrapper>) -> Option<Self> {
        let steps = match processor {
            None => return Some(Self::Nothing),
            Some(PostProcessorWrapper::Sequence(sequence)) => sequence.as_ref(),
            Some(one) => std::slice::from_ref(one),
        };
        let mut trim = Self::Nothing;
        for step in steps {
            match step {
                PostProcessorWrapper::ByteLevel(bytes) if !bytes.trim_offsets => {}
                PostProcessorWrapper::ByteLevel(bytes) if trim == Self::Nothing => {
                    trim = Self::Spaces { but_the_first: bytes.add_prefix_space };
                }
                PostProcessorWrapper::Template(template) => {
                    let single = serde_json::to_value(&template.single).ok()?;
                    let texts = single.as_array()?.iter().filter(|piece| piece.get("Sequence").is_some());
                    (texts.count() == 1).then_some(())?;
                }
                _ => return None,
            }
        }
        Some(trim)
    }

    /// Returns the trimmed byte range of a token, as `ByteLevel` does.
    fn token(self, written: &str, start: usize, end: usize, is_first: bool) -> (usize, usize) {
        let Self::Spaces { but_the_first } = self else { return (start, end) };
        let is_space = |c: &char| *c == 'Ġ' || c.is_whitespace();
        let n_before = written.chars().take_while(is_space).count();
        let n_behind = written.chars().rev().take_while(is_space).count();
        let n_before = if is_first && but_the_first && n_before == 1 { 0 } else { n_before };
        let start = (start + n_before).min(end);
        let end = if n_behind > 0 && end >= n_behind { (end - n_behind).max(start) } else { end };
        (start, end)
    }
}

#[cfg(test)]
mod tests;
