//! `dequantize` on CUDA: a launch of `kernel.cu`.

use candle_core::{DType, Result, Tensor};

use super::format::{QuantFormat, QuantShape};
use crate::cuda::{Arg, DeviceAddress, Out, address, gpu, kernels, suffix};
use crate::fp8::Fp8Format;
use crate::transfer::upload_table;

kernels!("quantized");

const OP: &str = "dequantize";
/// Threads of a block; a warp has elements of one row.
const THREADS: usize = 256;
const ROWS: usize = THREADS / 32;
/// Packs of a thread, as in the kernel.
const PACKS: usize = 4;

/// Returns the dequantized matrix [n, k], each element rounded once.
pub(super) fn dequantize(bytes: &Tensor, format: &QuantFormat, shape: QuantShape, dtype: DType) -> Result<Tensor> {
    let codes = address(OP, bytes)?;
    let scales = codes + shape.scales_start() as u64;
    // SAFETY: the bytes hold n * k codes and the scales of all blocks.
    unsafe { dequantize_parts(bytes, [codes, scales], format.codes, shape, dtype) }
}

/// Dequantizes codes and scales at these addresses, on the device of `owner`.
///
/// # Safety
///
/// The addresses must hold n * k codes and the f32 scales of all blocks, row by row.
pub(crate) unsafe fn dequantize_parts(
    owner: &Tensor,
    [codes, scales]: [DeviceAddress; 2],
    values: &[f32; 256],
    shape: QuantShape,
    dtype: DType,
) -> Result<Tensor> {
    let on = gpu(OP, owner)?;
    let (n, k) = (shape.n, shape.k);
    let (block_rows, block_columns) = (shape.block_rows.min(n.max(1)), shape.block_columns.min(k.max(1)));
    let y = Out::new(on, dtype, n * k)?;
    // The kernel computes the values of E4M3.
    let table = match std::ptr::eq(values, Fp8Format::E4m3.values()) {
        true => None,
        false => Some(upload_table(values, values.len(), owner.device())?),
    };
    let width = width([k, block_columns], dtype, [codes, y.address]);
    let addresses = [codes, scales, table.as_ref().map_or(Ok(0), |table| address(OP, table))?, y.address];
    let mut args = addresses.map(Arg::Address).to_vec();
    for size in [n, k, block_rows, block_columns, shape.blocks_a_row(), width] {
        args.push(Arg::I32(i32::try_from(size).map_err(candle_core::Error::wrap)?));
    }
    let name = format!("dequantize_{}", suffix(OP, dtype)?);
    let grid = [n.div_ceil(ROWS), k.div_ceil(PACKS * 32 * width), 1];
    // SAFETY: the caller guarantees codes and scales; a table has 256 values, y n * k elements. Packs of `width` elements
    // are aligned, and within a row and a block.
    unsafe { KERNELS.launch(on, &name, grid, THREADS, &args)? };
    Ok(y.into_tensor(vec![n, k]))
}

/// Returns the number of elements that a thread converts: 16 bytes of output, or 1 if rows, blocks or addresses are no
/// multiples of them.
fn width([k, block_columns]: [usize; 2], dtype: DType, [codes, y]: [DeviceAddress; 2]) -> usize {
    let wide = 16 / dtype.size_in_bytes();
    let fits = k.is_multiple_of(wide)
        && block_columns.is_multiple_of(wide)
        && codes.is_multiple_of(wide as u64)
        && y.is_multiple_of(16);
    if fits { wide } else { 1 }
}
