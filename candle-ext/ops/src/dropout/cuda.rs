//! `dropout` on CUDA: launches of `kernel.cu`.

use candle_core::{Result, Tensor};

use super::Dropout;
use crate::cuda::{Arg, Out, address, gpu, kernels, suffix};

kernels!("dropout");

const OP: &str = "dropout";
/// Elements of a thread, about.
const PER_THREAD: usize = 8;

/// Returns y = x mask / (1 - p).
pub(super) fn apply(x: &Tensor, spec: Dropout) -> Result<Out> {
    let on = gpu(OP, x)?;
    let n = x.elem_count();
    let y = Out::new(on, x.dtype(), n)?;
    let args = [
        Arg::Address(address(OP, x)?),
        Arg::Address(y.address),
        Arg::I64(n as i64),
        Arg::U64(spec.key),
        Arg::U64(spec.threshold()),
        Arg::F32(spec.scale()),
    ];
    let name = format!("apply_{}", suffix(OP, x.dtype())?);
    // SAFETY: both have n elements of one format.
    unsafe { KERNELS.launch_flat(on, &name, n, PER_THREAD, &args)? };
    Ok(y)
}
