//! Gradient clipping, loss scaling and skipping of non-finite steps, decided on the device.
//!
//! The host does not wait to learn whether gradients are finite. The decision stays on the device, where the
//! optimizer's op reads it; the host reads it when the step is done.

#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;
mod policy;

use candle_core::{DType, Device, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use crate::device::on_device;
use crate::floats::FloatsMut;
use crate::storage::{host, update};
use crate::transfer::to_host;
use policy::MAX_LOSS_SCALE;
pub use policy::{GradPolicy, LossLimit, LossScaling};

/// Outcome of a step: the weights were updated, or the reason why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpdateOutcome {
    /// Updated: the gradients were applied.
    Applied,
    /// Skipped: the gradients overflowed, and the loss scale was reduced.
    Overflowed,
    /// Skipped: a loss or a gradient was not finite.
    NonFinite,
    /// Skipped because of an earlier [`UpdateOutcome::NonFinite`] under [`GradPolicy::stop_on_nonfinite`].
    Halted,
    /// Skipped: the loss was above its [`LossLimit`].
    LossSpike,
}

/// Decision about a step's gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepDecision {
    /// Gradient norm after unscaling, before clipping.
    pub norm: f64,
    /// Outcome of the step.
    pub outcome: UpdateOutcome,
    /// Scaler state for the next step.
    pub next: ScalerState,
}

/// State of the dynamic loss scaler, as a checkpoint stores it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScalerState {
    /// Number of weight updates so far; skipped steps do not count.
    pub n_updates: usize,
    /// Loss scale of the next step.
    pub loss_scale: f64,
    /// Steps since the last overflow or increase of the loss scale.
    pub good_steps: usize,
    /// Overflows that are tolerated before the loss scale is halved (DeepSpeed's hysteresis).
    #[serde(alias = "tries_left")]
    pub hysteresis_left: usize,
}

/// Gradient scaler: unscales and clips gradients, and skips overflowed steps, on the device.
pub struct GradScaler {
    policy: GradPolicy,
    /// State vector, f32 [`State::LEN`].
    state: Tensor,
}

/// A decision to update the weights.
#[derive(Clone, Copy)]
pub(crate) struct AppliedUpdate {
    /// Factor on the gradient: unscaling times clipping.
    pub(crate) grad_scale: f32,
    /// Number of the update, counted from 1.
    pub(crate) number: f32,
}

/// Indices into the state vector; kernel.cu has the same.
struct State;

impl State {
    const NORM: usize = 0;
    /// Factor on the gradients.
    const FACTOR: usize = 1;
    const OUTCOME: usize = 2;
    const N_UPDATES: usize = 3;
    const LOSS_SCALE: usize = 4;
    const GOOD_STEPS: usize = 5;
    const HYSTERESIS_LEFT: usize = 6;
    const LEN: usize = 7;
}

impl StepDecision {
    /// Reads a decision from the values of [`GradScaler::state`].
    pub fn read(state: &[f32]) -> Self {
        let count = |at: usize| state[at] as usize;
        let outcome = match count(State::OUTCOME) {
            0 => UpdateOutcome::Applied,
            1 => UpdateOutcome::Overflowed,
            2 => UpdateOutcome::NonFinite,
            3 => UpdateOutcome::Halted,
            _ => UpdateOutcome::LossSpike,
        };
        Self {
            norm: f64::from(state[State::NORM]),
            outcome,
            next: ScalerState {
                n_updates: count(State::N_UPDATES),
                loss_scale: f64::from(state[State::LOSS_SCALE]),
                good_steps: count(State::GOOD_STEPS),
                hysteresis_left: count(State::HYSTERESIS_LEFT),
            },
        }
    }
}

impl GradScaler {
    /// Creates a scaler that has done `n_done_updates` updates, with the policy's initial loss scale.
    pub fn new(policy: GradPolicy, n_done_updates: usize, device: &Device) -> Result<Self> {
        let LossScaling { initial, hysteresis, .. } = policy.loss_scaling;
        let first =
            ScalerState { n_updates: n_done_updates, loss_scale: initial, good_steps: 0, hysteresis_left: hysteresis };
        Self::from_state(policy, &first, device)
    }

    /// Creates a scaler from a checkpointed state.
    pub fn from_state(policy: GradPolicy, from: &ScalerState, device: &Device) -> Result<Self> {
        let mut state = [0.0; State::LEN];
        state[State::FACTOR] = 1.0;
        state[State::N_UPDATES] = from.n_updates as f32;
        state[State::LOSS_SCALE] = from.loss_scale as f32;
        state[State::GOOD_STEPS] = from.good_steps as f32;
        state[State::HYSTERESIS_LEFT] = from.hysteresis_left as f32;
        Ok(Self { policy, state: Tensor::new(&state, device)? })
    }

    /// Returns the state vector on the device, for [`StepDecision::read`].
    pub fn state(&self) -> &Tensor {
        &self.state
    }

    /// Returns 1 if the last step was applied and 0 if it was skipped, an f32 scalar on the device.
    pub fn applied(&self) -> Result<Tensor> {
        self.state.narrow(0, State::OUTCOME, 1)?.squeeze(0)?.eq(0f32)?.to_dtype(DType::F32)
    }

