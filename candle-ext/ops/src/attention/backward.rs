//! The backward CPU kernel: a task for each sequence and key head, which alone sums its dk and dv.
//!
//! With p = e^(score - lse) and delta = sum(do o): dv = p^T do, ds = p (do v^T - delta),
//! dq = scale ds k, dk = scale ds^T q.

use std::ops::Range;

use rayon::prelude::*;

use super::layout::{Heads, by_head, by_row, pieces};
use super::seqs::Span;
use super::tile::{Queries, queries_per_tile};
use super::{AttentionSpec, Seqs};
use crate::dot::dot;
use crate::floats::{Floats, FloatsMut};
use crate::gemm::{Mat, MatMut, Old, Threads, gemm};

/// What the forward left, and the cotangent of its output.
pub(super) struct Inputs<'a> {
    pub(super) q: Floats<'a>,
    pub(super) k: Floats<'a>,
    pub(super) v: Floats<'a>,
    pub(super) o: Floats<'a>,
    pub(super) d_o: Floats<'a>,
    pub(super) lse: &'a [f32],
}

/// Writes dq, dk and dv.
pub(super) fn run(
    inputs: &Inputs<'_>,
    [dq_out, dk_out, dv_out]: [FloatsMut<'_>; 3],
    seqs: &Seqs,
    spec: &AttentionSpec,
    heads: Heads,
) {
    let Heads { n_kv, group, dim } = heads;
    let (t, s, width) = (seqs.n_tokens(), seqs.n_keys(), group * dim);
    let q = by_head(inputs.q, n_kv, width);
    let (k, v) = (by_head(inputs.k, n_kv, dim), by_head(inputs.v, n_kv, dim));
    let (o, d_o) = (by_head(inputs.o, n_kv, width), by_head(inputs.d_o, n_kv, width));
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    let tasks: Vec<(usize, Span)> = (0..n_kv).flat_map(|head| seqs.spans().map(move |span| (head, span))).collect();
    let dq_pieces = pieces(&mut dq, tasks.iter().map(|(_, span)| span.q.len() * width));
    let dk_pieces = pieces(&mut dk, tasks.iter().map(|(_, span)| span.k.len() * dim));
    let dv_pieces = pieces(&mut dv, tasks.iter().map(|(_, span)| span.k.len() * dim));
    let grads = dq_pieces.into_par_iter().zip(dk_pieces).zip(dv_pieces);
    tasks.par_iter().zip(grads).for_each(|((head, span), ((dq, dk), dv))| {
        let rows = head * t + span.q.start..head * t + span.q.end;
        let keys = head * s + span.k.start..head * s + span.k.end;
        let sequence = Sequence {
            q: part(&q, &rows, width),
            k: part(&k, &keys, dim),
            v: part(&v, &keys, dim),
            o: part(&o, &rows, width),
            d_o: part(&d_o, &rows, width),
            lse: part(inputs.lse, &rows, group),
            heads,
            spec,
        };
        sequence.backward(dq, dk, dv);
    });
    by_row(&dq, dq_out, n_kv, width);
    by_row(&dk, dk_out, n_kv, dim);
    by_row(&dv, dv_out, n_kv, dim);
}

fn part<'a>(x: &'a [f32], rows: &Range<usize>, width: usize) -> &'a [f32] {
    &x[rows.start * width..rows.end * width]
}

/// One sequence and one key head.
struct Sequence<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    o: &'a [f32],
    d_o: &'a [f32],
    lse: &'a [f32],
    heads: Heads,
    spec: &'a AttentionSpec,
}

impl Sequence<'_> {
    fn backward(&self, dq: &mut [f32], dk: &mut [f32], dv: &mut [f32]) {
        let Heads { group, dim, .. } = self.heads;
        let (n_queries, n_keys) = (self.q.len() / (group * dim), self.k.len() / dim);
        let height = queries_per_tile(self.heads);
        let mut scratch = Scratch::default();
        for start in (0..n_queries).step_by(height) {
            let rows = start * group..(start + height).min(n_queries) * group;
            let queries = Queries {
                q: part(self.q, &rows, dim),
                first: n_keys - n_queries + start,
                n_keys,
                heads: self.heads,
                spec: self.spec,
            };
            let dq = &mut dq[rows.start * dim..rows.end * dim];
            self.tile(&queries, rows, &mut scratch, dq, dk, dv);
        }
    }

    /// Adds what the queries of one tile give.
    fn tile(
        &self,
        queries: &Queries<'_>,
        rows: Range<usize>,
        scratch: &mut Scratch,
        dq: &mut [f32],
        dk: &mut [f32],
        dv: &mut [f32],
    ) {
        let (dim, scale) = (self.heads.dim, self.spec.scale);
        let (d_o, lse) = (part(self.d_o, &rows, dim), &self.lse[rows.clone()]);
        let delta = row_products(part(self.o, &rows, dim), d_o, dim);
        let n_rows = rows.len();
        for tile in queries.key_tiles() {
            let (k, v) = (part(self.k, &tile, dim), part(self.v, &tile, dim));
            let [p, ds] = scratch.matrices(n_rows * tile.len());
            queries.scores(k, p);
            queries.probabilities(p, &tile, lse);
            let (d_o, v) = (Mat::new(d_o, n_rows, dim), Mat::new(v, tile.len(), dim));
            let out = MatMut::new(ds, n_rows, tile.len());
            gemm(out, Old::Overwrite, d_o, v.t(), 1.0, Threads::One);
            softmax_backward(p, ds, &delta, tile.len());
            let keys = tile.start * dim..tile.end * dim;
            let p = Mat::new(p, n_rows, tile.len());
            let out = MatMut::new(&mut dv[keys.clone()], tile.len(), dim);
            gemm(out, Old::Keep, p.t(), d_o, 1.0, Threads::One);
            let ds = Mat::new(ds, n_rows, tile.len());
            let q = Mat::new(queries.q, n_rows, dim);
            let out = MatMut::new(&mut dk[keys], tile.len(), dim);
            gemm(out, Old::Keep, ds.t(), q, scale, Threads::One);
            let out = MatMut::new(dq, n_rows, dim);
            gemm(out, Old::Keep, ds, Mat::new(k, tile.len(), dim), scale, Threads::One);
        }
    }
}

/// ds = p (dp - delta), in place of dp.
fn softmax_backward(p: &[f32], dp: &mut [f32], delta: &[f32], n_keys: usize) {
    for ((p, dp), delta) in p.chunks_exact(n_keys).zip(dp.chunks_exact_mut(n_keys)).zip(delta) {
        p.iter().zip(dp).for_each(|(p, dp)| *dp = p * (*dp - delta));
    }
}

/// sum(a b) for each row of `dim` elements.
fn row_products(a: &[f32], b: &[f32], dim: usize) -> Vec<f32> {
    let rows = a.chunks_exact(dim).zip(b.chunks_exact(dim));
    rows.map(|(a, b)| dot(a, b)).collect()
}

/// Two score-sized matrices, reused from tile to tile.
#[derive(Default)]
struct Scratch {
    matrices: [Vec<f32>; 2],
}

impl Scratch {
    fn matrices(&mut self, len: usize) -> [&mut [f32]; 2] {
        self.matrices.each_mut().map(|matrix| {
            matrix.resize(matrix.len().max(len), 0.0);
            &mut matrix[..len]
        })
    }
}
