//! Tokenized sample.

use crate::sample_warning::SampleWarnings;
use crate::tokenizer::Tokenizer;

/// Tokenized training sample with its loss mask.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Token ids, `[n_tokens]`.
    pub ids: Vec<u32>,
    /// Loss mask, `[n_tokens]`: true if token `i` is a target, that is, its label is not -100.
    pub is_target: Vec<bool>,
    /// Warnings about the sample.
    pub sample_warnings: SampleWarnings,
}

impl Sample {
    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Creates a sample in which every token has loss.
    pub fn all_targets(ids: Vec<u32>) -> Self {
        Self { is_target: vec![true; ids.len()], ids, ..Self::default() }
    }

    /// Splits the sample into chunks of at most `max_length` tokens.
    pub fn slices(&self, max_length: usize) -> impl Iterator<Item = Self> {
        let pieces = self.ids.chunks(max_length).zip(self.is_target.chunks(max_length));
        pieces.map(|(ids, is_target)| Self { ids: ids.to_vec(), is_target: is_target.to_vec(), ..Self::default() })
    }

    /// Returns true if there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Returns the number of tokens with loss.
    pub fn n_targets(&self) -> usize {
        self.is_target.iter().filter(|target| **target).count()
    }

    /// Returns true if the sample trains the model to stop.
    ///
    /// That holds if a target is one of the tokenizer's EOS tokens. It also holds if a run of targets ends with a
    /// special token, such as an end of turn.
    pub fn has_eos_target(&self, tokenizer: &Tokenizer) -> bool {
        let targets = (0..self.len()).filter(|token_idx| self.is_target[*token_idx]);
        targets.into_iter().any(|token_idx| {
            let id = self.ids[token_idx];
            let ends = !self.is_target.get(token_idx + 1).copied().unwrap_or(false);
            tokenizer.eos_ids().contains(&id) || (ends && tokenizer.is_special(id))
        })
    }

    /// Returns true if the sample begins with BOS twice.
    pub fn has_doubled_bos(&self, tokenizer: &Tokenizer) -> bool {
        tokenizer.has_doubled_bos(&self.ids)
    }
}
