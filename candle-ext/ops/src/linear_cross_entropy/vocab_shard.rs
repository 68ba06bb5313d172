//! Vocab-parallel softmax: merges the statistics of vocabulary shards.
//!
//! As in Megatron-LM (Shoeybi et al., 2019; <https://arxiv.org/abs/1909.08053>, section 3), but with one all-gather. It
//! carries the largest logit, the sum of exponentials, the target's logit, and for label smoothing the sum of logits.

use candle_core::{Result, Tensor, bail};

use super::args::LabelSmoothing;

/// Class of a target in another rank's shard.
pub(super) const NOT_IN_SHARD: usize = usize::MAX;

/// A rank's shard of the vocabulary: consecutive rows of the LM head.
pub struct VocabShard<'a> {
    /// Token id of the shard's first row.
    pub first_row: usize,
    /// Number of rows in all shards: the vocabulary size.
    pub n_vocab: usize,
    /// Number of rows of the largest shard. It determines the chunk size, on which all ranks must agree.
    pub max_shard_rows: usize,
    /// All-gather over the shards' ranks: f32 `[k, n]` becomes `[n_shards * k, n]`, with k = 3, or 4 with label
    /// smoothing.
    pub all_gather: &'a dyn Fn(&Tensor) -> Result<Tensor>,
}

/// Softmax statistics of n tokens over the whole vocabulary, each f32 `[n]`.
pub(super) struct Merged {
    /// The largest logit.
    pub(super) max: Tensor,
    /// The sum of exp(logit - largest).
    pub(super) sum: Tensor,
    /// Loss of the target.
    pub(super) loss: Tensor,
}

impl VocabShard<'_> {
    /// Returns the local row of a class, or [`NOT_IN_SHARD`].
    pub(super) fn local(&self, class: usize, n_rows: usize) -> usize {
        match class.checked_sub(self.first_row) {
            Some(row) if row < n_rows => row,
            _ => NOT_IN_SHARD,
        }
    }

    /// Returns the number of statistics of a token.
    pub(super) fn n_statistics(smoothing: LabelSmoothing) -> usize {
        if smoothing.is_off() { 3 } else { 4 }
    }

    /// Merges the shards' statistics of n tokens, f32 `[3, n]` or with label smoothing `[4, n]` each.
    ///
    /// The rows are the largest logit, the sum of exp(logit - largest), the target's logit (0 if another shard has it),
    /// and the sum of logits.
    pub(super) fn merge(&self, own: &Tensor, smoothing: LabelSmoothing) -> Result<Merged> {
        let (k, n) = own.dims2()?;
        let all = (self.all_gather)(own)?;
        let n_rows = all.dim(0)?;
        if !n_rows.is_multiple_of(k) || n_rows == 0 {
            bail!(
                "linear_cross_entropy: the all-gather of vocabulary shards returned {n_rows} rows, want {k} per shard"
            )
        }
        let all = all.reshape((n_rows / k, k, n))?;
        let of = |i: usize| all.narrow(1, i, 1)?.squeeze(1)?.contiguous();
        let (maxes, sums, at_target) = (of(0)?, of(1)?, of(2)?.sum(0)?);
        let max = maxes.max(0)?;
        let sum = (maxes.broadcast_sub(&max)?.exp()? * sums)?.sum(0)?;
        let loss = ((&max - &at_target)? + sum.log()?)?;
        if smoothing.is_off() {
            return Ok(Merged { max, sum, loss });
        }
        let mean = (of(3)?.sum(0)? / smoothing.n_vocab as f64)?;
        let loss = (loss + ((at_target - mean)? * f64::from(smoothing.factor))?)?;
        Ok(Merged { max, sum, loss })
    }
}
