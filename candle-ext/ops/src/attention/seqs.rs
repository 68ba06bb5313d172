//! Where packed sequences begin and end.

use std::ops::Range;

use candle_core::{Result, bail};

/// Packed sequences as cumulative lengths of their queries and keys.
///
/// A sequence may have more keys than queries (a KV cache): its queries are then its last
/// positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seqs {
    cu_q: Vec<usize>,
    cu_k: Vec<usize>,
}

/// One sequence: its rows among the queries and among the keys.
#[derive(Clone, Debug)]
pub(crate) struct Span {
    pub(crate) q: Range<usize>,
    pub(crate) k: Range<usize>,
}

impl Seqs {
    /// Sequences with as many keys as queries; `cu` starts at 0, sequence i is cu[i]..cu[i + 1].
    pub fn packed(cu: Vec<usize>) -> Result<Self> {
        Self::with_keys(cu.clone(), cu)
    }

    /// Sequences whose keys may be more than their queries.
    pub fn with_keys(cu_q: Vec<usize>, cu_k: Vec<usize>) -> Result<Self> {
        check_cumulative("queries", &cu_q)?;
        check_cumulative("keys", &cu_k)?;
        if cu_q.len() != cu_k.len() {
            bail!("sequences: {} of queries but {} of keys", cu_q.len() - 1, cu_k.len() - 1)
        }
        let seqs = Self { cu_q, cu_k };
        for (i, span) in seqs.spans().enumerate() {
            if span.k.len() < span.q.len() {
                bail!("sequences: number {i} has {} queries but only {} keys", span.q.len(), span.k.len())
            }
        }
        Ok(seqs)
    }

    /// Cumulative lengths of the queries, starting at 0.
    pub fn cu_q(&self) -> &[usize] {
        &self.cu_q
    }

    /// Cumulative lengths of the keys, starting at 0.
    pub fn cu_k(&self) -> &[usize] {
        &self.cu_k
    }

    /// The number of sequences, empty ones included.
    pub fn n_seqs(&self) -> usize {
        self.cu_q.len() - 1
    }

    /// The number of queries in all sequences.
    pub fn n_tokens(&self) -> usize {
        self.cu_q[self.n_seqs()]
    }

    /// The number of keys in all sequences.
    pub fn n_keys(&self) -> usize {
        self.cu_k[self.n_seqs()]
    }

    pub(crate) fn spans(&self) -> impl Iterator<Item = Span> {
        self.cu_q.windows(2).zip(self.cu_k.windows(2)).map(|(q, k)| Span { q: q[0]..q[1], k: k[0]..k[1] })
    }
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