    /// Copies the scaler to the host for optimizer states on the host. Returns `None` if the step is skipped. Waits for
    /// the device.
    pub fn to_host(&self) -> Result<Option<Self>> {
        let here = Self { policy: self.policy, state: to_host(&self.state)? };
        let applies = StepDecision::read(&to_host(&here.state)?.to_vec1()?).outcome == UpdateOutcome::Applied;
        Ok(applies.then_some(here))
    }

    /// Returns the factor on the gradients of the last step, unscaling times clipping, an f32 scalar on the device.
    pub fn grad_scale(&self) -> Result<Tensor> {
        self.state.narrow(0, State::FACTOR, 1)?.squeeze(0)
    }

    /// Returns the update to apply; `None` if the step is skipped. CPU only, where no wait is needed.
    pub(crate) fn applied_update(&self) -> Result<Option<AppliedUpdate>> {
        let state = host("grad_scaler", &self.state)?;
        let state = state.slice::<f32>()?;
        let update = AppliedUpdate { grad_scale: state[State::FACTOR], number: state[State::N_UPDATES] };
        Ok((state[State::OUTCOME] == 0.0).then_some(update))
    }

    /// Returns the loss scale, an f32 scalar on the device; `None` if the policy never scales the loss.
    ///
    /// Multiply the loss by it before backward.
    pub fn loss_scale(&self) -> Result<Option<Tensor>> {
        if self.policy.loss_scaling == LossScaling::NONE {
            return Ok(None);
        }
        self.state.narrow(0, State::LOSS_SCALE, 1)?.squeeze(0).map(Some)
    }

    /// Decides about a step from its gradients' sums of squares, f64 [n], and losses, f32 [m].
    pub fn update(&self, squares: &Tensor, losses: &Tensor) -> Result<()> {
        self.update_within(LossLimit::NONE, squares, losses)
    }

    /// Decides like [`GradScaler::update`], and skips the step if its loss is above `limit`.
    pub fn update_within(&self, limit: LossLimit, squares: &Tensor, losses: &Tensor) -> Result<()> {
        if limit.n_losses > losses.elem_count() {
            bail!("grad_scaler: the limit is for {} losses of {}", limit.n_losses, losses.elem_count())
        }
        if squares.dtype() != DType::F64 || losses.dtype() != DType::F32 {
            bail!("grad_scaler: squares are {:?} and losses {:?}, want f64 and f32", squares.dtype(), losses.dtype())
        }
        let (squares, losses) = (squares.contiguous()?, losses.contiguous()?);
        on_device!("grad_scaler", self.state, {
            cpu => {
                let (squares, losses) = (host("grad_scaler", &squares)?, host("grad_scaler", &losses)?);
                let (squares, losses) = (squares.slice::<f64>()?, losses.slice::<f32>()?);
                update(&self.state, "grad_scaler", |state| {
                    if let FloatsMut::F32(state) = state {
                        decide(state, &self.policy, limit, (squares, losses));
                    }
                    Ok(())
                })
            },
            cuda => cuda::update(&self.state, &self.policy, limit, [&squares, &losses]),
        })
    }
}

fn decide(state: &mut [f32], policy: &GradPolicy, limit: LossLimit, (squares, losses): (&[f64], &[f32])) {
    let scaling = &policy.loss_scaling;
    let was_fatal = [2.0, 3.0].contains(&state[State::OUTCOME]);
    if policy.stop_on_nonfinite && was_fatal {
        state[State::OUTCOME] = 3.0;
        return;
    }
    let loss_scale = f64::from(state[State::LOSS_SCALE]);
    let norm = squares.iter().sum::<f64>().sqrt() / loss_scale;
    state[State::NORM] = norm as f32;
    let is_loss_finite = losses.iter().all(|loss| loss.is_finite());
    let loss: f64 = losses[..limit.n_losses].iter().copied().map(f64::from).sum();
    if norm.is_finite() && is_loss_finite && loss > limit.max_sum {
        state[State::OUTCOME] = 4.0;
    } else if norm.is_finite() && is_loss_finite {
        let clip = policy.max_norm.map_or(1.0, |max| (max / (norm + 1e-6)).min(1.0));
        state[State::OUTCOME] = 0.0;
        state[State::FACTOR] = (clip / loss_scale) as f32;
        state[State::N_UPDATES] += 1.0;
        state[State::GOOD_STEPS] += 1.0;
        if scaling.window > 0 && state[State::GOOD_STEPS] >= scaling.window as f32 {
            state[State::LOSS_SCALE] = (loss_scale * 2.0).min(MAX_LOSS_SCALE) as f32;
            state[State::GOOD_STEPS] = 0.0;
            state[State::HYSTERESIS_LEFT] = scaling.hysteresis as f32;
        }
    } else if is_loss_finite && scaling.window > 0 && loss_scale > scaling.min {
        state[State::OUTCOME] = 1.0;
        state[State::GOOD_STEPS] = 0.0;
        if state[State::HYSTERESIS_LEFT] > 1.0 {
            state[State::HYSTERESIS_LEFT] -= 1.0;
        } else {
            state[State::LOSS_SCALE] = (loss_scale / 2.0).max(scaling.min) as f32;
        }
    } else {
        state[State::OUTCOME] = 2.0;
    }
}
