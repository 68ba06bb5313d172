//! Multiplication by a constant, such as the scaling of a LoRA adapter.

use candle_core::{DType, Result, Tensor};

use crate::recording::record;

/// Returns factor * x, rounded to `dtype`. Its gradient has x's dtype.
pub fn scale(x: &Tensor, factor: f64, dtype: DType) -> Result<Tensor> {
    let (y, from) = (x.affine(factor, 0.0)?.to_dtype(dtype)?, x.dtype());
    Ok(record("scale", [x.into()], y, move |dy, _| Ok([Some(dy.to_dtype(from)?.affine(factor, 0.0)?)])))
}
