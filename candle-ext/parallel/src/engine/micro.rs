//! A micro-batch as the engine gets it.

use std::borrow::Cow;

use candle_core::{Result, Tensor};
use candlewick_ops::CuSeqlens;

/// One micro-batch: packed sequences on the device.
#[derive(Clone)]
pub struct Micro {
    /// Token ids, u32 `[t]`.
    pub ids: Tensor,
    /// The token that each position must predict, i64 `[t]` on the CPU, or [`Micro::IGNORED`].
    pub targets: Tensor,
    /// The place of each token in its sequence, `t` of them.
    pub positions: Vec<u32>,
    /// Where the sequences begin.
    pub seqs: CuSeqlens,
}

impl Micro {
    /// The target of a position that predicts nothing.
    pub const IGNORED: i64 = -100;

    /// The same with tokens that teach nothing behind it, as a sequence of their own, so that their number is a multiple of
    /// this.
    pub(crate) fn padded(&self, multiple: usize) -> Result<Cow<'_, Self>> {
        let n_tokens = self.seqs.n_tokens();
        let n_filler = n_tokens.next_multiple_of(multiple) - n_tokens;
        if n_filler == 0 {
            return Ok(Cow::Borrowed(self));
        }
        let filler = |x: &Tensor| Tensor::zeros(n_filler, x.dtype(), x.device());
        let ignored = (filler(&self.targets)? + Self::IGNORED as f64)?;
        let ends = self.seqs.cu_seqlens_q().iter().copied().chain([n_tokens + n_filler]);
        Ok(Cow::Owned(Self {
            ids: Tensor::cat(&[&self.ids, &filler(&self.ids)?], 0)?,
            targets: Tensor::cat(&[&self.targets, &ignored], 0)?,
            positions: self.positions.iter().copied().chain(0..n_filler as u32).collect(),
            seqs: CuSeqlens::packed(ends.collect())?,
        }))
    }
}
