//! `adamw` on CUDA: launches of `kernel.cu`.

use candle_core::{DType, Result, Tensor};

use super::args::{AdamW, AdamWState, Factors, StochasticRounding};
use crate::cuda::{Arg, address, gpu, kernels, suffix};
use crate::grad_scaler::GradScaler;

kernels!("adamw");

const OP: &str = "adamw";
/// Elements per thread, approximately.
const PER_THREAD: usize = 4;

/// Updates the master parameter, its two moments and the compute copy if there is one. `corrections` are of the step that the
/// scaler has decided on.
pub(super) fn run(
    hyper: &AdamW,
    (scaler, corrections): (&GradScaler, &Tensor),
    state: AdamWState,
    rounding: Option<&StochasticRounding>,
) -> Result<()> {
    let AdamWState { master, grad, exp_avg, exp_avg_sq, compute } = state;
    let n = master.elem_count();
    let Factors { lr, shrink, beta1, one_minus_beta1, beta2, one_minus_beta2, eps } = Factors::of(hyper);
    let copy = compute.map_or(Ok(0), |compute| address(OP, compute))?;
    let mut args = vec![
        Arg::Address(address(OP, master)?),
        Arg::Address(address(OP, grad)?),
        Arg::Address(address(OP, exp_avg)?),
        Arg::Address(address(OP, exp_avg_sq)?),
        Arg::Address(copy),
        Arg::Address(address(OP, scaler.state())?),
        Arg::Address(address(OP, corrections)?),
        Arg::I64(n as i64),
    ];
    args.extend([lr, shrink, beta1, one_minus_beta1, beta2, one_minus_beta2, eps].map(Arg::F32));
    let copied = compute.map_or(master.dtype(), Tensor::dtype);
    let moments = suffix(OP, exp_avg.dtype())?;
    let name = match rounding {
        None => format!("step_{}_{}_{moments}", suffix(OP, master.dtype())?, suffix(OP, copied)?),
        Some(StochasticRounding { key, position }) => {
            args.push(Arg::U64(*key));
            let numbers = [position.row_len, position.columns.start, position.columns.len(), position.first];
            args.extend(numbers.map(|number| Arg::I64(number as i64)));
            format!("stochastic_step_{moments}")
        }
    };
    // SAFETY: all buffers have n elements in the dtypes of the kernel's name, each in a buffer of its own: with stochastic
    // rounding a bf16 master without a copy. The scaler's state and the corrections have their full length.
    unsafe { KERNELS.launch_flat(gpu(OP, master)?, &name, n, PER_THREAD, &args) }
}

/// Computes the bias corrections of the update that `scaler` has decided on, f32 [2].
pub(super) fn bias_corrections(scaler: &GradScaler, [beta1, beta2]: [f64; 2]) -> Result<Tensor> {
    let corrections = Tensor::zeros(2, DType::F32, scaler.state().device())?;
    let args = [
        Arg::Address(address(OP, scaler.state())?),
        Arg::Address(address(OP, &corrections)?),
        Arg::F64(beta1),
        Arg::F64(beta2),
    ];
    // SAFETY: the scaler's state has its full length, and there are two corrections.
    unsafe { KERNELS.launch(gpu(OP, &corrections)?, "bias_corrections", [1, 1, 1], 32, &args)? };
    Ok(corrections)
}
