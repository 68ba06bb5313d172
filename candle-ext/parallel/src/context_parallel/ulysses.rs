//! Sequence parallelism of DeepSpeed-Ulysses: outside of attention a rank has some of the tokens. In attention it has all
//! tokens of some heads. (Jacobs et al., 2023; <https://arxiv.org/abs/2309.14509>.)
//!
//! Dimensions: t tokens of a micro-batch, s ranks, h query heads, g KV heads, k head size. A rank has t/s tokens, h/s
//! query heads and at least one KV head.

use std::sync::Arc;

use candle_core::{Result, Tensor, bail};
use candlewick_comm::Collective;
use candlewick_ops::record;

/// Ulysses ranks, which exchange tokens for heads.
#[derive(Clone)]
pub(super) struct Ulysses {
    ranks: Arc<dyn Collective>,
}

impl Ulysses {
    /// Creates the Ulysses group of `ranks`.
    pub(super) fn new(ranks: Arc<dyn Collective>) -> Self {
        Self { ranks }
    }

    /// Computes attention by `inner` over all tokens: q [t/s, h, k], k and v [t/s, g, k] -> [t/s, h, k].
    pub(super) fn attend(
        &self,
        [q, k, v]: [&Tensor; 3],
        inner: impl FnOnce([&Tensor; 3]) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let (h, g) = (q.dim(1)?, k.dim(1)?);
        let (of_queries, of_keys) =
            (Heads::of_queries(h, self.ranks.size())?, Heads::of_keys(h, g, self.ranks.size())?);
        let q = self.heads(q, &of_queries)?;
        let (k, v) = (self.heads(k, &of_keys)?, self.heads(v, &of_keys)?);
        self.tokens(&inner([&q, &k, &v])?, &of_queries)
    }

    /// All-to-all [t/s, h, k] -> [t, h/s, k]. A KV head that several ranks need is replicated; its gradients are
    /// summed.
    fn heads(&self, x: &Tensor, heads: &Heads) -> Result<Tensor> {
        let y = self.scatter(x, heads)?;
        let (ulysses, heads) = (self.clone(), heads.clone());
        Ok(record("ulysses_heads", [x.into()], y, move |dy, _| Ok([Some(ulysses.gather(dy, &heads)?)])))
    }

    /// All-to-all [t, h/s, k] -> [t/s, h, k], for attention's output.
    fn tokens(&self, y: &Tensor, heads: &Heads) -> Result<Tensor> {
        let x = self.gather(y, heads)?;
        let (ulysses, heads) = (self.clone(), heads.clone());
        Ok(record("ulysses_tokens", [y.into()], x, move |dx, _| Ok([Some(ulysses.scatter(dx, &heads)?)])))
    }

    fn scatter(&self, x: &Tensor, heads: &Heads) -> Result<Tensor> {
        let (n_tokens, _, k) = x.dims3()?;
        let (n_ranks, n) = (self.ranks.size(), heads.of_each);
        let chosen = match &heads.indices {
            Some(indices) => x.index_select(&Tensor::new(indices.as_slice(), x.device())?, 1)?,
            None => x.clone(),
        };
        let by_rank = chosen.reshape((n_tokens, n_ranks, n, k))?.transpose(0, 1)?.contiguous()?;
        self.exchange(&by_rank.reshape((n_ranks * n_tokens, n, k))?)
    }

    fn gather(&self, y: &Tensor, heads: &Heads) -> Result<Tensor> {
        let n_ranks = self.ranks.size();
        let by_rank = self.exchange(&y.contiguous()?)?;
        let (n_all, n, k) = by_rank.dims3()?;
        let n_tokens = n_all / n_ranks;
        let chosen = by_rank.reshape((n_ranks, n_tokens, n, k))?.transpose(0, 1)?.contiguous()?;
        let chosen = chosen.reshape((n_tokens, n_ranks * n, k))?;
        match &heads.indices {
            None => Ok(chosen),
            Some(indices) => {
                let indices = Tensor::new(indices.as_slice(), y.device())?;
                Tensor::zeros((n_tokens, heads.n_all, k), y.dtype(), y.device())?.index_add(&indices, &chosen, 1)
            }
        }
    }

    /// Runs an all-to-all with equal splits.
    fn exchange(&self, rows: &Tensor) -> Result<Tensor> {
        let counts = vec![rows.dim(0)? / self.ranks.size(); self.ranks.size()];
        Ok(self.ranks.all_to_all(rows, &counts, &counts)?)
    }
}

/// Heads of each rank in attention.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Heads {
    n_all: usize,
    of_each: usize,
    /// Head indices, rank after rank; `None` if they are all heads in order.
    indices: Option<Vec<u32>>,
}

impl Heads {
    fn of_queries(h: usize, n_ranks: usize) -> Result<Self> {
        if !h.is_multiple_of(n_ranks) {
            bail!("{h} attention heads over {n_ranks} ranks: not divisible")
        }
        Ok(Self { n_all: h, of_each: h / n_ranks, indices: None })
    }

    /// Returns the KV heads that each rank's queries use. With fewer KV heads than ranks, they are replicated.
    fn of_keys(h: usize, g: usize, n_ranks: usize) -> Result<Self> {
        if g.is_multiple_of(n_ranks) {
            return Self::of_queries(g, n_ranks);
        }
        if !n_ranks.is_multiple_of(g) || !h.is_multiple_of(n_ranks) {
            bail!("{g} KV heads over {n_ranks} ranks: one must be a multiple of the other")
        }
        let indices = (0..n_ranks).map(|rank| (rank * g / n_ranks) as u32).collect();
        Ok(Self { n_all: g, of_each: 1, indices: Some(indices) })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_ranks_queries_find_their_keys() {
        for (h, g, n_ranks) in [(8, 8, 4), (8, 2, 2), (8, 2, 4), (8, 2, 8), (32, 4, 16), (6, 3, 6)] {
            let keys = Heads::of_keys(h, g, n_ranks).unwrap();
            let indices = keys.indices.clone().unwrap_or_else(|| (0..g as u32).collect());
            for rank in 0..n_ranks {
                let queries = rank * (h / n_ranks)..(rank + 1) * (h / n_ranks);
                let own = &indices[rank * keys.of_each..][..keys.of_each];
                let wanted: Vec<u32> = queries.map(|query| (query / (h / g)) as u32).collect();
                // Attention reads the key of a query off their partition.
                let group = (h / n_ranks) / keys.of_each;
                let read: Vec<u32> = (0..h / n_ranks).map(|query| own[query / group]).collect();
                assert_eq!(read, wanted, "{h} {g} {n_ranks}, rank {rank}");
            }
        }
        assert!(Heads::of_keys(12, 3, 4).is_err());
        assert!(Heads::of_queries(6, 4).is_err());
    }
}
