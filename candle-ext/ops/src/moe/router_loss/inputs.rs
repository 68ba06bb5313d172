//! Inputs of the load-balancing loss besides the logits.

use candle_core::{Result, Tensor};

use super::cpu::Balance;
use crate::moe::router::ScoreFunction;
use crate::storage::host;

/// Counts of experts, and the scores that they weight.
pub(super) struct BalanceInputs {
    /// Counts of each sequence, f32 [s, e].
    pub(super) counts: Tensor,
    /// Sequence of each token, u32 [t]; `None` if all tokens are of the first.
    pub(super) sequences: Option<Tensor>,
    pub(super) score: ScoreFunction,
}

impl BalanceInputs {
    /// Calls `f` with the CPU's loss.
    pub(super) fn with_balance<T>(&self, op: &str, f: impl FnOnce(&Balance<'_>) -> Result<T>) -> Result<T> {
        let counts = host(op, &self.counts)?;
        let sequences = self.sequences.as_ref().map(|sequences| host(op, sequences)).transpose()?;
        let sequences = sequences.as_ref().map(|sequences| sequences.slice()).transpose()?;
        f(&Balance { counts: counts.slice()?, sequences, score: self.score })
    }
}
