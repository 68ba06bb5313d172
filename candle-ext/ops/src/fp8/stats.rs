//! Statistics of quantized tensors, with the names of TransformerEngine's debug features.

use candle_core::{D, DType, Result, Tensor};

use super::matrix::{Fp8Matrix, amax};
use crate::quantized::ScaleBlock;

/// Statistics of a tensor that is quantized in a step, over all its uses and ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fp8TensorStats {
    /// Largest magnitude.
    pub amax: f64,
    /// Share of the elements that are not zero but whose code is.
    pub underflow: f64,
    /// Share of the elements beyond the largest number that their scale allows. Current and blockwise scaling have none.
    pub overflow: f64,
    /// Mean square of the rounding errors.
    pub mse: f64,
}

/// Sums over elements, from which statistics follow.
#[derive(Clone, Debug)]
pub struct Fp8StatSums {
    /// Elements, underflows, overflows and squares of errors of each slot, f64 [slots, 4].
    pub sums: Tensor,
    /// Largest magnitude of each slot, f32 [slots].
    pub amaxes: Tensor,
}

/// Number of sums of a slot.
pub(super) const N_SUMS: usize = 4;

/// Returns the sums of a tensor and its codes, f64 [4], and its amax, f32 [1].
pub(super) fn sums(x: &Tensor, matrix: &Fp8Matrix) -> Result<(Tensor, Tensor)> {
    let exact = x.detach().to_dtype(DType::F32)?.contiguous()?;
    let rounded = matrix.dequantize()?;
    let count = |mask: Tensor| mask.to_dtype(DType::F64)?.sum_all();
    let underflows = count((rounded.eq(0.0)? * exact.ne(0.0)?)?)?;
    let overflows = match matrix.block {
        ScaleBlock::Tensor => {
            let largest = (&matrix.scale_inv * f64::from(matrix.format.max()))?;
            count(exact.abs()?.broadcast_gt(&largest.unsqueeze(D::Minus1)?)?)?
        }
        ScaleBlock::Row | ScaleBlock::Tile { .. } => underflows.zeros_like()?,
    };
    let n = (underflows.ones_like()? * exact.elem_count() as f64)?;
    let squares = (exact - rounded)?.sqr()?.to_dtype(DType::F64)?.sum_all()?;
    Ok((Tensor::stack(&[n, underflows, overflows, squares], 0)?, amax(x)?))
}

impl Fp8TensorStats {
    /// Returns the statistics of a slot's sums and amax; `None` if nothing was quantized.
    pub fn of(sums: [f64; N_SUMS], amax: f64) -> Option<Self> {
        let [n, underflows, overflows, squares] = sums;
        let share = |part: f64| part / n;
        let stats = || Self { amax, underflow: share(underflows), overflow: share(overflows), mse: share(squares) };
        (n > 0.0).then(stats)
    }
}
