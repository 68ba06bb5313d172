//! Which keys a tile of queries sees, and the scores between two tiles.

use std::ops::Range;

use super::layout::Head;
use super::spec::AttentionSpec;
use crate::exp::exp;
use crate::gemm::{Accumulate, Mat, MatMut, Threads, gemm};
use crate::simd::vectorised;

/// Keys in a tile.
const KEYS: usize = 128;

/// Queries in a tile.
pub(super) const QUERIES: usize = 128;

/// The keys, of `n_keys`, that the query at `position` among them sees: none if all lie behind it, or too far before it.
pub(super) fn visible(spec: &AttentionSpec, n_keys: usize, position: isize) -> Range<usize> {
    let place = |at: isize| at.clamp(0, n_keys as isize) as usize;
    let start = spec.window.map_or(0, |window| place((position + 1).saturating_sub_unsigned(window)));
    let end = if spec.causal { place(position + 1) } else { n_keys };
    start.min(end)..end
}

/// A tile of queries of one sequence and head.
pub(super) struct Queries<'a> {
    /// f32 [n, dim]
    pub(super) q: Mat<'a>,
    /// How many there are.
    pub(super) n: usize,
    /// The position of the first query among its sequence's keys.
    pub(super) first: isize,
    pub(super) n_keys: usize,
    pub(super) spec: &'a AttentionSpec,
}

impl Queries<'_> {
    /// Keys that a query sees.
    fn visible(&self, query: usize) -> Range<usize> {
        visible(self.spec, self.n_keys, self.first + query as isize)
    }

    /// The tiles of keys of which some query sees something.
    pub(super) fn key_tiles(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (start, end) = (self.visible(0).start, self.visible(self.n - 1).end);
        (start..end).step_by(KEYS).map(move |start| start..(start + KEYS).min(end))
    }

    /// The part of a key tile that a query sees, counted from the tile's start.
    pub(super) fn visible_in(&self, query: usize, tile: &Range<usize>) -> Range<usize> {
        let visible = self.visible(query);
        let start = visible.start.clamp(tile.start, tile.end);
        let end = visible.end.clamp(start, tile.end);
        start - tile.start..end - tile.start
    }

    /// scores [n, keys of the tile] = scale q k^T, masked or not.
    pub(super) fn scores(&self, k: Mat<'_>, n_keys: usize, scores: &mut [f32]) {
        let out = MatMut::new(scores, self.n, n_keys);
        gemm(out, Accumulate::Overwrite, self.q, k.t(), self.spec.scale, Threads::One);
    }

    /// Turns scores into probabilities e^(score - lse), zero where a query does not see the key.
    pub(super) fn probabilities(&self, scores: &mut [f32], tile: &Range<usize>, lse: &[f32]) {
        for (query, scores) in scores.chunks_exact_mut(tile.len()).enumerate() {
            let visible = self.visible_in(query, tile);
            clear_outside(scores, &visible);
            let (scores, lse) = (&mut scores[visible], lse[query]);
            vectorised!(scores.iter_mut().for_each(|score| *score = exp(*score - lse)));
        }
    }
}

/// The rows `tile` of a sequence whose keys are `span`.
pub(super) fn of_span<'a>(head: Head<'a>, span: &Range<usize>, tile: &Range<usize>) -> Mat<'a> {
    head.rows(span.start + tile.start..span.start + tile.end)
}

/// Zeroes what a query does not see.
pub(super) fn clear_outside(row: &mut [f32], visible: &Range<usize>) {
    row[..visible.start].fill(0.0);
    row[visible.end..].fill(0.0);
}
