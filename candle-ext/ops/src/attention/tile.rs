//! Which keys a tile of queries sees, and the scores between two tiles.

use std::ops::Range;

use super::{AttentionSpec, Heads};
use crate::exp::exp;
use crate::gemm::{Mat, MatMut, Old, Threads, gemm};

/// Keys in a tile.
const KEYS: usize = 128;

/// Rows (queries times heads of the group) in a tile, about.
const ROWS: usize = 128;

// The first tile of keys starts where the first query's view does, and the views of the others
// start at most one key later each: with no more queries than keys, all of them see into it.
const _: () = assert!(ROWS <= KEYS);

/// Queries in a tile.
pub(super) fn queries_per_tile(heads: Heads) -> usize {
    (ROWS / heads.group).max(1)
}

/// A tile of queries of one sequence, for all heads of a group.
pub(super) struct Queries<'a> {
    /// f32 [n, group, dim]
    pub(super) q: &'a [f32],
    /// The position of the first query among its sequence's keys.
    pub(super) first: usize,
    pub(super) n_keys: usize,
    pub(super) heads: Heads,
    pub(super) spec: &'a AttentionSpec,
}

impl Queries<'_> {
    /// Rows of the score matrix.
    pub(super) fn n_rows(&self) -> usize {
        self.q.len() / self.heads.dim
    }

    /// Keys that the query at `position` sees.
    fn visible(&self, position: usize) -> Range<usize> {
        let start = self.spec.window.map_or(0, |window| (position + 1).saturating_sub(window));
        let end = if self.spec.causal { position + 1 } else { self.n_keys };
        start..end
    }

    /// The tiles of keys of which some query sees something.
    pub(super) fn key_tiles(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let last = self.first + self.n_rows() / self.heads.group - 1;
        let (start, end) = (self.visible(self.first).start, self.visible(last).end);
        (start..end).step_by(KEYS).map(move |start| start..(start + KEYS).min(end))
    }

    /// The part of a key tile that a row sees, counted from the tile's start.
    pub(super) fn visible_in(&self, row: usize, tile: &Range<usize>) -> Range<usize> {
        let visible = self.visible(self.first + row / self.heads.group);
        let start = visible.start.clamp(tile.start, tile.end);
        let end = visible.end.clamp(start, tile.end);
        start - tile.start..end - tile.start
    }

    /// scores = scale q k^T, masked or not.
    pub(super) fn scores(&self, keys: &[f32], scores: &mut [f32]) {
        let (rows, dim) = (self.n_rows(), self.heads.dim);
        let n_keys = keys.len() / dim;
        let (q, k) = (Mat::new(self.q, rows, dim), Mat::new(keys, n_keys, dim));
        let out = MatMut::new(scores, rows, n_keys);
        gemm(out, Old::Overwrite, q, k.t(), self.spec.scale, Threads::One);
    }

    /// Turns scores into probabilities e^(score - lse), zero where a row does not see the key.
    pub(super) fn probabilities(&self, scores: &mut [f32], tile: &Range<usize>, lse: &[f32]) {
        for (row, scores) in scores.chunks_exact_mut(tile.len()).enumerate() {
            let visible = self.visible_in(row, tile);
            clear_outside(scores, &visible);
            scores[visible].iter_mut().for_each(|score| *score = exp(*score - lse[row]));
        }
    }
}

/// Zeroes what a row does not see.
pub(super) fn clear_outside(row: &mut [f32], visible: &Range<usize>) {
    row[..visible.start].fill(0.0);
    row[visible.end..].fill(0.0);
}
