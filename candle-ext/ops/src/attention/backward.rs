//! CPU kernel of the attention backward: a task for each sequence and query head.
//!
//! Each task sums dk and dv of its own head. Query heads that share a KV head (GQA) are summed afterwards, in order.
//!
//! With instructions for bf16, matmuls of bf16 tensors read bf16; p and ds are rounded for them, as on a GPU.
//!
//! With `p = e^(score - lse)` and `delta = sum(do o)`:
//! `dv = p^T do`, `ds = p (do v^T - delta)`, `dq = scale ds k`, `dk = scale ds^T q`.

use std::ops::Range;

use rayon::prelude::*;

use super::cu_seqlens::{CuSeqlens, SequenceRange};
use super::layout::{HeadCounts, HeadView, split_by_lens};
use super::spec::AttentionSpec;
use super::tile::{MatmulElement, QUERIES, Queries, key_tiles, keys_of, of_span, overlap, tiles_per_block};
use crate::dot::dot;
use crate::floats::{Floats, first_of};
use crate::gemm::{Accumulate, Mat, MatMut, PackedOperand, gemm_packed, has_bf16_unit};
use crate::simd::vectorised;

/// Tensors saved by the forward, and the gradient of its output.
pub(super) struct CpuBackwardInputs<'a> {
    pub(super) q: Floats<'a>,
    pub(super) k: Floats<'a>,
    pub(super) v: Floats<'a>,
    pub(super) o: Floats<'a>,
    pub(super) d_o: Floats<'a>,
    pub(super) lse: &'a [f32],
}

/// Returns dq, dk and dv, each f32 [heads, rows, dim].
pub(super) fn run(
    inputs: &CpuBackwardInputs<'_>,
    seqs: &CuSeqlens,
    spec: &AttentionSpec,
    heads: HeadCounts,
) -> [Vec<f32>; 3] {
    let CpuBackwardInputs { q, k, v, o, d_o, lse } = *inputs;
    if let ([Floats::Bf16(q), Floats::Bf16(k), Floats::Bf16(v), Floats::Bf16(o), Floats::Bf16(d_o)], true) =
        ([q, k, v, o, d_o], has_bf16_unit())
    {
        return run_as([q, k, v, o, d_o], lse, seqs, spec, heads);
    }
    let mut wide = [const { Vec::new() }; 5];
    let [q_wide, k_wide, v_wide, o_wide, d_o_wide] = &mut wide;
    let (q, k, v) = (q.widened(q_wide), k.widened(k_wide), v.widened(v_wide));
    run_as([q, k, v, o.widened(o_wide), d_o.widened(d_o_wide)], lse, seqs, spec, heads)
}

fn run_as<T: MatmulElement>(
    [q, k, v, o, d_o]: [&[T]; 5],
    lse: &[f32],
    seqs: &CuSeqlens,
    spec: &AttentionSpec,
    heads: HeadCounts,
) -> [Vec<f32>; 3] {
    let HeadCounts { n_kv, group, dim } = heads;
    let (n_heads, t, s) = (heads.n_query_heads(), seqs.n_tokens(), seqs.n_keys());
    let [mut dq, mut dk, mut dv] = [t, s, s].map(|rows| vec![0.0; n_heads * rows * dim]);
    let tasks: Vec<(usize, SequenceRange)> =
        (0..n_heads).flat_map(|head| seqs.spans().map(move |span| (head, span))).collect();
    let dq_pieces = split_by_lens(&mut dq, tasks.iter().map(|(_, span)| span.q.len() * dim));
    let dk_pieces = split_by_lens(&mut dk, tasks.iter().map(|(_, span)| span.k.len() * dim));
    let dv_pieces = split_by_lens(&mut dv, tasks.iter().map(|(_, span)| span.k.len() * dim));
    let grads = dq_pieces.into_par_iter().zip(dk_pieces).zip(dv_pieces);
    tasks.par_iter().zip(grads).for_each(|((head, span), ((dq, dk), dv))| {
        let of_queries = |x| HeadView::new(x, n_heads, dim, *head);
        let of_keys = |x| HeadView::new(x, n_kv, dim, head / group);
        let sequence = Sequence {
            q: of_queries(q),
            k: of_keys(k),
            v: of_keys(v),
            o: of_queries(o),
            d_o: of_queries(d_o),
            lse: &lse[head * t..(head + 1) * t],
            span: span.clone(),
            dim,
            spec,
        };
        sequence.backward(dq, dk, dv);
    });
    add_groups(&mut dk, group, s * dim);
    add_groups(&mut dv, group, s * dim);
    [dq, dk, dv]
}

