//! Matmuls with a weight matrix in any storage, one panel of its rows at a time.
//!
//! t tokens, n outputs, k inputs; the weight is [n, k]. A 16- or 8-bit weight is often a view of a buffer of gigabytes,
//! so at most [`PANEL`] of its elements are converted to f32 at once.

use std::ops::Range;

use half::bf16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

use crate::batch_invariance::is_batch_invariant;
use crate::dot::{MatrixRows, dot, dots};
use crate::floats::{Floats, first_of, wide_bf16};
use crate::gemm::{Accumulate, Mat, MatMut, Threads, gemm, packs_bf16, prefetches_f32};
use crate::quantized::cpu::QuantizedRows;
use crate::simd::vectorised;

/// Elements of a converted panel: 4 MiB, about a core's share of the last-level cache.
pub(crate) const PANEL: usize = 1 << 20;

/// Fewest weight elements per task in a matmul with one token. Smaller tasks cost more than they save.
const PARALLEL_FROM: usize = 1 << 15;
/// Tasks per thread, for load balance.
const TASKS: usize = 4;
/// Prefetch distance in weight elements. Hardware prefetchers stop at the end of each page.
const AHEAD: usize = 1 << 10;

/// Sizes of a matmul of [t, k] activations with an [n, k] weight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dims {
    pub(crate) t: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
}

/// Weight matrix as matmuls read it: elements in their own dtype, with their scales.
#[derive(Clone, Copy)]
pub(crate) enum WeightOperand<'a> {
    /// Floats, row by row.
    Dense(Floats<'a>),
    /// 8-bit codes with scales.
    Quantized(QuantizedRows<'a>),
}

impl<'a> From<Floats<'a>> for WeightOperand<'a> {
    fn from(floats: Floats<'a>) -> Self {
        Self::Dense(floats)
    }
}

impl<'a> WeightOperand<'a> {
    /// Returns some rows, each of `k` elements.
    pub(crate) fn rows(self, rows: Range<usize>, k: usize) -> Self {
        match self {
            Self::Dense(floats) => Self::Dense(floats.slice(rows.start * k..rows.end * k)),
            Self::Quantized(quantized) => Self::Quantized(quantized.rows(rows)),
        }
    }

    /// Returns the elements as f32: borrowed if they are f32, else converted into `scratch`.
    fn widened<'s>(self, scratch: &'s mut Vec<f32>) -> &'s [f32]
    where
        'a: 's,
    {
        match self {
            Self::Dense(floats) => floats.widened(scratch),
            Self::Quantized(quantized) => quantized.widened(scratch),
        }
    }

    /// Returns `n` rows of `k` elements as f32, to be packed on the calling thread.
    ///
    /// Most kernels pack in strides, which hardware prefetchers miss. For them f32 rows are copied too, which made grouped
    /// matmuls of 128 rows each 7 % faster.
    pub(crate) fn to_pack<'s>(self, n: usize, k: usize, scratch: &'s mut Vec<f32>) -> &'s [f32]
    where
        'a: 's,
    {
        let out = match self {
            Self::Dense(Floats::F32(rows)) if prefetches_f32() => return rows,
            _ => first_of(scratch, n * k),
        };
        match self {
            Self::Dense(floats) => floats.read_into(out),
            Self::Quantized(quantized) => {
                let rows = out.chunks_exact_mut(k.max(1)).enumerate();
                rows.for_each(|(i, row)| quantized.rows(i..i + 1).read_one(row));
            }
        }
        out
    }

    /// Returns the number of rows per panel, for `n` rows of `k` elements.
    pub(crate) fn panel_rows(self, n: usize, k: usize) -> usize {
        match self {
            Self::Dense(Floats::F32(_)) => n,
            _ => PANEL / k.max(1),
        }
    }
}

/// Returns the operands of a matmul if both are bf16 and the process's kernel packs them as they are.
pub(crate) fn bf16_operands<'a>(a: Floats<'a>, b: impl Into<WeightOperand<'a>>) -> Option<(&'a [bf16], &'a [bf16])> {
    match (a, b.into()) {
        (Floats::Bf16(a), WeightOperand::Dense(Floats::Bf16(b))) if packs_bf16() => Some((a, b)),
        _ => None,
    }
}

