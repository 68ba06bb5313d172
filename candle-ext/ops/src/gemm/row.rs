//! The product of one row with a matrix: nothing is packed, each element is read once. Attention of one token is made of it.

use super::{Mat, MatMut, Old};
use crate::dot::dot;
use crate::simd::vectorised;

/// Tells whether [`gemm`] takes a product: one row, and a matrix whose rows or columns lie in one piece.
pub(super) fn takes(out: &MatMut<'_>, a: Mat<'_>, b: Mat<'_>) -> bool {
    out.rows == 1 && a.col_stride == 1 && (b.row_stride == 1 || b.col_stride == 1)
}

/// out = [out +] scale a b
pub(super) fn gemm(out: MatMut<'_>, old: Old, a: Mat<'_>, b: Mat<'_>, scale: f32) {
    let (a, out) = (&a.data[..a.cols], &mut out.data[..b.cols]);
    if b.row_stride == 1 {
        for (j, out) in out.iter_mut().enumerate() {
            let sum = scale * dot(a, &b.data[j * b.col_stride..][..a.len()]);
            *out = if old == Old::Keep { *out + sum } else { sum };
        }
        return;
    }
    if old == Old::Overwrite {
        out.fill(0.0);
    }
    for (k, a) in a.iter().enumerate() {
        let (factor, row) = (scale * a, &b.data[k * b.row_stride..][..out.len()]);
        vectorised!(out.iter_mut().zip(row).for_each(|(out, b)| *out += factor * b));
    }
}
