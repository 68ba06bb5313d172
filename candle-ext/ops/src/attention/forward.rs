//! CPU kernel of the attention forward: a task for each head and tile of queries.
//!
//! With instructions for bf16, matmuls of bf16 tensors read bf16, and probabilities are rounded for them, as on a GPU.

use rayon::prelude::*;

use super::cu_seqlens::{CuSeqlens, SequenceRange};
use super::layout::{HeadCounts, HeadView, by_row, split_by_lens};
use super::spec::AttentionSpec;
use super::tile::{MatmulElement, QUERIES, Queries, clear_outside, of_span};
use crate::exp;
use crate::floats::{Floats, FloatsMut};
use crate::gemm::{Accumulate, Mat, MatMut, has_bf16_unit};
use crate::simd::vectorised;

/// Writes the output and returns the log-sum-exp of each row, f32 [heads, t].
pub(super) fn run(
    [q, k, v]: [Floats<'_>; 3],
    out: FloatsMut<'_>,
    seqs: &CuSeqlens,
    spec: &AttentionSpec,
    heads: HeadCounts,
) -> Vec<f32> {
    if let (Floats::Bf16(q), Floats::Bf16(k), Floats::Bf16(v), true) = (q, k, v, has_bf16_unit()) {
        return run_as([q, k, v], out, seqs, spec, heads);
    }
    let mut wide = [const { Vec::new() }; 3];
    let [q_wide, k_wide, v_wide] = &mut wide;
    run_as([q.widened(q_wide), k.widened(k_wide), v.widened(v_wide)], out, seqs, spec, heads)
}

fn run_as<T: MatmulElement>(
    [q, k, v]: [&[T]; 3],
    out: FloatsMut<'_>,
    seqs: &CuSeqlens,
    spec: &AttentionSpec,
    heads: HeadCounts,
) -> Vec<f32> {
    let HeadCounts { n_kv, group, dim } = heads;
    let n_heads = heads.n_query_heads();
    let mut o = vec![0.0; q.len()];
    let mut lse = vec![0.0; n_heads * seqs.n_tokens()];
    let tiles = tiles(seqs, n_heads);
    let o_tiles = split_by_lens(&mut o, tiles.iter().map(|tile| tile.n_queries * dim));
    let lse_tiles = split_by_lens(&mut lse, tiles.iter().map(|tile| tile.n_queries));
    let mut tasks: Vec<_> = tiles.iter().zip(o_tiles).zip(lse_tiles).collect();
    // Run tasks that read the same keys one after another, for cache locality.
    tasks.sort_by_key(|((tile, _), _)| (tile.span.k.start, tile.head / group, tile.offset));
    tasks.into_par_iter().for_each(|((tile, o), lse)| {
        let Tile { head, span, offset, n_queries } = tile;
        let start = span.q.start + offset;
        let queries = Queries {
            q: HeadView::new(q, n_heads, dim, *head).rows(start..start + n_queries),
            n: *n_queries,
            first: span.first + *offset as isize,
            n_keys: span.k.len(),
            spec,
        };
        let (k, v) = (HeadView::new(k, n_kv, dim, head / group), HeadView::new(v, n_kv, dim, head / group));
        attend(&queries, (k, v), span, o, lse);
    });
    by_row(&o, out, n_heads, dim);
    lse
}

/// A tile: `n_queries` queries of a sequence from `offset` on, for one head.
struct Tile {
    head: usize,
    span: SequenceRange,
    offset: usize,
    n_queries: usize,
}

/// Lists all tiles, in the order of the [heads, t, ..] buffers.
fn tiles(seqs: &CuSeqlens, n_heads: usize) -> Vec<Tile> {
    let of_span = |head, span: SequenceRange| {
        (0..span.q.len()).step_by(QUERIES).map(move |offset| Tile {
            head,
            offset,
            n_queries: QUERIES.min(span.q.len() - offset),
            span: span.clone(),
        })
    };
    (0..n_heads).flat_map(|head| seqs.spans().flat_map(move |span| of_span(head, span))).collect()
}

/// Computes online softmax over the tiles of keys (Milakov and Gimelshein 2018).
///
/// A row that is masked in a whole tile stays unchanged. A fully masked row gives zeros and a log-sum-exp of -inf; that
/// occurs in an [`AttentionChunk`](super::AttentionChunk).
fn attend<T: MatmulElement>(
    queries: &Queries<'_, T>,
    (k, v): (HeadView<'_, T>, HeadView<'_, T>),
    span: &SequenceRange,
    o: &mut [f32],
    lse: &mut [f32],
) {
    let (rows, dim) = (queries.n, o.len() / queries.n);
    let mut maxima = vec![f32::NEG_INFINITY; rows];
    let mut sums = vec![0.0f32; rows];
    let (mut scores, mut rounded) = (Vec::new(), Vec::new());
    for tile in queries.key_tiles() {
        scores.resize(rows * tile.len(), 0.0);
        queries.scores(of_span(k, &span.k, &tile), tile.len(), &mut scores);
        for (row, scores) in scores.chunks_exact_mut(tile.len()).enumerate() {
            let visible = queries.visible_in(row, &tile);
            clear_outside(scores, &visible);
            if visible.is_empty() {
                continue;
            }
            let scores = &mut scores[visible];
            let max = exp::max(scores).max(maxima[row]);
            let shrink = exp::exp(maxima[row] - max);
            sums[row] = sums[row] * shrink + exp::exp_shifted(scores, max);
            maxima[row] = max;
            let o = &mut o[row * dim..(row + 1) * dim];
            vectorised!(o.iter_mut().for_each(|o| *o *= shrink));
        }
        let p = Mat::new(T::of(&scores, &mut rounded), rows, tile.len());
        T::gemm(MatMut::new(o, rows, dim), Accumulate::Add, p, of_span(v, &span.k, &tile), 1.0);
    }
    for (row, o) in o.chunks_exact_mut(dim).enumerate() {
        if sums[row] != 0.0 {
            o.iter_mut().for_each(|o| *o /= sums[row]);
        }
        lse[row] = maxima[row] + sums[row].ln();
    }
}
