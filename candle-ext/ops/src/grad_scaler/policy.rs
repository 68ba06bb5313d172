//! Policy for gradient clipping, loss scaling and non-finite steps.

use serde::Serialize;

/// Dynamic loss scaling for fp16, by the rules of DeepSpeed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LossScaling {
    /// Initial loss scale.
    pub initial: f64,
    /// Number of steps without an overflow after which the loss scale doubles; 0 disables dynamic scaling.
    pub window: usize,
    /// Number of overflows that halve the loss scale (1: every overflow). The count restarts when the scale doubles.
    pub hysteresis: usize,
    /// Lower bound of the loss scale. An overflow at this scale counts as non-finite.
    pub min: f64,
}

/// Treatment of a step's gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradPolicy {
    /// Maximum gradient norm for clipping, as torch's `clip_grad_norm_`; `None` disables clipping.
    pub max_norm: Option<f64>,
    /// Dynamic loss scaling.
    pub loss_scaling: LossScaling,
    /// True to skip all steps after one with a non-finite loss or gradient.
    pub stop_on_nonfinite: bool,
}

/// Limit of the sum of a step's losses. A step above it is skipped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossLimit {
    /// Number of the losses in the sum: the first ones of those that the scaler gets.
    pub n_losses: usize,
    /// Largest sum.
    pub max_sum: f64,
}

impl LossLimit {
    /// No limit.
    pub const NONE: Self = Self { n_losses: 0, max_sum: f64::INFINITY };
}

/// Upper bound of the loss scale. Gradients that need more are zero.
pub(super) const MAX_LOSS_SCALE: f64 = (1u64 << 32) as f64;

impl LossScaling {
    /// No loss scaling.
    pub const NONE: Self = Self { initial: 1.0, window: 0, hysteresis: 1, min: 1.0 };
}

impl GradPolicy {
    /// Neither clipping nor loss scaling; only non-finite steps are skipped.
    pub const NO_CLIP_NO_SCALE: Self =
        Self { max_norm: None, loss_scaling: LossScaling::NONE, stop_on_nonfinite: false };
}