/// Sums each run of `group` blocks of `len` elements into its first block, and compacts the sums.
fn add_groups(x: &mut Vec<f32>, group: usize, len: usize) {
    x.par_chunks_mut((group * len).max(1)).for_each(|heads| {
        let (sum, rest) = heads.split_at_mut(len);
        for head in rest.chunks_exact(len) {
            vectorised!(sum.iter_mut().zip(head).for_each(|(sum, x)| *sum += x));
        }
    });
    let n_sums = if len == 0 { 0 } else { x.len() / (group * len) };
    for i in 1..n_sums {
        x.copy_within(i * group * len..(i * group + 1) * len, i * len);
    }
    x.truncate(n_sums * len);
}

/// One sequence and one query head.
struct Sequence<'a, T> {
    q: HeadView<'a, T>,
    k: HeadView<'a, T>,
    v: HeadView<'a, T>,
    o: HeadView<'a, T>,
    d_o: HeadView<'a, T>,
    lse: &'a [f32],
    span: SequenceRange,
    dim: usize,
    spec: &'a AttentionSpec,
}

impl<'a, T: MatmulElement> Sequence<'a, T> {
    fn backward(&self, dq: &mut [f32], dk: &mut [f32], dv: &mut [f32]) {
        let (n_queries, size) = (self.span.q.len(), QUERIES * tiles_per_block(self.dim));
        let mut scratch = Scratch::default();
        for (first, dq) in (0..n_queries).step_by(size).zip(dq.chunks_mut(size * self.dim)) {
            let firsts = (first..(first + size).min(n_queries)).step_by(QUERIES);
            let tiles: Vec<_> = firsts.map(|first| self.query_tile(first..(first + QUERIES).min(n_queries))).collect();
            self.block(&tiles, &mut scratch, dq, dk, dv);
        }
    }

