//! Tokens of the residual stream that routers count.

use candle_core::{Result, Tensor};
use candlewick_ops::{TokenSequences, select_rows};

/// Rows of this rank's residual stream that are no padding, and their sequences.
#[derive(Clone, Debug)]
pub struct RouterRows {
    /// Rows, u32 [n]; `None` for all.
    pub valid: Option<Tensor>,
    /// Sequence in the micro-batch of each of these rows, u32 [n]. Empty if no loss reads it.
    pub sequences: Tensor,
    /// Token in the micro-batch of each row of this rank, u32 [t]. Empty if there is no jitter.
    pub tokens: Tensor,
    /// Token of the first row.
    pub first_token: u64,
    /// Number of sequences of the micro-batch, over all ranks that split it.
    pub n_sequences: usize,
}

impl RouterRows {
    /// Selects the rows of x [t, d]: [n, d].
    pub(crate) fn select(&self, x_td: &Tensor) -> Result<Tensor> {
        match &self.valid {
            Some(rows) => select_rows(x_td, rows),
            None => Ok(x_td.clone()),
        }
    }

    /// Returns the sequences of the rows.
    pub(crate) fn token_sequences(&self) -> TokenSequences<'_> {
        TokenSequences { of_tokens: &self.sequences, n_sequences: self.n_sequences }
    }
}
