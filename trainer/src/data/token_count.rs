//! Number of samples and tokens.

use serde::{Deserialize, Serialize};

/// Samples and tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenCount {
    /// The samples.
    pub samples: u64,
    /// Their tokens.
    pub tokens: u64,
}

impl TokenCount {
    pub(crate) fn add(&mut self, n_tokens: usize) {
        self.samples += 1;
        self.tokens += n_tokens as u64;
    }
}
