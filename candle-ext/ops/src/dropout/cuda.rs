//! `dropout` on CUDA: launches of `kernel.cu`.

use candle_core::{Result, Tensor};

use super::mask::Dropout;
use super::rows::DropoutSpan;
use crate::cuda::{Arg, Out, address, gpu, kernels, suffix};

kernels!("dropout");

const OP: &str = "dropout";
/// Elements per thread, approximately.
const PER_THREAD: usize = 8;

/// Returns y = x mask / (1 - p), with the mask of each span's position in the whole tensor.
pub(super) fn apply(x: &Tensor, spec: Dropout, runs: &[DropoutSpan]) -> Result<Out> {
    let on = gpu(OP, x)?;
    let y = Out::new(on, x.dtype(), x.elem_count())?;
    let name = format!("apply_{}", suffix(OP, x.dtype())?);
    for run in runs {
        let (n, offset) = (run.local.len(), (run.local.start * x.dtype().size_in_bytes()) as u64);
        let args = [
            Arg::Address(address(OP, x)? + offset),
            Arg::Address(y.address + offset),
            Arg::I64(n as i64),
            Arg::I64(run.width as i64),
            Arg::I64(run.global_start as i64),
            Arg::I64(run.stride as i64),
            Arg::U64(spec.key),
            Arg::I32(i32::from(spec.threshold())),
            Arg::F32(spec.scale()),
        ];
        // SAFETY: both have n elements of one dtype.
        unsafe { KERNELS.launch_flat(on, &name, n, PER_THREAD, &args)? };
    }
    Ok(y)
}
