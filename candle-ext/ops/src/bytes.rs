//! Raw bytes of CPU tensors, read and written without a copy.

use bytemuck::{cast_slice, cast_slice_mut};
use candle_core::{DType, Result, Shape, Tensor};

use crate::floats::{FloatBuf, Floats};
use crate::storage::{self, host};

/// Calls `read` with the bytes of a CPU tensor, in the order of its elements.
pub fn with_bytes<R>(x: &Tensor, read: impl FnOnce(&[u8]) -> Result<R>) -> Result<R> {
    let x = x.contiguous()?;
    let host = host("with_bytes", &x)?;
    if x.dtype() == DType::U8 {
        return read(host.slice()?);
    }
    match host.floats()? {
        Floats::F32(values) => read(cast_slice(values)),
        Floats::Bf16(values) => read(cast_slice(values)),
        Floats::F16(values) => read(cast_slice(values)),
    }
}

/// Creates a CPU tensor of this dtype and shape whose bytes `fill` writes.
pub fn tensor_from_bytes(
    dtype: DType,
    shape: impl Into<Shape>,
    fill: impl FnOnce(&mut [u8]) -> Result<()>,
) -> Result<Tensor> {
    let shape = shape.into();
    let mut values = FloatBuf::zeros(dtype, shape.elem_count())?;
    fill(match &mut values {
        FloatBuf::F32(values) => cast_slice_mut(values),
        FloatBuf::Bf16(values) => cast_slice_mut(values),
        FloatBuf::F16(values) => cast_slice_mut(values),
    })?;
    Ok(storage::tensor(values, shape))
}
