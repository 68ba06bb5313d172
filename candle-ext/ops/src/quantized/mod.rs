//! Weights stored as 8-bit codes with scales: element = scale * code value.
//!
//! A quantized matrix [n, k] is one run of bytes: n * k codes row by row, zeros up to a multiple of four, then the scales, f32 in
//! the order of the blocks.

pub(crate) mod cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;
pub(crate) mod format;

use candle_core::{DType, Result, Tensor, bail};

use crate::device::on_device;
use crate::floats::{FloatBuf, check_dtype};
use crate::storage::{self, host};
use crate::transfer::to_host;
use cpu::QuantizedRows;
pub use format::{QuantFormat, ScaleBlock, ScaleRounding, WeightStorage};

/// Quantizes a matrix [n, k] to the nearest codes, ties to the even code: bytes u8 [n_bytes] on the CPU.
///
/// # Errors
/// Elements that are not finite are refused.
pub fn quantize(x: &Tensor, format: &QuantFormat) -> Result<Tensor> {
    check_dtype("quantize", "the matrix", x.dtype())?;
    let shape = format.shape(x.dims())?;
    let x = to_host(&x.detach())?.contiguous()?;
    let bytes = cpu::quantize(host("quantize", &x)?.floats()?, format, shape)?;
    Tensor::from_vec(bytes, shape.n_bytes(), x.device())
}

/// Returns the matrix of `shape` that `bytes` hold, each element rounded once to `dtype`.
pub fn dequantize(bytes: &Tensor, format: &QuantFormat, shape: &[usize], dtype: DType) -> Result<Tensor> {
    check_dtype("dequantize", "the output", dtype)?;
    let sizes = format.shape(shape)?;
    if bytes.dtype() != DType::U8 || bytes.elem_count() != sizes.n_bytes() {
        bail!("dequantize: want {} bytes, got {:?} {:?}", sizes.n_bytes(), bytes.dtype(), bytes.dims())
    }
    let bytes = bytes.contiguous()?;
    on_device!("dequantize", bytes, {
        cpu => {
            let mut out = FloatBuf::unwritten(dtype, sizes.n * sizes.k)?;
            let bytes = host("dequantize", &bytes)?;
            cpu::dequantize(QuantizedRows::new(bytes.slice()?, format, sizes), out.view());
            Ok(storage::tensor(out, shape))
        },
        cuda => cuda::dequantize(&bytes, format, sizes, dtype),
    })
}
