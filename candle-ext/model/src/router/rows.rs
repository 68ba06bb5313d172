//! Tokens of the residual stream that routers count.

use candle_core::{Result, Tensor, bail};
use candlewick_ops::{TokenSequences, select_rows};

/// Rows of this rank's residual stream that are no padding, and their sequences.
#[derive(Clone, Debug)]
pub struct RouterRows {
    /// Rows, u32 [n]; `None` for all.
    pub valid: Option<Tensor>,
    /// 1 for each of these rows and 0 for others, u32 [t]; `None` for all.
    pub token_mask: Option<Tensor>,
    /// Sequence in the micro-batch of each of these rows, u32 [n]; `None` if no loss reads it.
    pub sequences: Option<Tensor>,
    /// Token in the micro-batch of each row of this rank, u32 [t]; `None` if there is no jitter.
    pub tokens: Option<Tensor>,
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

    /// Returns the sequences of the rows. Fails if they were not computed.
    pub(crate) fn token_sequences(&self) -> Result<TokenSequences<'_>> {
        let Some(of_tokens) = &self.sequences else { bail!("a loss of sequences needs the sequence of each row") };
        Ok(TokenSequences { of_tokens, n_sequences: self.n_sequences })
    }
}
