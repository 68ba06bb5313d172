//! Matmul of one row with a matrix, without packing: each element is read once. Attention of one token consists of
//! these.

use super::accumulate::Accumulate;
use super::matrix::{Mat, MatMut};
use crate::dot::{MatrixRows, dots};
use crate::simd::{prefetch, vectorised};

/// Columns whose sums fit into registers.
const COLUMNS: usize = 64;
/// Columns from which rows are read whole, one after another; a head has fewer.
const WIDE: usize = 512;
/// Prefetch distance in rows or columns. Those of a head are strided, which hardware prefetchers miss.
const AHEAD: usize = 16;

/// Returns true if [`gemm`] supports the operands: one row, and a matrix with contiguous rows or columns.
pub(super) fn takes(out: &MatMut<'_>, a: Mat<'_>, b: Mat<'_>) -> bool {
    out.rows == 1 && a.col_stride == 1 && (b.row_stride == 1 || b.col_stride == 1)
}

/// Computes out = [out +] scale a b for one row a.
pub(super) fn gemm(out: MatMut<'_>, accumulate: Accumulate, a: Mat<'_>, b: Mat<'_>, scale: f32) {
    let (a, out) = (&a.data[..a.cols], &mut out.data[..b.cols]);
    if b.row_stride == 1 {
        let columns = MatrixRows { data: b.data, stride: b.col_stride, ahead: AHEAD * b.col_stride };
        vectorised!(dots(out, accumulate, columns, a, scale, |b| b));
    } else {
        vectorised!(by_rows(out, accumulate, a, b, scale));
    }
}

/// Sums a few columns at a time, in registers, over all rows.
#[inline(always)]
fn by_rows(out: &mut [f32], accumulate: Accumulate, a: &[f32], b: Mat<'_>, scale: f32) {
    let n_whole = if out.len() > WIDE { 0 } else { out.len() / COLUMNS * COLUMNS };
    let (whole, rest) = out.split_at_mut(n_whole);
    for (i, out) in whole.chunks_exact_mut(COLUMNS).enumerate() {
        let mut sums = [0.0; COLUMNS];
        if accumulate == Accumulate::Add {
            sums.copy_from_slice(out);
        }
        for (k, a) in a.iter().enumerate() {
            let first = k * b.row_stride + i * COLUMNS;
            prefetch(b.data.as_ptr().wrapping_add(first + AHEAD * b.row_stride), COLUMNS);
            let (factor, row) = (scale * a, &b.data[first..][..COLUMNS]);
            for (sum, b) in sums.iter_mut().zip(row) {
                *sum += factor * b;
            }
        }
        out.copy_from_slice(&sums);
    }
    if accumulate == Accumulate::Overwrite {
        rest.fill(0.0);
    }
    for (k, a) in a.iter().enumerate() {
        let (factor, row) = (scale * a, &b.data[k * b.row_stride + n_whole..][..rest.len()]);
        rest.iter_mut().zip(row).for_each(|(out, b)| *out += factor * b);
    }
}
