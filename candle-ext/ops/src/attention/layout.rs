//! Where the heads lie: side by side in each row of a tensor, one after the other in what the kernels write.

use std::ops::Range;

use rayon::prelude::*;

use crate::floats::FloatsMut;
use crate::gemm::Mat;
use crate::simd::vectorised;

/// Rows that one task copies back.
const ROWS: usize = 32;

/// Head counts: `n_kv` key heads, each read by `group` query heads of `dim` elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heads {
    pub(super) n_kv: usize,
    pub(super) group: usize,
    pub(super) dim: usize,
}

impl Heads {
    /// Query heads.
    pub(super) fn n_queries(self) -> usize {
        self.n_kv * self.group
    }
}

/// One head of an f32 buffer [rows, n_heads, dim].
#[derive(Clone, Copy)]
pub(super) struct Head<'a> {
    data: &'a [f32],
    stride: usize,
    dim: usize,
}

impl<'a> Head<'a> {
    pub(super) fn new(data: &'a [f32], n_heads: usize, dim: usize, head: usize) -> Self {
        Self { data: data.get(head * dim..).unwrap_or_default(), stride: n_heads * dim, dim }
    }

    /// Some rows, at least one, as a matrix.
    pub(super) fn rows(self, rows: Range<usize>) -> Mat<'a> {
        Mat::with_stride(&self.data[rows.start * self.stride..], rows.len(), self.dim, self.stride)
    }

    pub(super) fn row(self, row: usize) -> &'a [f32] {
        &self.data[row * self.stride..][..self.dim]
    }
}

/// f32 [n_heads, rows, dim] -> [rows, n_heads, dim]
pub(super) fn by_row(x: &[f32], out: FloatsMut<'_>, n_heads: usize, dim: usize) {
    let rows = x.len() / (n_heads * dim);
    out.chunks(ROWS * n_heads * dim).into_par_iter().enumerate().for_each(|(i, mut out)| {
        for row in 0..out.len() / (n_heads * dim) {
            for head in 0..n_heads {
                let start = (head * rows + i * ROWS + row) * dim;
                out.write((row * n_heads + head) * dim, &x[start..start + dim]);
            }
        }
    });
}

/// Adds f32 [n_heads, rows, dim] to [rows, n_heads, dim].
pub(super) fn add_by_row(x: &[f32], sums: &mut [f32], n_heads: usize, dim: usize) {
    let rows = x.len() / (n_heads * dim);
    sums.par_chunks_mut(ROWS * n_heads * dim).enumerate().for_each(|(i, sums)| {
        for (at, sums) in sums.chunks_exact_mut(dim).enumerate() {
            let (row, head) = (i * ROWS + at / n_heads, at % n_heads);
            let x = &x[(head * rows + row) * dim..][..dim];
            vectorised!(sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += x));
        }
    });
}

/// Cuts `data` into consecutive pieces of the given lengths.
pub(super) fn pieces(mut data: &mut [f32], lens: impl Iterator<Item = usize>) -> Vec<&mut [f32]> {
    lens.map(|len| data.split_off_mut(..len).expect("the pieces tile the buffer")).collect()
}
