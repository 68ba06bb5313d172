//! Sequence lengths and offsets for cuDNN, padded to a few sizes.

use super::cu_seqlens::CuSeqlens;
use super::layout::HeadCounts;

/// Rounded-up sizes that a cuDNN graph is built for.
///
/// Building a graph takes longer than running it, and packed batches rarely repeat their lengths. A graph therefore
/// serves every batch that fits its rounded sizes:
///
/// * The number of sequences, to a power of two. Missing sequences are empty.
/// * The longest sequence, to a power of two. It sizes the grid; blocks past a sequence's end exit at once.
/// * The total tokens, to a quarter of a power of two. They size the backward's workspace, of which at most a fifth is
///   unused.
///
/// Rows of at most 4096 tokens need about 30 graphs in the worst case, and a few in practice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Bucket {
    /// Number of sequences.
    pub(super) batch: usize,
    /// Queries of the longest sequence.
    pub(super) max_q: usize,
    /// Keys of the longest sequence.
    pub(super) max_k: usize,
    /// Queries of all sequences.
    pub(super) total_q: usize,
    /// Keys of all sequences.
    pub(super) total_k: usize,
}

impl Bucket {
    /// Smallest number of sequences. Rows of the tables then start at multiples of 16 bytes, as cuDNN requires.
    const MIN_BATCH: usize = 4;
    /// Smallest maximum length: one tile.
    const MIN_LEN: usize = 128;

    pub(super) fn of(seqs: &CuSeqlens) -> Self {
        let longest = |cu: &[usize]| cu.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0);
        let max = |cu| longest(cu).max(Self::MIN_LEN).next_power_of_two();
        let (max_q, max_k) = (max(seqs.cu_seqlens_q()), max(seqs.cu_seqlens_k()));
        Self {
            batch: seqs.n_seqs().max(Self::MIN_BATCH).next_power_of_two(),
            max_q,
            max_k,
            total_q: quarter(seqs.n_tokens().max(max_q)),
            total_k: quarter(seqs.n_keys().max(max_k)),
        }
    }
}

/// Returns the smallest multiple of a quarter of a power of two that is at least n: 1024, 1280, 1536, 1792, 2048, 2560,
/// ...
fn quarter(n: usize) -> usize {
    n.next_multiple_of((n.next_power_of_two() / 8).max(1))
}

/// Length and offset tables of a batch, padded with empty sequences to `batch` sequences.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Tables {
    /// Queries, then keys of each sequence: [2, batch].
    pub(super) lens: Vec<u32>,
    /// Offset in elements of each sequence in q, in k and in the statistics, and the end: [3, width].
    pub(super) offsets: Vec<i64>,
    /// Row length of `offsets`: batch + 1, padded for alignment.
    pub(super) width: usize,
}

impl Tables {
    pub(super) fn new(seqs: &CuSeqlens, heads: HeadCounts, batch: usize) -> Self {
        let width = batch + Bucket::MIN_BATCH;
        let mut lens = vec![0; 2 * batch];
        for (i, span) in seqs.spans().enumerate().filter(|(_, span)| !span.q.is_empty()) {
            // Keys that no query may attend to are left out.
            (lens[i], lens[batch + i]) = (span.q.len() as u32, span.k.len() as u32);
        }
        let hq = heads.n_kv * heads.group;
        let offsets = |cu: &[usize], width_of_row: usize| -> Vec<i64> {
            (0..width).map(|i| (cu[i.min(seqs.n_seqs())] * width_of_row) as i64).collect()
        };
        let (of_q, of_k) =
            (offsets(seqs.cu_seqlens_q(), hq * heads.dim), offsets(seqs.cu_seqlens_k(), heads.n_kv * heads.dim));
        Self { lens, offsets: [of_q, of_k, offsets(seqs.cu_seqlens_q(), hq)].concat(), width }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(lens: &[usize]) -> CuSeqlens {
        let mut cu = vec![0];
        lens.iter().for_each(|len| cu.push(cu[cu.len() - 1] + len));
        CuSeqlens::packed(cu).expect("sequences")
    }

    #[test]
    fn totals_are_rounded_by_a_quarter_at_most() {
        let rounded: Vec<usize> = [0, 1, 9, 1024, 1025, 1281, 2000, 2048, 2049].into_iter().map(quarter).collect();
        assert_eq!(rounded, [0, 1, 10, 1024, 1280, 1536, 2048, 2048, 2560]);
        for n in 1..5000 {
            assert!(quarter(n) >= n && 4 * quarter(n) <= 5 * n + 4, "{n}: {}", quarter(n));
        }
    }

    #[test]
    fn a_bucket_holds_its_sequences_and_few_buckets_hold_all() {
        let mut buckets = std::collections::HashSet::new();
        for n_seqs in 1..40 {
            for len in [1, 70, 127, 128, 200, 300, 500] {
                let seqs = packed(&vec![len; n_seqs]);
                let bucket = Bucket::of(&seqs);
                assert!(bucket.batch >= n_seqs && bucket.max_q >= len && bucket.max_k >= len);
                assert!(bucket.total_q >= n_seqs * len && bucket.total_q == bucket.total_k);
                buckets.insert((bucket.batch, bucket.max_q));
            }
        }
        assert!(buckets.len() <= 5 * 3, "{}", buckets.len());
    }

    #[test]
    fn batches_of_other_lengths_share_a_bucket() {
        assert_eq!(Bucket::of(&packed(&[700, 900, 448])), Bucket::of(&packed(&[1000, 513, 300, 235])));
        let few = Bucket { batch: 4, max_q: 128, max_k: 128, total_q: 128, total_k: 128 };
        assert_eq!(Bucket::of(&packed(&[1])), few);
        assert_eq!(Bucket::of(&packed(&[])), few);
    }

    #[test]
    fn tables_say_where_sequences_begin_and_fill_up_with_empty_ones() {
        let heads = HeadCounts { n_kv: 2, group: 3, dim: 8 };
        let seqs = CuSeqlens::from_q_and_k(vec![0, 5, 5, 7], vec![0, 5, 9, 12]).expect("sequences");
        let tables = Tables::new(&seqs, heads, 4);
        assert_eq!(tables.lens, [5, 0, 2, 0, 5, 0, 3, 0]);
        assert_eq!(tables.width, 8);
        let (of_q, rest) = tables.offsets.split_at(8);
        let (of_k, of_stats) = rest.split_at(8);
        assert_eq!(of_q, [0, 5, 5, 7, 7, 7, 7, 7].map(|row| row * 48));
        assert_eq!(of_k, [0, 5, 9, 12, 12, 12, 12, 12].map(|row| row * 16));
        assert_eq!(of_stats, [0, 5, 5, 7, 7, 7, 7, 7].map(|row| row * 6));
    }
}