    /// Packs some queries of the sequence and their gradients.
    fn query_tile(&self, queries: Range<usize>) -> QueryTile<'a, T> {
        let rows = self.span.q.start + queries.start..self.span.q.start + queries.end;
        let (q, d_o) = (self.q.rows(rows.clone()), self.d_o.rows(rows.clone()));
        let (o_row, d_o_row) = (&mut Vec::new(), &mut Vec::new());
        let of_row = |row| dot(T::widened(self.o.row(row), o_row), T::widened(self.d_o.row(row), d_o_row));
        let first = self.span.first + queries.start as isize;
        QueryTile {
            queries: Queries { q, n: rows.len(), first, n_keys: self.span.k.len(), spec: self.spec },
            q_left: PackedOperand::left(q),
            q_right: PackedOperand::right(q),
            d_o_left: PackedOperand::left(d_o),
            d_o_right: PackedOperand::right(d_o),
            delta: rows.clone().map(of_row).collect(),
            lse: &self.lse[rows],
        }
    }

    /// Adds the contribution of a block of queries. Each tile of keys and values is packed once for all of them.
    fn block(
        &self,
        tiles: &[QueryTile<'_, T>],
        scratch: &mut Scratch<T>,
        dq: &mut [f32],
        dk: &mut [f32],
        dv: &mut [f32],
    ) {
        let seen = keys_of(tiles.iter().map(|tile| &tile.queries));
        for keys in key_tiles(seen, self.span.k.len()) {
            let (k, v) = (of_span(self.k, &self.span.k, &keys), of_span(self.v, &self.span.k, &keys));
            scratch.keys.k.pack_right(k);
            scratch.keys.k_t.pack_right(k.t());
            scratch.keys.v_t.pack_right(v.t());
            let of_keys = keys.start * self.dim..keys.end * self.dim;
            let (dk, dv) = (&mut dk[of_keys.clone()], &mut dv[of_keys]);
            for (tile, dq) in tiles.iter().zip(dq.chunks_mut(QUERIES * self.dim)) {
                if overlap(&tile.queries.keys(), &keys) {
                    self.tile(tile, &keys, scratch, [dq, dk, dv]);
                }
            }
        }
    }

    /// Adds the contribution of a tile of queries and a tile of keys.
    fn tile(
        &self,
        tile: &QueryTile<'_, T>,
        keys: &Range<usize>,
        scratch: &mut Scratch<T>,
        [dq, dk, dv]: [&mut [f32]; 3],
    ) {
        let (dim, scale, n, n_keys) = (self.dim, self.spec.scale, tile.queries.n, keys.len());
        let Scratch { p, ds, rounded, packed, keys: KeyTile { k, k_t, v_t } } = scratch;
        let (p, ds) = (first_of(p, n * n_keys), first_of(ds, n * n_keys));
        gemm_packed(MatMut::new(p, n, n_keys), Accumulate::Overwrite, &tile.q_left, k_t, scale);
        tile.queries.probabilities(p, keys, tile.lse);
        gemm_packed(MatMut::new(ds, n, n_keys), Accumulate::Overwrite, &tile.d_o_left, v_t, 1.0);
        softmax_backward(p, ds, &tile.delta, n_keys);
        let p = packed.pack_left(Mat::new(T::of(p, rounded), n, n_keys).t());
        gemm_packed(MatMut::new(dv, n_keys, dim), Accumulate::Add, p, &tile.d_o_right, 1.0);
        let ds = Mat::new(T::of(ds, rounded), n, n_keys);
        gemm_packed(MatMut::new(dk, n_keys, dim), Accumulate::Add, packed.pack_left(ds.t()), &tile.q_right, scale);
        gemm_packed(MatMut::new(dq, n, dim), Accumulate::Add, packed.pack_left(ds), k, scale);
    }
}

/// Overwrites dp with ds = p (dp - delta).
fn softmax_backward(p: &[f32], dp: &mut [f32], delta: &[f32], n_keys: usize) {
    for ((p, dp), delta) in p.chunks_exact(n_keys).zip(dp.chunks_exact_mut(n_keys)).zip(delta) {
        vectorised!(p.iter().zip(dp).for_each(|(p, dp)| *dp = p * (*dp - delta)));
    }
}

/// A tile of queries with its packed operands.
struct QueryTile<'a, T> {
    queries: Queries<'a, T>,
    q_left: PackedOperand<T>,
    q_right: PackedOperand<T>,
    d_o_left: PackedOperand<T>,
    d_o_right: PackedOperand<T>,
    /// `sum(do o)` of each row.
    delta: Vec<f32>,
    lse: &'a [f32],
}

/// Packed operands of a tile of keys and values.
struct KeyTile<T> {
    k: PackedOperand<T>,
    k_t: PackedOperand<T>,
    v_t: PackedOperand<T>,
}

/// Buffers that each tile overwrites.
struct Scratch<T> {
    keys: KeyTile<T>,
    p: Vec<f32>,
    ds: Vec<f32>,
    rounded: Vec<T>,
    packed: PackedOperand<T>,
}

impl<T> Default for Scratch<T> {
    fn default() -> Self {
        let keys =
            KeyTile { k: PackedOperand::default(), k_t: PackedOperand::default(), v_t: PackedOperand::default() };
        Self { keys, p: Vec::new(), ds: Vec::new(), rounded: Vec::new(), packed: PackedOperand::default() }
    }
}
