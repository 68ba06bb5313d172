//! Expert parallelism: each rank holds some experts of a layer, and tokens travel to the ranks of their experts.
//!
//! With expert tensor parallelism, neighbouring ranks hold the shards of the same experts: rows of gate and up, and columns
//! of down. Each computes a part of the sum over an expert's intermediate size.

mod all_gather;
mod all_to_all;
mod row_counts;

use std::sync::Arc;

use candle_core::{Result, Tensor};
use candlewick_comm::{Collective, Reduce};
use candlewick_model::{ExpertCall, ExpertDropout, TokenExchange, TokenParallel};
use candlewick_ops::{ColumnShard, Weight};

/// Exchange of tokens between expert parallel ranks, with Megatron-LM's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TokenDispatcher {
    /// Each row travels to the ranks of its expert: an all-to-all.
    #[default]
    AllToAll,
    /// Every rank gets all tokens: all-gathers and a reduce-scatter. It sends less if a token selects more experts than
    /// there are expert parallel ranks.
    AllGather,
}

/// Computation during an exchange that needs no tokens of other ranks, such as that of a shared expert.
type Meanwhile<'m> = &'m mut dyn FnMut(TokenExchange) -> Result<()>;

/// Expert parallel groups of a rank.
#[derive(Clone)]
pub struct ExpertParallel {
    /// Expert parallel ranks, each of which holds some experts of every layer, or shards of them.
    pub(crate) ep: Arc<dyn Collective>,
    /// Neighbouring ranks that hold the shards of the same experts.
    pub(crate) n_shards: usize,
    /// Ranks that split the tokens of a micro-batch.
    pub(crate) micro_batch: Arc<dyn Collective>,
    /// Ranks that split the tokens of a step.
    pub(crate) step: Arc<dyn Collective>,
    /// Exchange of tokens.
    pub(crate) dispatcher: TokenDispatcher,
}

impl ExpertParallel {
    /// Sets the exchange of tokens.
    pub fn with_dispatcher(self, dispatcher: TokenDispatcher) -> Self {
        Self { dispatcher, ..self }
    }

    /// Returns true if ranks exchange tokens. Without an exchange, rows are permuted once, the host does not wait for their
    /// counts, and a single token has a faster kernel.
    pub(crate) fn exchanges_tokens(&self) -> bool {
        self.ep.size() > 1
    }

    /// Computes the routed experts of a layer: [t, d] -> [t, d]. `meanwhile` runs during both exchanges. Collective.
    fn compute(&self, call: &ExpertCall, meanwhile: Meanwhile) -> Result<Tensor> {
        match self.dispatcher {
            TokenDispatcher::AllToAll => self.compute_by_all_to_all(call, meanwhile),
            TokenDispatcher::AllGather => self.compute_by_all_gather(call, meanwhile),
        }
    }

    /// Returns the dropout masks of this rank's experts from the keys of slots.
    fn dropout<'a>(&self, keys: Option<&'a Tensor>) -> Option<ExpertDropout<'a>> {
        let columns = ColumnShard { index: self.ep.rank() % self.n_shards, n_shards: self.n_shards };
        keys.map(|keys| ExpertDropout { keys, columns })
    }

    /// Returns the number of experts that this rank holds, or holds shards of.
    fn n_local_experts(&self, call: &ExpertCall) -> usize {
        call.routing.assignment.n_experts() * self.n_shards / self.ep.size()
    }
}

/// Operations of an expert parallel rank. All but the experts are delegated to `inner`.
pub(crate) struct ExpertParallelOps<'a> {
    pub(crate) experts: &'a ExpertParallel,
    pub(crate) inner: &'a dyn TokenParallel,
}

impl TokenParallel for ExpertParallelOps<'_> {
    fn embedding(&self, ids: &Tensor, table: &Weight, padding: Option<u32>) -> Result<Tensor> {
        self.inner.embedding(ids, table, padding)
    }

    fn copy_to_tp(&self, x: &Tensor) -> Result<Tensor> {
        self.inner.copy_to_tp(x)
    }

    fn exchanges_inputs(&self) -> bool {
        self.inner.exchanges_inputs()
    }

    fn sequence_parallel_size(&self) -> usize {
        self.inner.sequence_parallel_size()
    }

    fn sequence_parallel_rank(&self) -> usize {
        self.inner.sequence_parallel_rank()
    }

    fn input_shard(&self) -> ColumnShard {
        self.inner.input_shard()
    }

    fn reduce_from_tp(&self, y: &Tensor) -> Result<Tensor> {
        self.inner.reduce_from_tp(y)
    }

    fn experts(&self, call: &ExpertCall, meanwhile: Meanwhile) -> Result<Tensor> {
        match self.experts.exchanges_tokens() {
            true => self.experts.compute(call, meanwhile),
            false => self.inner.experts(call, meanwhile),
        }
    }

    fn sum_over_micro_batch(&self, x: &Tensor) -> Result<Tensor> {
        Ok(self.experts.micro_batch.all_reduce(x, Reduce::Sum)?)
    }

    fn sum_over_data_parallel(&self, x: &Tensor) -> Result<Tensor> {
        Ok(self.experts.step.all_reduce(x, Reduce::Sum)?)
    }
}

#[cfg(test)]
mod tests;
