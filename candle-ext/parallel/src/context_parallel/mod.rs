//! The tokens of a micro-batch shared among ranks: which of them a rank has, and attention over all of them.
//!
//! In attention the ranks of one context rank exchange tokens for heads ([`ulysses`]), and with all tokens of the context rank
//! for their heads they attend to the keys and values that come from the other context ranks ([`ring`]).

mod partition;
mod ring;
mod ulysses;

use std::borrow::Cow;
use std::sync::Arc;

use candle_core::{Result, Tensor, bail};
use candlewick_comm::Collective;
use candlewick_model::{AttentionCall, ParallelOps};
use candlewick_ops::Rows;

use crate::engine::Micro;
use partition::TokenPartition;
use ring::Ring;
use ulysses::Ulysses;

pub use ring::ring_exchange;

/// The ranks that share the tokens of each micro-batch, as the `attend` seam of all blocks.
#[derive(Clone)]
pub struct ContextParallel {
    context: Arc<dyn Collective>,
    heads: Arc<dyn Collective>,
}

/// What a rank computes of a micro-batch: some of its tokens, and all of its sequences.
pub(crate) struct TokenShard<'m> {
    pub(crate) micro: Cow<'m, Micro>,
    /// Which tokens these are.
    pub(crate) rows: Rows,
}

impl ContextParallel {
    /// Shares tokens among `context` x `heads`: keys and values go around among the ranks of `context`, tokens are
    /// exchanged for heads among those of `heads`. Either may be a group of one.
    pub fn new(context: Arc<dyn Collective>, heads: Arc<dyn Collective>) -> Self {
        Self { context, heads }
    }

    /// Returns the number of parts that the tokens fall into.
    pub(crate) fn n_parts(&self) -> usize {
        self.context.size() * self.heads.size()
    }

    /// This rank's part of a micro-batch, whose sequences stay known in full. Its tokens must fall into even parts.
    pub(crate) fn part<'m>(&self, micro: &Micro) -> Result<TokenShard<'m>> {
        let n_tokens = micro.seqs.n_tokens();
        if !n_tokens.is_multiple_of(self.n_parts()) {
            bail!("{n_tokens} tokens over {} ranks: not divisible", self.n_parts())
        }
        let rows = Rows::new(self.partition(n_tokens).rows(self.context.rank(), self.heads.rank()));
        let part = Micro {
            ids: select(&micro.ids, rows.ranges())?,
            targets: select(&micro.targets, rows.ranges())?,
            positions: rows.ranges().iter().flat_map(|range| &micro.positions[range.clone()]).copied().collect(),
            seqs: micro.seqs.clone(),
        };
        Ok(TokenShard { micro: Cow::Owned(part), rows })
    }

    /// Puts what each rank has of its tokens, `[tokens of a rank]`, together for all tokens of a micro-batch. All ranks call it.
    pub(crate) fn join(&self, values: &Tensor, n_tokens: usize) -> Result<Tensor> {
        let all = self.context.all_gather(&self.heads.all_gather(values)?)?;
        select(&all, &self.partition(n_tokens).in_order())?.narrow(0, 0, n_tokens)
    }

    /// Selects this rank's tokens of values of all tokens of a micro-batch, `[n_tokens]`.
    pub(crate) fn own(&self, values: &Tensor, n_tokens: usize) -> Result<Tensor> {
        select(values, &self.partition(n_tokens).rows(self.context.rank(), self.heads.rank()))
    }

    /// Returns true on one of the ranks that share the tokens.
    pub(crate) fn is_first(&self) -> bool {
        self.context.rank() == 0 && self.heads.rank() == 0
    }

    fn partition(&self, n_tokens: usize) -> TokenPartition {
        TokenPartition::new(n_tokens, self.context.size(), self.heads.size())
    }
}

impl ParallelOps for ContextParallel {
    fn attention(&self, call: &AttentionCall) -> Result<Tensor> {
        let AttentionCall { q, k, v, seqs, spec, .. } = *call;
        let ring = Ring::new(Arc::clone(&self.context));
        Ulysses::new(Arc::clone(&self.heads)).attend([q, k, v], |[q, k, v]| ring.attend([q, k, v], seqs, spec))
    }
}

/// The rows of x in these ranges, one range after another.
fn select(x: &Tensor, ranges: &[std::ops::Range<usize>]) -> Result<Tensor> {
    let parts = ranges.iter().map(|range| x.narrow(0, range.start, range.len())).collect::<Result<Vec<_>>>()?;
    match parts.as_slice() {
        [] => x.narrow(0, 0, 0),
        [part] => Ok(part.clone()),
        parts => Tensor::cat(parts, 0),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
