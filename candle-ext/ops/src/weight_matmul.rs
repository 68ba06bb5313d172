//! Matmuls with a weight matrix in any storage, a panel of its rows at a time.
//!
//! t tokens, n outputs, k inputs; the weight is [n, k]. A weight of 16 or 8 bits is often a view of a buffer
//! of gigabytes, so no more than [`PANEL`] of its elements are widened at once.

use std::ops::Range;

use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

use crate::dot::{Rows, dot, dots};
use crate::floats::{Floats, wide_bf16};
use crate::gemm::{Accumulate, Mat, MatMut, Threads, gemm};
use crate::quantized::cpu::QuantizedRows;
use crate::simd::vectorised;

/// Elements of a widened panel: 4 MiB, about a core's share of the outer caches.
pub(crate) const PANEL: usize = 1 << 20;

/// Elements of the weight that one task multiplies with one token, at least: to hand over fewer takes longer.
const PARALLEL_FROM: usize = 1 << 15;
/// Tasks for each thread, if there is enough to do: the last of a few large ones would keep the others waiting.
const TASKS: usize = 4;
/// Elements of a weight that are fetched before their turn. By itself the processor stops at the end of each page.
const AHEAD: usize = 1 << 10;

/// The sizes of a product of [t, k] activations with an [n, k] weight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dims {
    pub(crate) t: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
}

/// A weight matrix as matmuls read it: elements in their own format, with their scales.
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
    /// Borrows some rows of `k` elements.
    fn rows(self, rows: Range<usize>, k: usize) -> Self {
        match self {
            Self::Dense(floats) => Self::Dense(floats.slice(rows.start * k..rows.end * k)),
            Self::Quantized(quantized) => Self::Quantized(quantized.rows(rows)),
        }
    }

    /// Returns the elements as f32: f32 itself without a copy, all else written to `scratch`.
    fn widened<'s>(self, scratch: &'s mut Vec<f32>) -> &'s [f32]
    where
        'a: 's,
    {
        match self {
            Self::Dense(floats) => floats.widened(scratch),
            Self::Quantized(quantized) => quantized.widened(scratch),
        }
    }

    /// Returns the number of rows of a panel, of `n` rows of `k` elements.
    fn panel_rows(self, n: usize, k: usize) -> usize {
        match self {
            Self::Dense(Floats::F32(_)) => n,
            _ => PANEL / k.max(1),
        }
    }
}

/// y = [y +] x w^T, with x [t, k] and y [t, n].
pub(crate) fn forward(x: &[f32], w: WeightOperand<'_>, y: &mut [f32], accumulate: Accumulate, dims: Dims) {
    let Dims { t, n, k } = dims;
    if t == 1 && k > 0 {
        return one_row(x, w, y, accumulate);
    }
    let x = Mat::new(x, t, k);
    for_each_panel(w, dims, |rows, w| {
        let y = MatMut::with_stride(&mut y[rows.start..], t, rows.len(), n);
        gemm(y, accumulate, x, Mat::new(w, rows.len(), k).t(), 1.0, Threads::All);
    });
}

/// y = [y +] w x for one token: each weight is read once and in its own format, which is all that takes time.
fn one_row(x: &[f32], w: WeightOperand<'_>, y: &mut [f32], accumulate: Accumulate) {
    let k = x.len();
    let rows_per_chunk = (PARALLEL_FROM / k).max(y.len().div_ceil(TASKS * rayon::current_num_threads())).max(1);
    y.par_chunks_mut(rows_per_chunk).enumerate().for_each(|(i, y)| {
        let start = i * rows_per_chunk;
        let floats = match w.rows(start..start + y.len(), k) {
            WeightOperand::Dense(floats) => floats,
            WeightOperand::Quantized(rows) => return one_row_quantized(x, rows, y, accumulate),
        };
        match floats {
            Floats::F32(data) => {
                vectorised!(dots(y, accumulate, Rows { data, stride: k, ahead: AHEAD }, x, 1.0, |w| w))
            }
            Floats::Bf16(data) => {
                vectorised!(dots(y, accumulate, Rows { data, stride: k, ahead: AHEAD }, x, 1.0, wide_bf16))
            }
            Floats::F16(data) => {
                for (row, y) in data.chunks_exact(k).zip(y) {
                    let sum = dot(&row.to_f32_vec(), x);
                    *y = if accumulate == Accumulate::Add { *y + sum } else { sum };
                }
            }
        }
    });
}

/// y = [y +] w x for one token and quantized rows, a row at a time.
fn one_row_quantized(x: &[f32], rows: QuantizedRows<'_>, y: &mut [f32], accumulate: Accumulate) {
    let mut row = vec![0.0; x.len()];
    for (row_idx, y) in y.iter_mut().enumerate() {
        rows.rows(row_idx..row_idx + 1).read_one(&mut row);
        vectorised!(dots(
            std::slice::from_mut(y),
            accumulate,
            Rows { data: &row, stride: x.len(), ahead: 0 },
            x,
            1.0,
            |w| w
        ));
    }
}

/// dx = dy w, with dy [t, n] and dx [t, k].
///
/// Each of the `parts`, numbers of rows of w, is summed by itself, the last first, as matrices of their own would be.
pub(crate) fn grad_x(dy: &[f32], w: WeightOperand<'_>, parts: &[usize], dx: &mut [f32], dims: Dims) {
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
            gemm(MatMut::new(dx, t, k), accumulate, dy, w, 1.0, Threads::All);
            accumulate = Accumulate::Add;
        });
        end = first;
    }
}

/// dw = [dw +] dy^T x, with dy [t, n], x [t, k] and dw [n, k].
pub(crate) fn grad_w(dy: &[f32], x: &[f32], dw: &mut [f32], accumulate: Accumulate, dims: Dims) {
    let Dims { t, n, k } = dims;
    let (dy, x) = (Mat::new(dy, t, n), Mat::new(x, t, k));
    gemm(MatMut::new(dw, n, k), accumulate, dy.t(), x, 1.0, Threads::All);
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
