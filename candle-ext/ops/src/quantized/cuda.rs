//! `dequantize` on CUDA: a launch of `kernel.cu`.

use candle_core::{DType, Result, Tensor};

use super::format::{QuantFormat, QuantShape};
use crate::cuda::{Arg, DeviceAddress, Out, address, gpu, kernels, suffix};
use crate::transfer::upload_table;

kernels!("quantized");

const OP: &str = "dequantize";
/// Elements per thread, approximately.
const PER_THREAD: usize = 8;

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
    let y = Out::new(on, dtype, shape.n * shape.k)?;
    let values = upload_table(values, values.len(), owner.device())?;
    let sizes = [shape.n, shape.k, shape.block_rows, shape.block_columns].map(|size| Arg::I64(size as i64));
    let [n, k, block_rows, block_columns] = sizes;
    let [codes, scales, values, out] = [codes, scales, address(OP, &values)?, y.address].map(Arg::Address);
    let args = [codes, scales, values, out, n, k, block_rows, block_columns];
    let name = format!("dequantize_{}", suffix(OP, dtype)?);
    // SAFETY: the caller guarantees codes and scales; the table has 256 values, y n * k elements.
    unsafe { KERNELS.launch_flat(on, &name, shape.n * shape.k, PER_THREAD, &args)? };
    Ok(y.into_tensor(vec![shape.n, shape.k]))
}
