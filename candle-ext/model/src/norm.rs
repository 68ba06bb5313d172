//! RMS norm.

use candle_core::{Result, Tensor};
use candlewick_ops::{self as ops, Weight};

/// RMS norm with its weight.
#[derive(Clone, Debug)]
pub(crate) struct Norm {
    pub(crate) weight: Weight,
    pub(crate) eps: f64,
}

impl Norm {
    /// Normalizes the last dimension of `x`.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        ops::rms_norm(x, &self.weight, self.eps)
    }
}
