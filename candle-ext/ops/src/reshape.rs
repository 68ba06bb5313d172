//! Differentiable reshape.

use candle_core::{Result, Shape, Tensor};

use crate::recording::record;

/// Returns a view of `x` with another shape; its gradient has the shape of `x`.
pub fn reshape(x: &Tensor, shape: impl Into<Shape>) -> Result<Tensor> {
    let (y, before) = (x.reshape(shape.into())?, x.shape().clone());
    Ok(record("reshape", [x.into()], y, move |dy, _| Ok([Some(dy.reshape(before)?)])))
}
