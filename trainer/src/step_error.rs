//! Errors of a step that end a run: a loss or gradient that is not finite, a loss spike, and no applied step.

use candle_core::DType;

/// A run whose steps were all skipped.
#[derive(Debug, thiserror::Error)]
#[error(
    "failed to train: all {n_steps} steps were skipped, because the loss or the gradient was not finite, or the loss was \
     above the limit of loss_watchdog; nothing was exported. {}Check the weights and the data, or lower the learning rate",
    overflow_remedy(*.dtype)
)]
pub struct AllStepsSkipped {
    pub(crate) n_steps: usize,
    /// The dtype of the model's computation.
    pub(crate) dtype: DType,
}

/// A loss spike that ends the run.
#[derive(Debug, thiserror::Error)]
#[error(
    "failed to train: the loss of step {step} is {loss}, above the limit of loss_watchdog, {max_loss}{why}. Its update was not \
     applied, and the checkpoints are of earlier steps. {kept}Lower the learning rate, check the rows of the batch, or set \
     loss_watchdog.action to skip or rewind"
)]
pub struct LossSpike {
    pub(crate) step: usize,
    pub(crate) loss: f64,
    pub(crate) max_loss: f64,
    /// The number of spikes before, if that ends the run.
    pub(crate) why: String,
    /// The command that replays the batch, if it is kept.
    pub(crate) kept: String,
}

/// A non-finite loss or gradient, and the samples that it came from.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error(
    "failed to compute step {step}: the {part}. {rows}. {}Lower the learning rate, check these samples, or set \
     on_nonfinite: skip",
    overflow_remedy(*.dtype)
)]
pub struct NonFinite {
    pub(crate) step: usize,
    /// The part of the step that is not finite, with its cause if that is known.
    pub(crate) part: String,
    /// The samples.
    pub(crate) rows: String,
    /// The dtype of the model's computation.
    pub(crate) dtype: DType,
}

/// Returns the sentence about f16, whose range the model's values may exceed; empty for dtypes with the range of f32.
fn overflow_remedy(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "Values above 65504 overflow in f16: set model.dtype to bf16 or f32. ",
        _ => "",
    }
}
