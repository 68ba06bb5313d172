//! The rules by which gradients are clipped, scaled and skipped.

use serde::Serialize;

/// The factor on losses that keeps small gradients from vanishing in half precision, by DeepSpeed's rules.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LossScaling {
    /// The factor before the first step.
    pub initial: f64,
    /// It doubles after so many steps without an overflow; 0 leaves it as it is.
    pub window: usize,
    /// It is halved at the overflow of this number, 1 for the first, counted anew whenever it doubles.
    pub hysteresis: usize,
    /// It is never halved below this: an overflow there is one that scaling cannot cure.
    pub min: f64,
}

/// The treatment of a step's gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradPolicy {
    /// Gradients of a larger norm are scaled down to it, as torch's clip_grad_norm_ does.
    pub max_norm: Option<f64>,
    /// The factor on losses.
    pub loss_scaling: LossScaling,
    /// Once a loss or a gradient was not finite, nothing is applied any more.
    pub stop_on_nonfinite: bool,
}

/// The largest factor on losses. Gradients that need more are zero.
pub(super) const MAX_LOSS_SCALE: f64 = (1u64 << 32) as f64;

impl LossScaling {
    /// Losses as they are.
    pub const NONE: Self = Self { initial: 1.0, window: 0, hysteresis: 1, min: 1.0 };
}

impl GradPolicy {
    /// Gradients as they are, and only finite ones.
    pub const NO_CLIP_NO_SCALE: Self =
        Self { max_norm: None, loss_scaling: LossScaling::NONE, stop_on_nonfinite: false };
}
