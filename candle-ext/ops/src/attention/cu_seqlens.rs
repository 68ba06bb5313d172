//! Cumulative sequence lengths of packed batches.

use std::ops::Range;

use candle_core::{Result, bail};

/// Cumulative lengths of packed sequences, for queries and keys: FlashAttention's `cu_seqlens`.
///
/// With a KV cache a sequence has more keys than queries; its queries are then the last positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CuSeqlens {
    cu_q: Vec<usize>,
    cu_k: Vec<usize>,
    /// Position of each sequence's first query among its keys. In an [`AttentionChunk`] it may be outside of their range.
    firsts: Vec<isize>,
}

/// A range of the queries and a range of the keys of packed sequences, made by [`CuSeqlens::chunk`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttentionChunk(pub(super) CuSeqlens);

/// Ranges of one sequence in the packed queries and keys.
#[derive(Clone, Debug)]
pub(crate) struct SequenceRange {
    pub(crate) q: Range<usize>,
    pub(crate) k: Range<usize>,
    /// Position of the first query among the keys.
    pub(crate) first: isize,
}

impl CuSeqlens {
    /// Creates sequences with as many keys as queries. `cu` starts at 0; sequence i is cu[i]..cu[i + 1].
    pub fn packed(cu: Vec<usize>) -> Result<Self> {
        Self::from_q_and_k(cu.clone(), cu)
    }

    /// Creates sequences that may have more keys than queries, as with a KV cache.
    pub fn from_q_and_k(cu_q: Vec<usize>, cu_k: Vec<usize>) -> Result<Self> {
        check_cumulative("queries", &cu_q)?;
        check_cumulative("keys", &cu_k)?;
        if cu_q.len() != cu_k.len() {
            bail!("sequences: {} of queries but {} of keys", cu_q.len() - 1, cu_k.len() - 1)
        }
        let lens = cu_q.windows(2).zip(cu_k.windows(2)).map(|(q, k)| (q[1] - q[0], k[1] - k[0]));
        let mut firsts = Vec::with_capacity(cu_q.len());
        for (i, (n_queries, n_keys)) in lens.enumerate() {
            if n_keys < n_queries {
                bail!("sequences: number {i} has {n_queries} queries but only {n_keys} keys")
            }
            firsts.push((n_keys - n_queries) as isize);
        }
        Ok(Self { cu_q, cu_k, firsts })
    }

    /// Returns the cumulative lengths of the queries, starting at 0.
    pub fn cu_seqlens_q(&self) -> &[usize] {
        &self.cu_q
    }

    /// Returns the cumulative lengths of the keys, starting at 0.
    pub fn cu_seqlens_k(&self) -> &[usize] {
        &self.cu_k
    }

    /// Returns the number of sequences, empty ones included.
    pub fn n_seqs(&self) -> usize {
        self.cu_q.len() - 1
    }

    /// Returns the number of queries in all sequences.
    pub fn n_tokens(&self) -> usize {
        self.cu_q[self.cu_q.len() - 1]
    }

    /// Returns the number of keys in all sequences.
    pub fn n_keys(&self) -> usize {
        self.cu_k[self.cu_k.len() - 1]
    }

    /// Selects a range of the queries and a range of the keys, both indices into the packed tensors.
    ///
    /// The mask stays that of the whole sequences.
    pub fn chunk(&self, queries: Range<usize>, keys: Range<usize>) -> Result<AttentionChunk> {
        for (what, range, n) in [("queries", &queries, self.n_tokens()), ("keys", &keys, self.n_keys())] {
            if range.start > range.end || range.end > n {
                bail!("sequences: a chunk of the {what} {range:?}, but there are {n}")
            }
        }
        let mut piece = Self { cu_q: vec![0], cu_k: vec![0], firsts: Vec::new() };
        for whole in self.spans() {
            let (q, k) = (common(&whole.q, &queries), common(&whole.k, &keys));
            if q.is_empty() && k.is_empty() {
                continue;
            }
            let first = whole.first + (q.start - whole.q.start) as isize - (k.start - whole.k.start) as isize;
            piece.cu_q.push(piece.n_tokens() + q.len());
            piece.cu_k.push(piece.n_keys() + k.len());
            piece.firsts.push(first);
        }
        Ok(AttentionChunk(piece))
    }

    pub(crate) fn spans(&self) -> impl Iterator<Item = SequenceRange> {
        let ranges = self.cu_q.windows(2).zip(self.cu_k.windows(2));
        ranges.zip(&self.firsts).map(|((q, k), first)| SequenceRange { q: q[0]..q[1], k: k[0]..k[1], first: *first })
    }
}

/// Returns the intersection of both ranges; an empty range within `all` if they are disjoint.
fn common(all: &Range<usize>, wanted: &Range<usize>) -> Range<usize> {
    wanted.start.clamp(all.start, all.end)..wanted.end.clamp(all.start, all.end)
}

fn check_cumulative(what: &str, cu: &[usize]) -> Result<()> {
    if cu.first() != Some(&0) {
        bail!("sequences: cumulative lengths of {what} must start with 0, got {:?}", cu.first())
    }
    match cu.windows(2).position(|pair| pair[0] > pair[1]) {
        Some(i) => bail!("sequences: {what} of number {i} end at {} but start at {}", cu[i + 1], cu[i]),
        None => Ok(()),
    }
}
