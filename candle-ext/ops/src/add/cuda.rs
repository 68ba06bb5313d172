//! `add` on CUDA: a launch of `kernel.cu`.

use candle_core::{Result, Tensor};

use crate::cuda::{Arg, Out, address, gpu, kernels, suffix};

kernels!("add");

const OP: &str = "add";
/// Elements per thread, approximately.
const PER_THREAD: usize = 8;

/// Returns y = a + b.
pub(super) fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let on = gpu(OP, a)?;
    let n = a.elem_count();
    let y = Out::new(on, a.dtype(), n)?;
    let args =
        [Arg::Address(address(OP, a)?), Arg::Address(address(OP, b)?), Arg::Address(y.address), Arg::I64(n as i64)];
    let name = match (suffix(OP, a.dtype())?, suffix(OP, b.dtype())?) {
        (a, b) if a == b => format!("add_{a}"),
        (a, b) => format!("add_{a}_{b}"),
    };
    // SAFETY: all tensors have n elements in the dtypes of the kernel's name.
    unsafe { KERNELS.launch_flat(on, &name, n, PER_THREAD, &args)? };
    Ok(y.into_tensor(a.shape()))
}
