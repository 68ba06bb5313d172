//! Tiles of queries and keys: their visible ranges and scores.

use std::ops::Range;

use half::bf16;

use super::layout::HeadView;
use super::spec::AttentionSpec;
use crate::exp::exp;
use crate::floats::{Floats, round_to_bf16};
use crate::gemm::{Accumulate, Mat, MatMut, OperandElement, Threads, gemm, gemm_bf16};
use crate::simd::vectorised;

/// Keys of a tile.
const KEYS: usize = 128;

/// Queries of a tile.
pub(super) const QUERIES: usize = 128;

/// Most tiles of queries that read the packed keys of a tile.
const TILES: usize = 4;
/// Elements of a query row times tiles of queries, so that their packed rows fit into the L2 cache.
const TILE_ELEMENTS: usize = 256;

/// Returns the most tiles of queries of a block: tiles that read the packed keys of a tile together.
pub(super) fn tiles_per_block(dim: usize) -> usize {
    (TILE_ELEMENTS / dim).clamp(1, TILES)
}

/// Returns the keys, of `n_keys`, that the query at `position` sees; an empty range if the mask hides all.
pub(super) fn visible(spec: &AttentionSpec, n_keys: usize, position: isize) -> Range<usize> {
    let place = |at: isize| at.clamp(0, n_keys as isize) as usize;
    let start = spec.window.map_or(0, |window| place((position + 1).saturating_sub_unsigned(window)));
    let end = if spec.causal { place(position + 1) } else { n_keys };
    start.min(end)..end
}

/// Elements that attention's matmuls read. Softmax and sums are f32.
pub(super) trait MatmulElement: OperandElement + Send + Sync {
    /// Computes out = [out +] scale a b on the calling thread.
    fn gemm(out: MatMut<'_>, accumulate: Accumulate, a: Mat<'_, Self>, b: Mat<'_, Self>, scale: f32);

    /// Returns the values as operands: themselves, or rounded into `scratch`.
    fn of<'s>(values: &'s [f32], scratch: &'s mut Vec<Self>) -> &'s [Self];

    /// Returns the elements as f32: themselves, or converted into `scratch`.
    fn widened<'s>(elements: &'s [Self], scratch: &'s mut Vec<f32>) -> &'s [f32];
}

impl MatmulElement for f32 {
    fn gemm(out: MatMut<'_>, accumulate: Accumulate, a: Mat<'_>, b: Mat<'_>, scale: f32) {
        gemm(out, accumulate, a, b, scale, Threads::One);
    }

    fn of<'s>(values: &'s [f32], _: &'s mut Vec<f32>) -> &'s [f32] {
        values
    }

    fn widened<'s>(elements: &'s [f32], _: &'s mut Vec<f32>) -> &'s [f32] {
        elements
    }
}

impl MatmulElement for bf16 {
    fn gemm(out: MatMut<'_>, accumulate: Accumulate, a: Mat<'_, bf16>, b: Mat<'_, bf16>, scale: f32) {
        gemm_bf16(out, accumulate, a, b, scale, Threads::One);
    }

    fn of<'s>(values: &'s [f32], scratch: &'s mut Vec<bf16>) -> &'s [bf16] {
        scratch.resize(values.len(), bf16::ZERO);
        round_to_bf16(values, scratch);
        scratch
    }

    fn widened<'s>(elements: &'s [bf16], scratch: &'s mut Vec<f32>) -> &'s [f32] {
        Floats::Bf16(elements).widened_here(scratch)
    }
}

/// A tile of queries of one sequence and head.
pub(super) struct Queries<'a, T> {
    /// Query rows [n, dim].
    pub(super) q: Mat<'a, T>,
    /// Number of queries.
    pub(super) n: usize,
    /// Position of the first query among its sequence's keys.
    pub(super) first: isize,
    pub(super) n_keys: usize,
    pub(super) spec: &'a AttentionSpec,
}

impl<T: MatmulElement> Queries<'_, T> {
    /// Returns the keys that a query sees.
    fn visible(&self, query: usize) -> Range<usize> {
        visible(self.spec, self.n_keys, self.first + query as isize)
    }

    /// Returns the keys that some query sees, from the first to the last.
    pub(super) fn keys(&self) -> Range<usize> {
        self.visible(0).start..self.visible(self.n - 1).end
    }

    /// Returns a query's visible range within a key tile, counted from the tile's start.
    pub(super) fn visible_in(&self, query: usize, tile: &Range<usize>) -> Range<usize> {
        let visible = self.visible(query);
        let start = visible.start.clamp(tile.start, tile.end);
        let end = visible.end.clamp(start, tile.end);
        start - tile.start..end - tile.start
    }

    /// Turns scores into probabilities e^(score - lse), zero for masked keys.
    pub(super) fn probabilities(&self, scores: &mut [f32], tile: &Range<usize>, lse: &[f32]) {
        for (query, scores) in scores.chunks_exact_mut(tile.len()).enumerate() {
            let visible = self.visible_in(query, tile);
            clear_outside(scores, &visible);
            let (scores, lse) = (&mut scores[visible], lse[query]);
            vectorised!(scores.iter_mut().for_each(|score| *score = exp(*score - lse)));
        }
    }
}

/// Returns the keys that some query of consecutive tiles sees, from the first to the last.
pub(super) fn keys_of<'a, T: MatmulElement + 'a>(tiles: impl Iterator<Item = &'a Queries<'a, T>>) -> Range<usize> {
    // Neither end of a query's visible range decreases from one query to the next.
    tiles.map(Queries::keys).reduce(|all, keys| all.start..keys.end).unwrap_or(0..0)
}

/// Returns true if two ranges have a common element.
pub(super) fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start.max(b.start) < a.end.min(b.end)
}

/// Returns the tiles that hold these keys of `n_keys`; none without keys. Tiles of a sequence start at multiples of their size.
pub(super) fn key_tiles(keys: Range<usize>, n_keys: usize) -> impl Iterator<Item = Range<usize>> {
    let first = if keys.is_empty() { keys.end } else { keys.start / KEYS * KEYS };
    let starts = (first..keys.end).step_by(KEYS);
    starts.map(move |start| start..(start + KEYS).min(n_keys))
}

/// Returns the rows `tile` of a sequence whose keys are `span`.
pub(super) fn of_span<'a, T>(head: HeadView<'a, T>, span: &Range<usize>, tile: &Range<usize>) -> Mat<'a, T> {
    head.rows(span.start + tile.start..span.start + tile.end)
}

/// Zeroes the scores of masked keys.
pub(super) fn clear_outside(row: &mut [f32], visible: &Range<usize>) {
    row[..visible.start].fill(0.0);
    row[visible.end..].fill(0.0);
}
