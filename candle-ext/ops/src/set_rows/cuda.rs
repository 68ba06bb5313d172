//! `set_rows` on CUDA: a launch of `kernel.cu`.

use candle_core::{Result, Tensor};

use crate::cuda::{Arg, address, gpu, kernels, same_dtype, suffix};
use crate::transfer::upload_table;

kernels!("set_rows");

const OP: &str = "set_rows";
const THREADS: usize = 128;

/// Computes dst[rows[i]] = src[i] for rows of `d` elements.
pub(super) fn set_rows(dst: &Tensor, rows: &[u32], src: &Tensor, d: usize) -> Result<()> {
    same_dtype(OP, dst, src)?;
    if rows.is_empty() || d == 0 {
        return Ok(());
    }
    let on_device = upload_table(rows, rows.len(), dst.device())?;
    let args = [
        Arg::Address(address(OP, src)?),
        Arg::Address(address(OP, &on_device)?),
        Arg::Address(address(OP, dst)?),
        Arg::I32(d as i32),
    ];
    let name = format!("set_rows_{}", suffix(OP, dst.dtype())?);
    // SAFETY: src has rows.len() rows of d elements, and each number is a valid row of dst.
    unsafe { KERNELS.launch(gpu(OP, dst)?, &name, [rows.len(), 1, 1], THREADS, &args) }
}
