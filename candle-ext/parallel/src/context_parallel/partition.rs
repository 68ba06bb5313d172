//! Assignment of tokens to context parallel ranks, balanced for causal attention.
//!
//! Rank r of n has chunks r and 2n - 1 - r of 2n chunks. A late chunk costs as much more as the early one costs less.
//! Ulysses ranks split these tokens evenly, in order.

use std::ops::Range;

/// Assignment of a padded micro-batch to ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TokenPartition {
    n_context: usize,
    n_sequence: usize,
    n_total: usize,
}

impl TokenPartition {
    /// Creates the partition. `n_tokens` is padded to equal shares.
    pub(super) fn new(n_tokens: usize, n_context: usize, n_sequence: usize) -> Self {
        Self { n_context, n_sequence, n_total: n_tokens.next_multiple_of(n_context * n_sequence) }
    }

    /// Returns the early and the late chunk of a context parallel rank.
    pub(super) fn chunks(&self, context_rank: usize) -> [Range<usize>; 2] {
        let [early, late] = self.chunk_lens();
        let late_start = self.n_context * early + (self.n_context - 1 - context_rank) * late;
        [context_rank * early..(context_rank + 1) * early, late_start..late_start + late]
    }

    /// Returns the tokens of a Ulysses rank within a context parallel rank, in its order.
    pub(super) fn rows(&self, context_rank: usize, sequence_rank: usize) -> Vec<Range<usize>> {
        let n_own = self.n_total / self.n_context / self.n_sequence;
        let own = sequence_rank * n_own..(sequence_rank + 1) * n_own;
        let [early, late] = self.chunks(context_rank);
        let in_early = own.start.min(early.len())..own.end.min(early.len());
        let in_late = own.start.max(early.len()) - early.len()..own.end.max(early.len()) - early.len();
        let parts = [(early, in_early), (late, in_late)];
        let partition = parts.map(|(chunk, part)| chunk.start + part.start..chunk.start + part.end);
        match partition {
            [first, second] if first.end == second.start => std::iter::once(first.start..second.end).collect(),
            both => both.into_iter().filter(|range| !range.is_empty()).collect(),
        }
    }

    /// Returns the position of each chunk in the concatenation of all ranks' tokens, in token order.
    pub(super) fn in_order(&self) -> Vec<Range<usize>> {
        let [early, late] = self.chunk_lens();
        let start = |rank: usize| rank * (early + late);
        let early_ones = (0..self.n_context).map(|rank| start(rank)..start(rank) + early);
        let late_ones = (0..self.n_context).rev().map(|rank| start(rank) + early..start(rank) + early + late);
        early_ones.chain(late_ones).collect()
    }

    fn chunk_lens(&self) -> [usize; 2] {
        let n_own = self.n_total / self.n_context;
        [n_own.div_ceil(2), n_own / 2]
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "a list of one range is meant")]
mod tests {
    use super::*;

    fn all() -> impl Iterator<Item = (usize, TokenPartition)> {
        let degrees = (1..6).flat_map(|context| (1..5).map(move |sequence| (context, sequence)));
        degrees.flat_map(|(context, sequence)| (0..70).map(move |n| (n, TokenPartition::new(n, context, sequence))))
    }

    #[test]
    fn every_token_is_on_one_rank_and_all_ranks_have_as_many() {
        for (n_tokens, partition) in all() {
            let ranks = (0..partition.n_context).flat_map(|c| (0..partition.n_sequence).map(move |s| (c, s)));
            let mut tokens = Vec::new();
            for (context, sequence) in ranks {
                let own: Vec<usize> = partition.rows(context, sequence).into_iter().flatten().collect();
                assert_eq!(own.len() * partition.n_context * partition.n_sequence, partition.n_total, "{partition:?}");
                tokens.extend(own);
            }
            tokens.sort_unstable();
            assert!(tokens.into_iter().eq(0..partition.n_total), "{partition:?}");
            assert!(partition.n_total < n_tokens + partition.n_context * partition.n_sequence, "{partition:?}");
        }
    }

    #[test]
    fn the_parts_of_a_context_rank_are_its_chunks() {
        for (_, partition) in all() {
            for context in 0..partition.n_context {
                let parts = (0..partition.n_sequence).flat_map(|sequence| partition.rows(context, sequence)).flatten();
                assert!(parts.eq(partition.chunks(context).into_iter().flatten()), "{partition:?}");
            }
        }
    }

    #[test]
    fn gathered_chunks_are_put_in_order() {
        for (_, partition) in all() {
            let gathered: Vec<usize> =
                (0..partition.n_context).flat_map(|rank| partition.chunks(rank)).flatten().collect();
            assert!(
                partition.in_order().into_iter().flatten().map(|at| gathered[at]).eq(0..partition.n_total),
                "{partition:?}"
            );
        }
    }

    #[test]
    fn chunks_are_dealt_out_from_both_ends() {
        let partition = TokenPartition::new(16, 4, 1);
        assert_eq!(
            [0, 1, 2, 3].map(|rank| partition.rows(rank, 0)).concat(),
            [0..2, 14..16, 2..4, 12..14, 4..6, 10..12, 6..10]
        );
        let partition = TokenPartition::new(15, 2, 2);
        assert_eq!([0, 1].map(|rank| partition.rows(0, rank)).concat(), [0..4, 12..16]);
        assert_eq!(TokenPartition::new(7, 1, 2).rows(0, 1), [4..8]);
    }

    /// Pairs of a token and a token that it attends to.
    #[test]
    fn causal_work_is_balanced() {
        for n_context in [2, 3, 4, 8] {
            let partition = TokenPartition::new(64 * n_context, n_context, 1);
            let work = |rank| -> usize { partition.chunks(rank).into_iter().flatten().map(|token| token + 1).sum() };
            assert!((1..n_context).all(|rank| work(rank) == work(0)), "{n_context}");
        }
    }
}
