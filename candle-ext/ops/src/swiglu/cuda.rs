//! `swiglu` on CUDA: launches of `kernel.cu`.

use candle_core::{Result, Tensor};

use crate::cuda::{Arg, Out, address, gpu, kernels, suffix};

kernels!("swiglu");

const OP: &str = "swiglu";
/// Elements of a thread, about.
const PER_THREAD: usize = 8;

/// Returns y.
pub(super) fn forward(gate: &Tensor, up: &Tensor) -> Result<Out> {
    let on = gpu(OP, gate)?;
    let n = gate.elem_count();
    let y = Out::new(on, gate.dtype(), n)?;
    let args =
        [Arg::Address(address(OP, gate)?), Arg::Address(address(OP, up)?), Arg::Address(y.address), Arg::I64(n as i64)];
    let name = format!("forward_{}", suffix(OP, gate.dtype())?);
    // SAFETY: all have n elements of one format.
    unsafe { KERNELS.launch_flat(on, &name, n, PER_THREAD, &args)? };
    Ok(y)
}

/// Returns the gradients of gate and up.
pub(super) fn backward(gate: &Tensor, up: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)> {
    let on = gpu(OP, gate)?;
    let n = gate.elem_count();
    let (d_gate, d_up) = (Out::new(on, gate.dtype(), n)?, Out::new(on, gate.dtype(), n)?);
    let args = [
        Arg::Address(address(OP, gate)?),
        Arg::Address(address(OP, up)?),
        Arg::Address(address(OP, dy)?),
        Arg::Address(d_gate.address),
        Arg::Address(d_up.address),
        Arg::I64(n as i64),
    ];
    let name = format!("backward_{}", suffix(OP, gate.dtype())?);
    // SAFETY: all have n elements of one format.
    unsafe { KERNELS.launch_flat(on, &name, n, PER_THREAD, &args)? };
    Ok((d_gate.into_tensor(gate.shape()), d_up.into_tensor(gate.shape())))
}
