//! Prompts whose logits are compared.

use std::ops::Range;

/// Prompts, packed one after the other.
pub(super) struct ComparedPrompts(pub(super) Vec<Vec<u32>>);

impl ComparedPrompts {
    pub(super) fn ids(&self) -> Vec<u32> {
        self.0.concat()
    }

    pub(super) fn positions(&self) -> Vec<u32> {
        self.0.iter().flat_map(|prompt| 0..prompt.len() as u32).collect()
    }

    /// Returns the indices of each prompt's tokens.
    pub(super) fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        self.0.iter().scan(0, |start, prompt| {
            let range = *start..*start + prompt.len();
            *start = range.end;
            Some(range)
        })
    }

    /// Returns the starts of the prompts, and the number of tokens.
    pub(super) fn starts(&self) -> Vec<usize> {
        [0].into_iter().chain(self.ranges().map(|range| range.end)).collect()
    }
}
