//! RMS norm.

use candle_core::{Result, Tensor};
use candlewick_ops::{self as ops, NormCall, Weight};

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

    /// Returns the norm of x, or of the sum of x and an addend, as an argument of ops that compute also what reads it.
    pub(crate) fn of<'a>(&'a self, x: &'a Tensor, plus: Option<&'a Tensor>) -> NormCall<'a> {
        NormCall { x, plus, weight: &self.weight, eps: self.eps }
    }
}
