//! One row of bf16 times a matrix with contiguous columns, such as a token times a weight [n, k]. Each element is read
//! once, without packing.
//!
//! Terms are summed in the order of the blocked kernels, so a row has the same bits alone and among others.

use half::bf16;
use rayon::prelude::*;

use super::accumulate::Accumulate;
use super::kernel::Kernel;
use super::matrix::{Mat, Output, Threads};
use super::tiles::terms_per_part;
use crate::floats::write_bf16;
use crate::simd::vectorised;

/// Columns that are summed side by side.
pub(super) const COLUMNS: usize = 64;
/// Fewest elements of the matrix per task. Smaller tasks cost more than they save.
const PARALLEL_FROM: usize = 1 << 15;
/// Tasks per thread, for load balance.
const TASKS: usize = 4;

/// Kernel that also multiplies a row without packing.
pub(super) trait RowKernel: Kernel<Operand = bf16> {
    /// Returns the sums of a row with up to [`COLUMNS`] contiguous columns of b. Other sums may be anything.
    fn row_sums(self, a: &[bf16], b: Mat<'_, bf16>) -> [f32; COLUMNS];

    /// Prepares the calling thread for [`RowKernel::row_sums`].
    fn begin_row(self) {}

    /// Undoes [`RowKernel::begin_row`] on the calling thread.
    fn end_row(self) {}
}

/// Returns true if [`gemm`] supports the operands.
pub(super) fn takes(a: Mat<'_, bf16>, b: Mat<'_, bf16>) -> bool {
    a.rows == 1 && a.col_stride == 1 && b.row_stride == 1
}

/// Computes out = [out +] scale a b for one row a.
pub(super) fn gemm<K: RowKernel>(
    kernel: K,
    out: Output<'_>,
    accumulate: Accumulate,
    a: Mat<'_, bf16>,
    b: Mat<'_, bf16>,
    scale: f32,
    threads: Threads,
) {
    let product = RowProduct { kernel, a: &a.data[..a.cols], b, scale, kc: terms_per_part::<K>(a.cols) };
    match out {
        Output::F32(out) => product.for_each_task(&mut out.data[..b.cols], threads, |first, out| {
            let sums = product.sums(first, out.len(), (accumulate == Accumulate::Add).then_some(&*out));
            out.copy_from_slice(&sums[..out.len()]);
        }),
        Output::Bf16(out) => product.for_each_task(&mut out.data[..b.cols], threads, |first, out| {
            let sums = product.sums(first, out.len(), None);
            vectorised!(write_bf16(&sums[..out.len()], out, accumulate));
        }),
    }
}

struct RowProduct<'a, K> {
    kernel: K,
    a: &'a [bf16],
    b: Mat<'a, bf16>,
    scale: f32,
    kc: usize,
}

impl<K: RowKernel> RowProduct<'_, K> {
    /// Calls `compute` with the first column and the outputs of each 64 columns.
    fn for_each_task<T: Send>(&self, out: &mut [T], threads: Threads, compute: impl Fn(usize, &mut [T]) + Sync) {
        let run = |first: usize, out: &mut [T]| {
            self.kernel.begin_row();
            for (i, out) in out.chunks_mut(COLUMNS).enumerate() {
                compute(first + i * COLUMNS, out);
            }
            self.kernel.end_row();
        };
        let n_tasks = if threads == Threads::All { TASKS * rayon::current_num_threads() } else { 1 };
        let columns = (PARALLEL_FROM / self.a.len()).max(out.len().div_ceil(n_tasks)).next_multiple_of(COLUMNS);
        if columns >= out.len() {
            return run(0, out);
        }
        out.par_chunks_mut(columns).enumerate().for_each(|(i, out)| run(i * columns, out));
    }

    /// Returns the scaled sums of columns from `first` on, added to `before`.
    fn sums(&self, first: usize, n: usize, before: Option<&[f32]>) -> [f32; COLUMNS] {
        let scale = self.scale;
        let mut total = [0.0; COLUMNS];
        if let Some(before) = before {
            total[..n].copy_from_slice(before);
        }
        for start in (0..self.a.len()).step_by(self.kc) {
            let a = &self.a[start..(start + self.kc).min(self.a.len())];
            let sums = self.kernel.row_sums(a, self.b.part(start, a.len(), first, n));
            if start == 0 && before.is_none() {
                vectorised!(total.iter_mut().zip(&sums).for_each(|(total, sum)| *total = sum * scale));
            } else {
                vectorised!(total.iter_mut().zip(&sums).for_each(|(total, sum)| *total = sum.mul_add(scale, *total)));
            }
        }
        total
    }
}
