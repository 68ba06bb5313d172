//! Hyperparameters, tensors and rounding of an AdamW update.

use std::ops::Range;

use candle_core::Tensor;

/// Hyperparameters of an AdamW update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the gradient's running mean (beta1).
    pub beta1: f64,
    /// Decay of the squared gradient's running mean (beta2).
    pub beta2: f64,
    /// Term added to the denominator for numerical stability (epsilon).
    pub eps: f64,
    /// Decoupled weight decay: the parameter shrinks by lr * weight_decay.
    pub weight_decay: f64,
}

/// Tensors of an update: contiguous views of equal length, each in a buffer of its own.
#[derive(Clone, Copy, Debug)]
pub struct AdamWState<'a> {
    /// Master parameter, f32 or bf16.
    pub master: &'a Tensor,
    /// Gradient, in the dtype of `master`.
    pub grad: &'a Tensor,
    /// Running mean of the gradient, f32 or bf16.
    pub exp_avg: &'a Tensor,
    /// Running mean of the squared gradient, in the dtype of `exp_avg`.
    pub exp_avg_sq: &'a Tensor,
    /// Copy of the parameter in the compute dtype, rewritten after the update; `None` if `master` itself is used.
    pub compute: Option<&'a Tensor>,
}

/// Stochastic rounding of a bf16 master parameter: up or down with a probability by the distance, so that the mean is exact.
///
/// The random numbers depend on `key` and the index of an element in the whole parameter, so a shard is rounded as the whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StochasticRounding {
    /// Seed of the random numbers.
    pub key: u64,
    /// Position of the tensors' elements in the parameter.
    pub position: ShardPosition,
}

/// Position of consecutive elements of a shard in the whole parameter, which is seen as a matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardPosition {
    /// Elements of a row of the parameter.
    pub row_len: usize,
    /// Columns of the shard.
    pub columns: Range<usize>,
    /// Number of elements of these columns before the first element.
    pub first: usize,
}

impl ShardPosition {
    /// Returns the position of element i in the whole parameter, and the number of elements that remain in its row.
    pub(super) fn of_element(&self, i: usize) -> (usize, usize) {
        let width = self.columns.len();
        let (row, column) = ((self.first + i) / width, (self.first + i) % width);
        (row * self.row_len + self.columns.start + column, width - column)
    }
}

/// Scalars of an update, computed in f64 and rounded once.
///
/// With `c = sqrt(1 - beta2^n)`, `m / (sqrt(v) / c + eps)` equals `c m / (sqrt(v) + c eps)`. `AdamWStep` has c and the
/// bias correction of m.
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