/// Computes y = [y +] scale * x w^T, with x [t, k] and y [t, n].
pub(crate) fn forward(x: &[f32], w: WeightOperand<'_>, y: &mut [f32], accumulate: Accumulate, scale: f32, dims: Dims) {
    let Dims { t, n, k } = dims;
    if t == 1 && k > 0 && !is_batch_invariant() {
        return one_row(x, w, y, accumulate, scale);
    }
    let x = Mat::new(x, t, k);
    for_each_panel(w, dims, |rows, w| {
        let y = MatMut::with_stride(&mut y[rows.start..], t, rows.len(), n);
        gemm(y, accumulate, x, Mat::new(w, rows.len(), k).t(), scale, Threads::All);
    });
}

/// Computes y = [y +] scale * w x for one token. Each weight is read once, in its own dtype: memory bandwidth is the limit.
fn one_row(x: &[f32], w: WeightOperand<'_>, y: &mut [f32], accumulate: Accumulate, scale: f32) {
    let k = x.len();
    let rows_per_chunk = (PARALLEL_FROM / k).max(y.len().div_ceil(TASKS * rayon::current_num_threads())).max(1);
    y.par_chunks_mut(rows_per_chunk).enumerate().for_each(|(i, y)| {
        let start = i * rows_per_chunk;
        let floats = match w.rows(start..start + y.len(), k) {
            WeightOperand::Dense(floats) => floats,
            WeightOperand::Quantized(rows) => return one_row_quantized(x, rows, y, accumulate, scale),
        };
        match floats {
            Floats::F32(data) => {
                vectorised!(dots(y, accumulate, MatrixRows { data, stride: k, ahead: AHEAD }, x, scale, |w| w))
            }
            Floats::Bf16(data) => {
                vectorised!(dots(y, accumulate, MatrixRows { data, stride: k, ahead: AHEAD }, x, scale, wide_bf16))
            }
            Floats::F16(data) => {
                for (row, y) in data.chunks_exact(k).zip(y) {
                    let sum = scale * dot(&row.to_f32_vec(), x);
                    *y = if accumulate == Accumulate::Add { *y + sum } else { sum };
                }
            }
        }
    });
}

/// Computes y = [y +] w x for one token and quantized rows, one row at a time.
fn one_row_quantized(x: &[f32], rows: QuantizedRows<'_>, y: &mut [f32], accumulate: Accumulate, scale: f32) {
    let mut row = vec![0.0; x.len()];
    for (row_idx, y) in y.iter_mut().enumerate() {
        rows.rows(row_idx..row_idx + 1).read_one(&mut row);
        vectorised!(dots(
            std::slice::from_mut(y),
            accumulate,
            MatrixRows { data: &row, stride: x.len(), ahead: 0 },
            x,
            scale,
            |w| w
        ));
    }
}

/// Computes dx = scale * dy w, with dy [t, n] and dx [t, k].
///
/// `parts` are the row counts of the matrices joined in w. Each is summed separately, the last first, so the bits equal
/// those of separate matrices.
pub(crate) fn grad_x(dy: &[f32], w: WeightOperand<'_>, parts: &[usize], dx: &mut [f32], scale: f32, dims: Dims) {
    let Dims { t, n, k } = dims;
    if n == 0 {
        return dx.fill(0.0);
    }
    let (mut end, mut accumulate) = (n, Accumulate::Overwrite);
    for part in parts.iter().rev() {
        let first = end - part;
        for_each_panel(w.rows(first..end, k), Dims { n: *part, ..dims }, |rows, w| {
            let dy = Mat::with_stride(&dy[first + rows.start..], t, rows.len(), n);
            let w = Mat::new(w, rows.len(), k);
            gemm(MatMut::new(dx, t, k), accumulate, dy, w, scale, Threads::All);
            accumulate = Accumulate::Add;
        });
        end = first;
    }
}

/// Computes dw = [dw +] scale * dy^T x, with dy [t, n], x [t, k] and dw [n, k].
pub(crate) fn grad_w(dy: &[f32], x: &[f32], dw: &mut [f32], accumulate: Accumulate, scale: f32, dims: Dims) {
    let Dims { t, n, k } = dims;
    let (dy, x) = (Mat::new(dy, t, n), Mat::new(x, t, k));
    gemm(MatMut::new(dw, n, k), accumulate, dy.t(), x, scale, Threads::All);
}

fn for_each_panel(w: WeightOperand<'_>, dims: Dims, mut product: impl FnMut(Range<usize>, &[f32])) {
    let Dims { t, n, k } = dims;
    if t == 0 {
        return;
    }
    let height = w.panel_rows(n, k).max(1);
    let mut scratch = Vec::new();
    for start in (0..n).step_by(height) {
        let rows = start..(start + height).min(n);
        product(rows.clone(), w.rows(rows, k).widened(&mut scratch));
    }
}
