//! CPU kernel of the attention forward: a task for each head and block of queries.
//!
//! With instructions for bf16, matmuls of bf16 tensors read bf16, and probabilities are rounded for them, as on a GPU.

use std::ops::Range;

use rayon::prelude::*;

use super::cu_seqlens::{CuSeqlens, SequenceRange};
use super::layout::{HeadCounts, HeadView, by_row, split_by_lens};
use super::spec::AttentionSpec;
use super::tile::{
    MatmulElement, QUERIES, Queries, clear_outside, key_tiles, keys_of, of_span, overlap, tiles_per_block,
};
use crate::exp;
use crate::floats::{Floats, FloatsMut, first_of};
use crate::gemm::{Accumulate, Mat, MatMut, PackedOperand, gemm_packed, has_bf16_unit};
use crate::simd::vectorised;

/// Fewest tasks per thread, for load balance.
const TASKS: usize = 4;

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
    let blocks = blocks(seqs, n_heads, dim);
    let o_blocks = split_by_lens(&mut o, blocks.iter().map(|block| block.queries.len() * dim));
    let lse_blocks = split_by_lens(&mut lse, blocks.iter().map(|block| block.queries.len()));
    let mut tasks: Vec<_> = blocks.iter().zip(o_blocks).zip(lse_blocks).collect();
    // Run tasks that read the same keys one after another, for cache locality.
    tasks.sort_by_key(|((block, _), _)| (block.span.k.start, block.head / group, block.queries.start));
    tasks.into_par_iter().for_each(|((block, o), lse)| {
        let Block { head, span, queries } = block;
        let q = HeadView::new(q, n_heads, dim, *head);
        let tiles: Vec<_> = queries
            .clone()
            .step_by(QUERIES)
            .map(|first| {
                let n = QUERIES.min(queries.end - first);
                let start = span.q.start + first;
                let (first, n_keys) = (span.first + first as isize, span.k.len());
                Queries { q: q.rows(start..start + n), n, first, n_keys, spec }
            })
            .collect();
        let (k, v) = (HeadView::new(k, n_kv, dim, head / group), HeadView::new(v, n_kv, dim, head / group));
        match tiles.as_slice() {
            [one] if span.q.len() == 1 => attend_one(one, (k, v), span, o, &mut lse[0]),
            tiles => attend(tiles, (k, v), span, o, lse),
        }
    });
    by_row(&o, out, n_heads, dim);
    lse
}

/// Some queries of a sequence and one head, in tiles that read the packed keys of a tile together.
struct Block {
    head: usize,
    span: SequenceRange,
    /// Queries of the sequence.
    queries: Range<usize>,
}

/// Lists all blocks, in the order of the [heads, t, ..] buffers. Their size does not change the results.
fn blocks(seqs: &CuSeqlens, n_heads: usize, dim: usize) -> Vec<Block> {
    let n_tiles: usize = n_heads * seqs.spans().map(|span| span.q.len().div_ceil(QUERIES)).sum::<usize>();
    let balanced = n_tiles / (TASKS * rayon::current_num_threads());
    let size = QUERIES * balanced.clamp(1, tiles_per_block(dim));
    let of_span = |head, span: SequenceRange| {
        let n = span.q.len();
        (0..n).step_by(size).map(move |first| Block { head, queries: first..(first + size).min(n), span: span.clone() })
    };
    (0..n_heads).flat_map(|head| seqs.spans().flat_map(move |span| of_span(head, span))).collect()
}

/// Online softmax of some rows (Milakov and Gimelshein 2018).
///
/// A row that is masked in a whole tile stays unchanged. A fully masked row gives zeros and a log-sum-exp of -inf; that
/// occurs in an [`AttentionChunk`](super::AttentionChunk).
struct OnlineSoftmax {
    maxima: Vec<f32>,
    sums: Vec<f32>,
}

impl OnlineSoftmax {
    fn new(n_rows: usize) -> Self {
        Self { maxima: vec![f32::NEG_INFINITY; n_rows], sums: vec![0.0; n_rows] }
    }

