//! The forward CPU kernel: a task for each tile of queries.

use rayon::prelude::*;

use super::layout::{Heads, by_head, by_row, pieces};
use super::seqs::Span;
use super::tile::{Queries, clear_outside, queries_per_tile};
use super::{AttentionSpec, Seqs};
use crate::exp;
use crate::floats::{Floats, FloatsMut};
use crate::gemm::{Mat, MatMut, Old, Threads, gemm};

/// Writes the output and returns the log-sum-exp of each row, f32 [hkv, t, group].
pub(super) fn run(
    [q, k, v]: [Floats<'_>; 3],
    out: FloatsMut<'_>,
    seqs: &Seqs,
    spec: &AttentionSpec,
    heads: Heads,
) -> Vec<f32> {
    let Heads { n_kv, group, dim } = heads;
    let (t, s, width) = (seqs.n_tokens(), seqs.n_keys(), group * dim);
    let q = by_head(q, n_kv, width);
    let (k, v) = (by_head(k, n_kv, dim), by_head(v, n_kv, dim));
    let mut o = vec![0.0; q.len()];
    let mut lse = vec![0.0; n_kv * t * group];
    let tiles = tiles(seqs, heads);
    let o_tiles = pieces(&mut o, tiles.iter().map(|tile| tile.n_queries * width));
    let lse_tiles = pieces(&mut lse, tiles.iter().map(|tile| tile.n_queries * group));
    tiles.par_iter().zip(o_tiles).zip(lse_tiles).for_each(|((tile, o), lse)| {
        let start = (tile.head * t + tile.span.q.start + tile.offset) * width;
        let queries = Queries {
            q: &q[start..start + o.len()],
            first: tile.span.k.len() - tile.span.q.len() + tile.offset,
            n_keys: tile.span.k.len(),
            heads,
            spec,
        };
        let keys = (tile.head * s + tile.span.k.start) * dim..(tile.head * s + tile.span.k.end) * dim;
        attend(&queries, &k[keys.clone()], &v[keys], o, lse);
    });
    by_row(&o, out, n_kv, width);
    lse
}

/// `n_queries` of a sequence from `offset` on, for one key head.
struct Tile {
    head: usize,
    span: Span,
    offset: usize,
    n_queries: usize,
}

/// All tiles, in the order of the [n_kv, t, ..] buffers that they tile.
fn tiles(seqs: &Seqs, heads: Heads) -> Vec<Tile> {
    let height = queries_per_tile(heads);
    let of_span = |head, span: Span| {
        (0..span.q.len()).step_by(height).map(move |offset| Tile {
            head,
            offset,
            n_queries: height.min(span.q.len() - offset),
            span: span.clone(),
        })
    };
    (0..heads.n_kv).flat_map(|head| seqs.spans().flat_map(move |span| of_span(head, span))).collect()
}

/// Softmax over the tiles of keys with a running maximum and sum (Milakov and Gimelshein 2018).
///
/// A row sees some key of the first tile (`tile` says why), so its maximum is finite ever after.
fn attend(queries: &Queries<'_>, k: &[f32], v: &[f32], o: &mut [f32], lse: &mut [f32]) {
    let (rows, dim) = (queries.n_rows(), queries.heads.dim);
    let mut maxima = vec![f32::NEG_INFINITY; rows];
    let mut sums = vec![0.0f32; rows];
    let mut scores = Vec::new();
    for tile in queries.key_tiles() {
        let keys = tile.start * dim..tile.end * dim;
        scores.resize(rows * tile.len(), 0.0);
        queries.scores(&k[keys.clone()], &mut scores);
        for (row, scores) in scores.chunks_exact_mut(tile.len()).enumerate() {
            let visible = queries.visible_in(row, &tile);
            clear_outside(scores, &visible);
            let scores = &mut scores[visible];
            let max = exp::max(scores).max(maxima[row]);
            let shrink = exp::exp(maxima[row] - max);
            sums[row] = sums[row] * shrink + exp::exp_shifted(scores, max);
            maxima[row] = max;
            o[row * dim..(row + 1) * dim].iter_mut().for_each(|o| *o *= shrink);
        }
        let (p, v) = (Mat::new(&scores, rows, tile.len()), Mat::new(&v[keys], tile.len(), dim));
        gemm(MatMut::new(o, rows, dim), Old::Keep, p, v, 1.0, Threads::One);
    }
    for (row, o) in o.chunks_exact_mut(dim).enumerate() {
        o.iter_mut().for_each(|o| *o /= sums[row]);
        lse[row] = maxima[row] + sums[row].ln();
    }
}
