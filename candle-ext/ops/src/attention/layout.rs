//! Layouts of heads: interleaved by row in tensors, one head after another in kernel outputs.

use std::ops::Range;

use candle_core::{Result, Tensor, bail};
use rayon::prelude::*;

use super::cu_seqlens::CuSeqlens;
use super::spec::AttentionSpec;
use crate::floats::{FloatsMut, check_dtype};
use crate::gemm::Mat;
use crate::simd::vectorised;

/// Rows that one task copies.
const ROWS: usize = 32;

/// Head counts: `n_kv` KV heads, each read by `group` query heads; `dim` elements per head.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeadCounts {
    pub(super) n_kv: usize,
    pub(super) group: usize,
    pub(super) dim: usize,
}

impl HeadCounts {
    /// Returns the heads of q, k and v. Fails unless their shapes and dtypes fit the sequences.
    pub(super) fn of([q, k, v]: [&Tensor; 3], seqs: &CuSeqlens, spec: &AttentionSpec) -> Result<Self> {
        for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
            check_dtype("attention", name, tensor.dtype())?;
            if tensor.dtype() != q.dtype() {
                bail!("attention: q is {:?} but {name} is {:?}", q.dtype(), tensor.dtype())
            }
        }
        let (Ok((t, hq, dim)), Ok((s, hkv, k_dim))) = (q.dims3(), k.dims3()) else {
            bail!(
                "attention: want q [t, hq, k] and k, v [s, hkv, k], got {:?}, {:?}, {:?}",
                q.dims(),
                k.dims(),
                v.dims()
            )
        };
        if k.shape() != v.shape() || dim != k_dim || dim == 0 {
            bail!("attention: q is {:?}, k {:?} and v {:?}", q.dims(), k.dims(), v.dims())
        }
        if hkv == 0 || hq == 0 || hq % hkv != 0 {
            bail!("attention: {hq} query heads cannot be divided by {hkv} KV heads")
        }
        if (t, s) != (seqs.n_tokens(), seqs.n_keys()) {
            bail!(
                "attention: q has {t} rows and k {s}, but the sequences hold {} queries and {} keys",
                seqs.n_tokens(),
                seqs.n_keys()
            )
        }
        if spec.window == Some(0) {
            bail!("attention: a window of 0 masks every key, want at least 1")
        }
        Ok(Self { n_kv: hkv, group: hq / hkv, dim })
    }

    /// Returns the number of query heads.
    pub(super) fn n_query_heads(self) -> usize {
        self.n_kv * self.group
    }
}

/// One head of a buffer [rows, n_heads, dim].
#[derive(Clone, Copy)]
pub(super) struct HeadView<'a, T> {
    data: &'a [T],
    stride: usize,
    dim: usize,
}

impl<'a, T> HeadView<'a, T> {
    pub(super) fn new(data: &'a [T], n_heads: usize, dim: usize, head: usize) -> Self {
        Self { data: data.get(head * dim..).unwrap_or_default(), stride: n_heads * dim, dim }
    }

    /// Returns some rows, at least one, as a matrix.
    pub(super) fn rows(self, rows: Range<usize>) -> Mat<'a, T> {
        Mat::with_stride(&self.data[rows.start * self.stride..], rows.len(), self.dim, self.stride)
    }

    pub(super) fn row(self, row: usize) -> &'a [T] {
        &self.data[row * self.stride..][..self.dim]
    }
}

/// Transposes f32 [n_heads, rows, dim] to [rows, n_heads, dim].
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

/// Splits `data` into consecutive slices of the given lengths.
pub(super) fn split_by_lens(mut data: &mut [f32], lens: impl Iterator<Item = usize>) -> Vec<&mut [f32]> {
    lens.map(|len| data.split_off_mut(..len).expect("the slices tile the buffer")).collect()
}