    /// Turns the scores of a tile into e^(score - maximum), zero for masked keys, and scales the outputs so far.
    fn add<T: MatmulElement>(
        &mut self,
        queries: &Queries<'_, T>,
        keys: &Range<usize>,
        scores: &mut [f32],
        o: &mut [f32],
    ) {
        let dim = o.len() / queries.n;
        for (row, (scores, o)) in scores.chunks_exact_mut(keys.len()).zip(o.chunks_exact_mut(dim)).enumerate() {
            let visible = queries.visible_in(row, keys);
            clear_outside(scores, &visible);
            if visible.is_empty() {
                continue;
            }
            let scores = &mut scores[visible];
            let max = exp::max(scores).max(self.maxima[row]);
            let shrink = exp::exp(self.maxima[row] - max);
            self.sums[row] = self.sums[row] * shrink + exp::exp_shifted(scores, max);
            self.maxima[row] = max;
            vectorised!(o.iter_mut().for_each(|o| *o *= shrink));
        }
    }

    /// Normalizes the outputs and writes the log-sum-exps.
    fn finish(&self, o: &mut [f32], lse: &mut [f32]) {
        let dim = o.len() / lse.len();
        for (row, (o, lse)) in o.chunks_exact_mut(dim).zip(lse).enumerate() {
            if self.sums[row] != 0.0 {
                o.iter_mut().for_each(|o| *o /= self.sums[row]);
            }
            *lse = self.maxima[row] + self.sums[row].ln();
        }
    }
}

/// Computes the tiles of a block. Each tile of keys and values is packed once for all of them.
fn attend<T: MatmulElement>(
    tiles: &[Queries<'_, T>],
    (k, v): (HeadView<'_, T>, HeadView<'_, T>),
    span: &SequenceRange,
    o: &mut [f32],
    lse: &mut [f32],
) {
    let dim = o.len() / lse.len();
    let mut states: Vec<_> =
        tiles.iter().map(|tile| (PackedOperand::left(tile.q), OnlineSoftmax::new(tile.n))).collect();
    let [mut k_packed, mut v_packed, mut p_packed] = [(); 3].map(|()| PackedOperand::default());
    let (mut scores, mut rounded) = (Vec::new(), Vec::new());
    for keys in key_tiles(keys_of(tiles.iter()), span.k.len()) {
        let k = k_packed.pack_right(of_span(k, &span.k, &keys).t());
        let v = v_packed.pack_right(of_span(v, &span.k, &keys));
        for ((tile, o), (q, softmax)) in tiles.iter().zip(o.chunks_mut(QUERIES * dim)).zip(&mut states) {
            if !overlap(&tile.keys(), &keys) {
                continue;
            }
            let scores = first_of(&mut scores, tile.n * keys.len());
            let out = MatMut::new(scores, tile.n, keys.len());
            gemm_packed(out, Accumulate::Overwrite, q, k, tile.spec.scale);
            softmax.add(tile, &keys, scores, o);
            let p = p_packed.pack_left(Mat::new(T::of(scores, &mut rounded), tile.n, keys.len()));
            gemm_packed(MatMut::new(o, tile.n, dim), Accumulate::Add, p, v, 1.0);
        }
    }
    for ((o, lse), (_, softmax)) in o.chunks_mut(QUERIES * dim).zip(lse.chunks_mut(QUERIES)).zip(&states) {
        softmax.finish(o, lse);
    }
}

/// Computes a single query, whose matmuls read keys and values without packing.
fn attend_one<T: MatmulElement>(
    query: &Queries<'_, T>,
    (k, v): (HeadView<'_, T>, HeadView<'_, T>),
    span: &SequenceRange,
    o: &mut [f32],
    lse: &mut f32,
) {
    let (dim, mut softmax) = (o.len(), OnlineSoftmax::new(1));
    let (mut scores, mut rounded) = (Vec::new(), Vec::new());
    for keys in key_tiles(query.keys(), span.k.len()) {
        let (k, v) = (of_span(k, &span.k, &keys), of_span(v, &span.k, &keys));
        let scores = first_of(&mut scores, keys.len());
        let out = MatMut::new(scores, 1, keys.len());
        T::gemm(out, Accumulate::Overwrite, query.q, k.t(), query.spec.scale);
        softmax.add(query, &keys, scores, o);
        let p = Mat::new(T::of(scores, &mut rounded), 1, keys.len());
        T::gemm(MatMut::new(o, 1, dim), Accumulate::Add, p, v, 1.0);
    }
    softmax.finish(o, std::slice::from_mut(lse));
}
