//! `weighted_swiglu` on CUDA: launches of `swiglu.cuh`.

use candle_core::{DType, Result, Tensor};

use crate::cuda::{Arg, Out, address, gpu, suffix};
use crate::moe::KERNELS;

const OP: &str = "weighted_swiglu";
const THREADS: usize = 256;

/// Returns y.
pub(super) fn forward(gate_up: &Tensor, weights: &Tensor, (n, f): (usize, usize)) -> Result<Tensor> {
    let on = gpu(OP, gate_up)?;
    let y = Out::new(on, gate_up.dtype(), n * f)?;
    let inputs = [address(OP, gate_up)?, address(OP, weights)?].map(Arg::Address);
    let args = [&inputs[..], &[Arg::Address(y.address), Arg::I32(f as i32)]].concat();
    let name = format!("swiglu_forward_{}", suffix(OP, gate_up.dtype())?);
    // SAFETY: gate_up has n rows of 2 f elements, y of f; there are n weights.
    unsafe { KERNELS.launch(on, &name, [n, 1, 1], threads(f), &args)? };
    Ok(y.into_tensor((n, f)))
}

/// Returns the gradients of gate_up and of the weights.
pub(super) fn backward(gate_up: &Tensor, weights: &Tensor, dy: &Tensor, (n, f): (usize, usize)) -> Result<[Tensor; 2]> {
    let on = gpu(OP, gate_up)?;
    let (d_gate_up, d_weights) = (Out::new(on, gate_up.dtype(), n * 2 * f)?, Out::new(on, DType::F32, n)?);
    let inputs = [address(OP, gate_up)?, address(OP, weights)?, address(OP, dy)?].map(Arg::Address);
    let outputs = [d_gate_up.address, d_weights.address].map(Arg::Address);
    let args = [&inputs[..], &outputs, &[Arg::I32(f as i32)]].concat();
    let name = format!("swiglu_backward_{}", suffix(OP, gate_up.dtype())?);
    // SAFETY: as above; the gradients have the sizes of the inputs.
    unsafe { KERNELS.launch(on, &name, [n, 1, 1], threads(f), &args)? };
    Ok([d_gate_up.into_tensor((n, 2 * f)), d_weights.into_tensor(n)])
}

/// Returns the threads of a row's block: about eight elements per thread.
fn threads(f: usize) -> usize {
    (f / 8).next_multiple_of(32).clamp(32, THREADS)
}
