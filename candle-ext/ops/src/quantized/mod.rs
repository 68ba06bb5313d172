//! Weights stored as 8-bit codes with scales: element = scale * code value.
//!
//! A quantized matrix [n, k] is one byte buffer: n * k codes in row-major order, zeros up to a multiple of four, then
//! the f32 scales in block order.

pub(crate) mod cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
pub(crate) mod cuda;
pub(crate) mod format;

use candle_core::{DType, Result, Tensor, bail};

use crate::device::on_device;
use crate::floats::{FloatBuf, check_dtype};
use crate::storage::{self, host};
use crate::transfer::to_host;
use cpu::QuantizedRows;
pub use format::{QuantFormat, ScaleBlock, ScaleRounding, WeightStorage};

/// Quantizes a matrix [n, k] to the nearest codes, ties to the even code. Returns bytes u8 [n_bytes] on the CPU.
///
/// # Errors
///
/// If an element is not finite.
pub fn quantize(x: &Tensor, format: &QuantFormat) -> Result<Tensor> {
    check_dtype("quantize", "the matrix", x.dtype())?;
    let shape = format.shape(x.dims())?;
    let x = to_host(&x.detach())?.contiguous()?;
    let bytes = cpu::quantize(host("quantize", &x)?.floats()?, format, shape)?;
    Tensor::from_vec(bytes, shape.weight_bytes(), x.device())
}

/// Dequantizes `bytes` to a matrix of `shape`, each element rounded once to `dtype`.
pub fn dequantize(bytes: &Tensor, format: &QuantFormat, shape: &[usize], dtype: DType) -> Result<Tensor> {
    check_dtype("dequantize", "the output", dtype)?;
    let sizes = format.shape(shape)?;
    if bytes.dtype() != DType::U8 || bytes.elem_count() != sizes.weight_bytes() {
        bail!("dequantize: want {} bytes, got {:?} {:?}", sizes.weight_bytes(), bytes.dtype(), bytes.dims())
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
