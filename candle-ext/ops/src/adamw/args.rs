//! The arguments of an AdamW update.

use candle_core::Tensor;

/// The numbers of one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the gradient's running mean.
    pub beta1: f64,
    /// Decay of the squared gradient's running mean.
    pub beta2: f64,
    /// Added to the root of the squared gradient's mean.
    pub eps: f64,
    /// Decoupled decay: the parameter shrinks by lr * weight_decay.
    pub weight_decay: f64,
}

/// The tensors of an update: contiguous views of equal length, each in a buffer of its own.
#[derive(Clone, Copy, Debug)]
pub struct AdamWState<'a> {
    /// The parameter, f32 or bf16.
    pub master: &'a Tensor,
    /// Its gradient, in the same format.
    pub grad: &'a Tensor,
    /// The gradient's running mean, f32 or bf16.
    pub exp_avg: &'a Tensor,
    /// The squared gradient's running mean, in the same format.
    pub exp_avg_sq: &'a Tensor,
    /// A copy of the parameter in another format, rewritten from it.
    pub compute: Option<&'a Tensor>,
}

/// The scalars of an update, computed in f64 and rounded once. With c = sqrt(1 - b2^n), m / (sqrt(v) / c + eps) is
/// c m / (sqrt(v) + c eps): c and the bias correction of m belong to the step and come from the scaler.
#[derive(Clone, Copy)]
pub(super) struct Factors {
    pub(super) lr: f32,
    pub(super) shrink: f32,
    pub(super) beta1: f32,
    pub(super) one_minus_beta1: f32,
    pub(super) beta2: f32,
    pub(super) one_minus_beta2: f32,
    pub(super) eps: f32,
}

impl Factors {
    pub(super) fn of(hyper: &AdamW) -> Self {
        Self {
            lr: hyper.lr as f32,
            shrink: (1.0 - hyper.lr * hyper.weight_decay) as f32,
            beta1: hyper.beta1 as f32,
            one_minus_beta1: (1.0 - hyper.beta1) as f32,
            beta2: hyper.beta2 as f32,
            one_minus_beta2: (1.0 - hyper.beta2) as f32,
            eps: hyper.eps as f32,
        }
    }
}
