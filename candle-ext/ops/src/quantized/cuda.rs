//! `dequantize` on CUDA: a launch of `kernel.cu`.

use candle_core::{DType, Result, Tensor};

use super::format::{QuantFormat, QuantShape};
use crate::cuda::{Arg, Out, address, gpu, kernels, suffix};
use crate::transfer::upload_table;

kernels!("quantized");

const OP: &str = "dequantize";
/// Elements per thread, approximately.
const PER_THREAD: usize = 8;

/// Returns the dequantized matrix [n, k], each element rounded once.
pub(super) fn dequantize(bytes: &Tensor, format: &QuantFormat, shape: QuantShape, dtype: DType) -> Result<Tensor> {
    let on = gpu(OP, bytes)?;
    let y = Out::new(on, dtype, shape.n * shape.k)?;
    let codes = upload_table(format.codes, format.codes.len(), bytes.device())?;
    let sizes = [shape.n, shape.k, shape.block_rows, shape.block_columns].map(|size| Arg::I64(size as i64));
    let [n, k, block_rows, block_columns] = sizes;
    let start = address(OP, bytes)?;
    let scales = start + shape.scales_start() as u64;
    let addresses = [start, scales, address(OP, &codes)?, y.address].map(Arg::Address);
    let [bytes, scales, codes, out] = addresses;
    let args = [bytes, scales, codes, out, n, k, block_rows, block_columns];
    let name = format!("dequantize_{}", suffix(OP, dtype)?);
    // SAFETY: the bytes hold n * k codes and the scales of all blocks, the table 256 values, y has n * k elements.
    unsafe { KERNELS.launch_flat(on, &name, shape.n * shape.k, PER_THREAD, &args)? };
    Ok(y.into_tensor(vec![shape.n, shape.k]))
}
