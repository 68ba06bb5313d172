//! Context parallelism: tokens of a micro-batch split over ranks, and attention over all of them.
//!
//! [`ulysses`] exchanges tokens for heads. [`ring`] passes keys and values around. They combine: Ulysses within a ring
//! rank.

mod partition;
mod ring;
mod ulysses;

use std::borrow::Cow;
use std::sync::Arc;

use candle_core::{Result, Tensor, bail};
use candlewick_comm::Collective;
use candlewick_model::{AttentionCall, SequenceMixing};
use candlewick_ops::RowRanges;

use crate::batch::Micro;
use partition::TokenPartition;
use ring::Ring;
use ulysses::Ulysses;

pub use ring::ring_exchange;

/// Context parallel groups of a rank, and their attention.
#[derive(Clone)]
pub struct ContextParallel {
    context: Arc<dyn Collective>,
    heads: Arc<dyn Collective>,
}

/// This rank's share of a micro-batch: some of the tokens, with all sequence boundaries.
pub(crate) struct TokenShard<'m> {
    pub(crate) micro: Cow<'m, Micro>,
    /// Rows of the tokens in the whole micro-batch.
    pub(crate) rows: RowRanges,
}

impl ContextParallel {
    /// Creates the context parallel groups: ring attention over `context`, Ulysses over `heads`. Either may be a group
    /// of one.
    pub fn new(context: Arc<dyn Collective>, heads: Arc<dyn Collective>) -> Self {
        Self { context, heads }
    }

    /// Returns the number of ranks that split the tokens.
    pub(crate) fn n_parts(&self) -> usize {
        self.context.size() * self.heads.size()
    }

    /// Returns this rank's share of a micro-batch, whose length must be divisible by the ranks.
    pub(crate) fn part<'m>(&self, micro: &Micro) -> Result<TokenShard<'m>> {
        let n_tokens = micro.seqs.n_tokens();
        if !n_tokens.is_multiple_of(self.n_parts()) {
            bail!("{n_tokens} tokens over {} ranks: not divisible", self.n_parts())
        }
        let rows = RowRanges::new(self.partition(n_tokens).rows(self.context.rank(), self.heads.rank()));
        let part = Micro {
            ids: select(&micro.ids, rows.ranges())?,
            targets: select(&micro.targets, rows.ranges())?,
            positions: rows.ranges().iter().flat_map(|range| &micro.positions[range.clone()]).copied().collect(),
            seqs: micro.seqs.clone(),
            padding: micro.padding.clone(),
            columns: micro.columns.of_tokens(|values| select(values, rows.ranges()))?,
        };
        Ok(TokenShard { micro: Cow::Owned(part), rows })
    }

    /// All-gathers a value per token from this rank's `[tokens of a rank]` to `[n_tokens]`. Collective.
    pub(crate) fn join(&self, values: &Tensor, n_tokens: usize) -> Result<Tensor> {
        let all = self.context.all_gather(&self.heads.all_gather(values)?)?;
        select(&all, &self.partition(n_tokens).in_order())?.narrow(0, 0, n_tokens)
    }

    /// Selects this rank's tokens of a value per token, `[n_tokens]`.
    pub(crate) fn own(&self, values: &Tensor, n_tokens: usize) -> Result<Tensor> {
        select(values, &self.partition(n_tokens).rows(self.context.rank(), self.heads.rank()))
    }

    /// Returns true on one rank of those that split the tokens.
    pub(crate) fn is_first(&self) -> bool {
        self.context.rank() == 0 && self.heads.rank() == 0
    }

    fn partition(&self, n_tokens: usize) -> TokenPartition {
        TokenPartition::new(n_tokens, self.context.size(), self.heads.size())
    }
}

impl SequenceMixing for ContextParallel {
    fn attention(&self, call: &AttentionCall) -> Result<Tensor> {
        let AttentionCall { q, k, v, seqs, spec, .. } = *call;
        let ring = Ring::new(Arc::clone(&self.context));
        Ulysses::new(Arc::clone(&self.heads)).attend([q, k, v], |[q, k, v]| ring.attend([q, k, v], seqs, spec))
    }
}

/// Selects rows of x by ranges, in the order of the ranges.
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
