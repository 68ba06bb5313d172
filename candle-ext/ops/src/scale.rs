//! A product with a number: the scaling of a low-rank adapter.

use candle_core::{DType, Result, Tensor};

use crate::recording::record;

/// factor * x, rounded to `dtype`. Its gradient is computed in x's format.
pub fn scale(x: &Tensor, factor: f64, dtype: DType) -> Result<Tensor> {
    let (y, from) = (x.affine(factor, 0.0)?.to_dtype(dtype)?, x.dtype());
    Ok(record("scale", [x.into()], y, move |dy, _| Ok([Some(dy.to_dtype(from)?.affine(factor, 0.0)?)])))
}
