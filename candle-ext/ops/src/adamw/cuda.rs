//! `adamw` on CUDA: launches of `kernel.cu`.

use candle_core::{DType, Result, Tensor};

use super::AdamW;
use crate::cuda::{Arg, address, gpu, kernels, suffix};

kernels!("adamw");

const OP: &str = "adamw";
/// Elements of a thread, about.
const PER_THREAD: usize = 4;

/// Updates master, its two moments and perhaps the compute copy.
pub(super) fn run(
    hyper: &AdamW,
    master: &Tensor,
    grad: &Tensor,
    [mean, square]: [&Tensor; 2],
    compute: Option<&Tensor>,
) -> Result<()> {
    let on = gpu(OP, master)?;
    let n = master.elem_count();
    let copy = compute.map_or(Ok(0), |compute| address(OP, compute))?;
    let mut args = vec![
        Arg::Address(address(OP, master)?),
        Arg::Address(address(OP, grad)?),
        Arg::Address(address(OP, mean)?),
        Arg::Address(address(OP, square)?),
        Arg::Address(copy),
        Arg::I64(n as i64),
    ];
    args.extend(factors(hyper).map(|factor| Arg::F32(factor as f32)));
    let name = format!("step_{}", suffix(OP, compute.map_or(DType::F32, Tensor::dtype))?);
    // SAFETY: all have n elements, the copy those of the kernel's format; each lies in a buffer of its own.
    unsafe { KERNELS.launch_flat(on, &name, n, PER_THREAD, &args) }
}

/// The kernel's scalars. With c = sqrt(1 - b2^step), m / (sqrt(v) / c + eps) is c m / (sqrt(v) + c eps).
fn factors(hyper: &AdamW) -> [f64; 8] {
    let AdamW { lr, beta1, beta2, eps, weight_decay, grad_scale, .. } = *hyper;
    let step = hyper.step as f64;
    let c = (1.0 - beta2.powf(step)).sqrt();
    let step_size = lr / (1.0 - beta1.powf(step)) * c;
    [grad_scale, 1.0 - lr * weight_decay, beta1, 1.0 - beta1, beta2, 1.0 - beta2, step_size, eps * c]
}
