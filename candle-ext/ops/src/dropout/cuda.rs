//! `dropout` on CUDA: launches of `kernel.cu`.

use candle_core::{Result, Tensor};

use super::mask::Dropout;
use super::rows::DropoutSpan;
use crate::cuda::{Arg, Out, address, gpu, kernels, suffix};

kernels!("dropout");

const OP: &str = "dropout";
/// Elements per thread, approximately.
const PER_THREAD: usize = 8;
/// Address of the keys of rows that have none.
const NO_KEYS: u64 = 0;

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
            Arg::Address(NO_KEYS),
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

/// Returns y = x mask / (1 - p) for rows, each with the mask of its key, from column `first_column` on.
pub(super) fn apply_rows(x: &Tensor, keys: &Tensor, spec: Dropout, first_column: usize) -> Result<Out> {
    let (on, n) = (gpu(OP, x)?, x.elem_count());
    let y = Out::new(on, x.dtype(), n)?;
    let args = [
        Arg::Address(address(OP, x)?),
        Arg::Address(y.address),
        Arg::Address(address(OP, keys)?),
        Arg::I64(n as i64),
        Arg::I64(x.dims()[1] as i64),
        Arg::I64(first_column as i64),
        // Each row is a line of its own mask.
        Arg::I64(0),
        Arg::U64(spec.key),
        Arg::I32(i32::from(spec.threshold())),
        Arg::F32(spec.scale()),
    ];
    // SAFETY: both have n elements of one dtype, and there is a key per row.
    unsafe { KERNELS.launch_flat(on, &format!("apply_{}", suffix(OP, x.dtype())?), n, PER_THREAD, &args)? };
    Ok(y)
}
