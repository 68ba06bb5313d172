//! The bytes behind a CPU tensor, for whoever writes them out and reads them in again: no second copy is made.

use candle_core::{DType, Result, Shape, Tensor};
use half::{bf16, f16};

use crate::floats::{FloatBuf, Floats};
use crate::storage::{self, host};

/// Hands the bytes of a CPU tensor to `read`, in the order of its elements.
pub fn with_bytes<R>(x: &Tensor, read: impl FnOnce(&[u8]) -> Result<R>) -> Result<R> {
    let x = x.contiguous()?;
    let host = host("with_bytes", &x)?;
    match host.floats()? {
        Floats::F32(values) => read(bytes_of(values)),
        Floats::Bf16(values) => read(bytes_of(values)),
        Floats::F16(values) => read(bytes_of(values)),
    }
}

/// Makes a tensor on the CPU whose bytes `fill` writes.
pub fn of_bytes(dtype: DType, shape: impl Into<Shape>, fill: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<Tensor> {
    let shape = shape.into();
    let mut values = FloatBuf::zeros(dtype, shape.elem_count())?;
    fill(match &mut values {
        FloatBuf::F32(values) => bytes_of_mut(values),
        FloatBuf::Bf16(values) => bytes_of_mut(values),
        FloatBuf::F16(values) => bytes_of_mut(values),
    })?;
    Ok(storage::tensor(values, shape))
}

/// Numbers without padding, of which every pattern of bits is one.
trait Plain {}
impl Plain for f32 {}
impl Plain for bf16 {}
impl Plain for f16 {}

fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: the numbers have no padding, and bytes need no alignment.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

fn bytes_of_mut<T: Plain>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: the same, and whatever bytes are written are numbers.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}
