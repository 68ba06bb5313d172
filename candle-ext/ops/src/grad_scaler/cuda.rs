//! `grad_scaler` on CUDA: a launch of `kernel.cu`.

use candle_core::{Result, Tensor};

use super::policy::{GradPolicy, LossLimit, MAX_LOSS_SCALE};
use crate::cuda::{Arg, address, gpu, kernels};

kernels!("grad_scaler");

const OP: &str = "grad_scaler";
/// Threads of the launch: one warp.
const THREADS: usize = 32;

/// Decides about the step's gradients from the sums of their squares and the losses.
pub(super) fn update(
    state: &Tensor,
    policy: &GradPolicy,
    limit: LossLimit,
    [squares, losses]: [&Tensor; 2],
) -> Result<()> {
    let scaling = &policy.loss_scaling;
    let args = [
        Arg::Address(address(OP, state)?),
        Arg::Address(address(OP, squares)?),
        Arg::Address(address(OP, losses)?),
        Arg::I32(squares.elem_count() as i32),
        Arg::I32(losses.elem_count() as i32),
        Arg::I32(limit.n_losses as i32),
        Arg::I32(i32::from(policy.stop_on_nonfinite)),
        Arg::I32(scaling.window as i32),
        Arg::I32(scaling.hysteresis as i32),
        Arg::F64(policy.max_norm.unwrap_or(f64::INFINITY)),
        Arg::F64(scaling.min),
        Arg::F64(MAX_LOSS_SCALE),
        Arg::F64(limit.max_sum),
    ];
    // SAFETY: `squares` and `losses` have the lengths in the arguments; the state has its full length.
    unsafe { KERNELS.launch(gpu(OP, squares)?, "update_scaler", [1, 1, 1], THREADS, &args) }
}
