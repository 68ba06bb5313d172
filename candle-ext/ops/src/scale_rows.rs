//! Rows times a weight each.

use candle_core::{D, DType, Result, Tensor, bail};

use crate::recording::{recompute_with, record, requires_grad, save};

/// Computes y = w * x, with x [n, d] and a weight per row, f32 [n]. It computes in f32 and rounds once.
///
/// y is recomputed by the backward of the op that reads it.
///
/// # Errors
///
/// If the shapes do not match.
pub fn scale_rows(x: &Tensor, row_weights: &Tensor) -> Result<Tensor> {
    if x.rank() != 2 || row_weights.dtype() != DType::F32 || row_weights.dims() != [x.dims()[0]] {
        let (of_x, of_w) = (x.dims(), row_weights.dims());
        bail!("scale_rows: want x [n, d] and f32 weights [n], got {of_x:?} and {:?} {of_w:?}", row_weights.dtype())
    }
    let y = scaled(x, row_weights)?;
    let (saved, weights) = (save(x), row_weights.clone());
    recompute_with(&y, move || scaled(&saved.get()?, &weights));
    let (saved, weights) = (requires_grad(row_weights).then(|| save(x)), row_weights.clone());
    Ok(record("scale_rows", [x.into(), row_weights.into()], y, move |dy, _| {
        let d_weights = saved.map(|x| {
            let products = dy.to_dtype(DType::F32)? * x.get()?.to_dtype(DType::F32)?;
            products?.sum(D::Minus1)
        });
        Ok([Some(scaled(dy, &weights)?), d_weights.transpose()?])
    }))
}

fn scaled(x: &Tensor, row_weights: &Tensor) -> Result<Tensor> {
    x.to_dtype(DType::F32)?.broadcast_mul(&row_weights.unsqueeze(1)?)?.to_dtype(x.dtype())
}
