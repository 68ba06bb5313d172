//! A vocabulary in parts: what each part knows of a token's logits, and what follows from all of them.
//!
//! As Megatron-LM computes it (Shoeybi et al., 2019; <https://arxiv.org/abs/1909.08053>, section 3), but with one exchange
//! for the largest logit, the sum of exponentials and the target's logit.

use candle_core::{Result, Tensor, bail};

/// The class of a target that another part has.
pub(super) const NOT_IN_SHARD: usize = usize::MAX;

/// The rows of the output layer that are here, among all.
pub struct VocabShard<'a> {
    /// The id of the first.
    pub first_row: usize,
    /// How many there are in all parts.
    pub n_vocab: usize,
    /// How many the largest part has: it says how many tokens make a chunk, which all parts must agree on.
    pub max_shard_rows: usize,
    /// Gives what each part gives, one below another: f32 `[3, n]` becomes `[parts * 3, n]`.
    pub all_gather: &'a dyn Fn(&Tensor) -> Result<Tensor>,
}

/// What the parts know together of n tokens, each f32 `[n]`.
pub(super) struct Merged {
    /// The largest logit.
    pub(super) max: Tensor,
    /// The sum of exp(logit - largest).
    pub(super) sum: Tensor,
    /// -log softmax of the target.
    pub(super) loss: Tensor,
}

impl VocabShard<'_> {
    /// The row of a class here.
    pub(super) fn local(&self, class: usize, n_rows: usize) -> usize {
        match class.checked_sub(self.first_row) {
            Some(row) if row < n_rows => row,
            _ => NOT_IN_SHARD,
        }
    }

    /// Merges this part's numbers of n tokens with the others': f32 `[3, n]`, the largest logit, the sum of exp(logit -
    /// largest), and the target's logit or 0 if it is elsewhere.
    pub(super) fn merge(&self, own: &Tensor) -> Result<Merged> {
        let (_, n) = own.dims2()?;
        let all = (self.all_gather)(own)?;
        let n_rows = all.dim(0)?;
        if !n_rows.is_multiple_of(3) || n_rows == 0 {
            bail!("linear_cross_entropy: the parts of the vocabulary gave {n_rows} rows, want 3 each")
        }
        let all = all.reshape((n_rows / 3, 3, n))?;
        let of = |i: usize| all.narrow(1, i, 1)?.squeeze(1)?.contiguous();
        let (maxes, sums, at_target) = (of(0)?, of(1)?, of(2)?.sum(0)?);
        let max = maxes.max(0)?;
        let sum = (maxes.broadcast_sub(&max)?.exp()? * sums)?.sum(0)?;
        let loss = ((&max - at_target)? + sum.log()?)?;
        Ok(Merged { max, sum, loss })
    }
}
