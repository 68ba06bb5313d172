//! Sequence parallelism of DeepSpeed-Ulysses: outside of attention a rank has some of the tokens. In attention it has all
//! tokens of some heads. (Jacobs et al., 2023; <https://arxiv.org/abs/2309.14509>.)
//!
//! Dimensions: t tokens of a micro-batch, s ranks, h query heads, g KV heads, k head size. A rank has t/s tokens, h/s
//! query heads and at least one KV head.

use std::sync::Arc;

use candle_core::{Result, Tensor, bail};
use candlewick_comm::Collective;
use candlewick_ops::{heads_by_rank, heads_of_ranks, record};

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
        let h = q.dim(1)?;
        check(h, k.dim(1)?, self.ranks.size())?;
        let [q, k, v] = [self.heads(q)?, self.heads(k)?, self.heads(v)?];
        self.tokens(&inner([&q, &k, &v])?, h)
    }

    /// All-to-all [t/s, h, k] -> [t, h/s, k]. A KV head that several ranks need is replicated; its gradients are
    /// summed.
    fn heads(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.scatter(x)?;
        let (ulysses, h) = (self.clone(), x.dim(1)?);
        Ok(record("ulysses_heads", [x.into()], y, move |dy, _| Ok([Some(ulysses.gather(dy, h)?)])))
    }

    /// All-to-all [t, h/s, k] -> [t/s, h, k], for attention's output.
    fn tokens(&self, y: &Tensor, h: usize) -> Result<Tensor> {
        let x = self.gather(y, h)?;
        let ulysses = self.clone();
        Ok(record("ulysses_tokens", [y.into()], x, move |dx, _| Ok([Some(ulysses.scatter(dx)?)])))
    }

    fn scatter(&self, x: &Tensor) -> Result<Tensor> {
        self.exchange(&heads_by_rank(x, self.ranks.size())?)
    }

    fn gather(&self, y: &Tensor, h: usize) -> Result<Tensor> {
        heads_of_ranks(&self.exchange(&y.contiguous()?)?, h, self.ranks.size())
    }

    /// Runs an all-to-all with equal splits.
    fn exchange(&self, rows: &Tensor) -> Result<Tensor> {
        let counts = vec![rows.dim(0)? / self.ranks.size(); self.ranks.size()];
        Ok(self.ranks.all_to_all(rows, &counts, &counts)?)
    }
}

/// Fails unless `h` query heads and `g` KV heads can be divided among the ranks. With fewer KV heads than ranks, they are
/// replicated.
fn check(h: usize, g: usize, n_ranks: usize) -> Result<()> {
    if !h.is_multiple_of(n_ranks) {
        bail!("{h} attention heads over {n_ranks} ranks: not divisible")
    }
    if !g.is_multiple_of(n_ranks) && !n_ranks.is_multiple_of(g) {
        bail!("{g} KV heads over {n_ranks} ranks: one must be a multiple of the other")
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn a_ranks_queries_find_their_keys() {
        for (h, g, n_ranks) in [(8, 8, 4), (8, 2, 2), (8, 2, 4), (8, 2, 8), (32, 4, 16), (6, 3, 6)] {
            check(h, g, n_ranks).unwrap();
            let numbers = Tensor::from_iter((0..g).map(|head| head as f32), &Device::Cpu).unwrap();
            let by_rank = heads_by_rank(&numbers.reshape((1, g, 1)).unwrap(), n_ranks).unwrap();
            for (rank, own) in by_rank.squeeze(2).unwrap().to_vec2::<f32>().unwrap().iter().enumerate() {
                let queries = rank * (h / n_ranks)..(rank + 1) * (h / n_ranks);
                let wanted: Vec<f32> = queries.map(|query| (query / (h / g)) as f32).collect();
                // Attention reads the key of a query off their partition.
                let group = (h / n_ranks) / own.len();
                let read: Vec<f32> = (0..h / n_ranks).map(|query| own[query / group]).collect();
                assert_eq!(read, wanted, "{h} {g} {n_ranks}, rank {rank}");
            }
        }
        assert!(check(12, 3, 4).is_err());
        assert!(check(6, 6, 4).is_err());
    }
}
