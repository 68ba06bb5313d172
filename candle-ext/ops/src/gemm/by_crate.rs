//! Matmuls by the `gemm` crate.

use half::bf16;

use super::accumulate::Accumulate;
use super::matrix::{Mat, MatMut, Output, Threads};
use crate::floats::write_bf16;

/// Widens the operands as a whole: the crate has no bf16.
pub(super) fn by_crate_bf16(
    out: Output<'_>,
    accumulate: Accumulate,
    a: Mat<'_, bf16>,
    b: Mat<'_, bf16>,
    scale: f32,
    threads: Threads,
) {
    let (a_wide, b_wide) = (a.widened(), b.widened());
    let (a, b) = (Mat::new(&a_wide, a.rows, a.cols), Mat::new(&b_wide, b.rows, b.cols));
    match out {
        Output::F32(out) => by_crate(out, accumulate, a, b, scale, threads),
        Output::Bf16(out) => {
            let (rows, cols) = (out.rows, out.cols);
            let mut sums = vec![0.0; rows * cols];
            by_crate(MatMut::new(&mut sums, rows, cols), Accumulate::Overwrite, a, b, scale, threads);
            for (to, sums) in out.data.chunks_mut(out.row_stride).zip(sums.chunks_exact(cols)) {
                write_bf16(sums, &mut to[..cols], accumulate);
            }
        }
    }
}

pub(super) fn by_crate(out: MatMut<'_>, accumulate: Accumulate, a: Mat<'_>, b: Mat<'_>, scale: f32, threads: Threads) {
    let (keep, parallelism) = (
        accumulate == Accumulate::Add,
        match threads {
            Threads::One => gemm::Parallelism::None,
            Threads::All => gemm::Parallelism::Rayon(0),
        },
    );
    // SAFETY: the constructors checked that all indices are within the slices. The shapes agree (asserted above), rows
    // of `out` do not overlap (row_stride >= cols), and the mutable borrow of `out` rules out aliasing. Slices are at
    // most isize::MAX bytes, so strides fit in isize.
    unsafe {
        gemm::gemm(
            out.rows,
            out.cols,
            a.cols,
            out.data.as_mut_ptr(),
            1,
            out.row_stride as isize,
            keep,
            a.data.as_ptr(),
            a.col_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.col_stride as isize,
            b.row_stride as isize,
            if keep { 1.0 } else { 0.0 },
            scale,
            false,
            false,
            false,
            parallelism,
        );
    }
}
