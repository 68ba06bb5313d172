//! Tensor parallelism as Megatron-LM has it: a rank has some rows of a branch's first matrices and some columns of its last
//! one, so that a branch costs one exchange at either end. (Shoeybi et al., 2019; <https://arxiv.org/abs/1909.08053>. The
//! residual stream in parts: Korthikanti et al., 2022; <https://arxiv.org/abs/2205.05198>.)
//!
//! t tokens, n ranks, d model; with [`SequenceParallel::On`] a rank has t/n tokens outside of branches

use std::sync::Arc;

use candle_core::{Result, Tensor};
use candlewick_comm::{Collective, Reduce};
use candlewick_model::Seams;
use candlewick_ops::{
    self as ops, AttentionSpec, ColumnShard, CuSeqlens, PendingExchange, VocabShard, Weight, record, record_exchange,
};

use crate::placement::SequenceParallel;

/// The ranks that share every matrix.
#[derive(Clone)]
pub struct TensorRanks {
    /// The ranks.
    pub ranks: Arc<dyn Collective>,
    /// What they see outside of branches.
    pub sequence_parallel: SequenceParallel,
}

impl TensorRanks {
    /// How many parts the tokens fall into outside of branches.
    pub(crate) fn token_parts(&self) -> usize {
        match self.sequence_parallel {
            SequenceParallel::Off => 1,
            SequenceParallel::On => self.ranks.size(),
        }
    }

    /// [t/n, d] -> [t, d], or all of them already.
    fn gather(&self, x: &Tensor) -> Result<Tensor> {
        match self.sequence_parallel {
            // An exchange gives a tensor of its own.
            SequenceParallel::Off => x.reshape(x.shape()),
            SequenceParallel::On => Ok(self.ranks.all_gather(x)?),
        }
    }

    /// Begins to sum over the ranks: [t, d] -> [t/n, d], or [t, d] for all.
    fn start_sum(&self, y: &Tensor) -> Result<PendingExchange> {
        let pending = match self.sequence_parallel {
            SequenceParallel::Off => self.ranks.start_all_reduce(y, Reduce::Sum)?,
            SequenceParallel::On => self.ranks.start_reduce_scatter(y)?,
        };
        Ok(Box::new(move || Ok(pending.wait()?)))
    }

    fn enter(&self, x: &Tensor) -> Result<Tensor> {
        let (to, back) = (self.clone(), self.clone());
        record_exchange("tensor_enter", x, move |x| to.gather(x), move |dx| back.start_sum(dx))
    }

    fn leave(&self, y: &Tensor) -> Result<Tensor> {
        let (x, ranks) = (self.start_sum(y)?()?, self.clone());
        Ok(record("tensor_leave", [y.into()], x, move |dx, _| Ok([Some(ranks.gather(dx)?)])))
    }

    /// The first of the tokens, of `n_all`, whose rows this rank has.
    fn first_token(&self, n_all: usize) -> usize {
        self.ranks.rank() * n_all.div_ceil(self.ranks.size())
    }

    /// Calls `f` with the part of a vocabulary of `n_all` tokens that this rank has.
    pub(crate) fn with_vocab<T>(&self, n_all: usize, f: impl FnOnce(&VocabShard<'_>) -> T) -> T {
        let max_shard_rows = n_all.div_ceil(self.ranks.size());
        let gather = |own: &Tensor| Ok(self.ranks.all_gather(own)?);
        f(&VocabShard { first_row: self.first_token(n_all), n_vocab: n_all, max_shard_rows, all_gather: &gather })
    }

    /// Puts the scores of all tokens together: f32 [t, rows here] -> [t, v].
    pub(crate) fn whole_logits(&self, part: &Tensor, n_all: usize) -> Result<Tensor> {
        let max_shard_rows = n_all.div_ceil(self.ranks.size());
        let missing = max_shard_rows - part.dim(1)?;
        let padded = part.pad_with_zeros(1, 0, missing)?.t()?.contiguous()?;
        self.ranks.all_gather(&padded)?.narrow(0, 0, n_all)?.t()?.contiguous()
    }
}

/// The seams of a rank: matrices shared by some ranks, attention answered by another.
pub(crate) struct Shared<'a> {
    pub(crate) tensor: &'a TensorRanks,
    pub(crate) n_vocab: usize,
    pub(crate) attend: &'a dyn Seams,
}

impl Seams for Shared<'_> {
    fn look_up(&self, ids: &Tensor, table: &Weight, padding: Option<u32>) -> Result<Tensor> {
        let first = self.tensor.first_token(self.n_vocab);
        self.leave(&ops::vocab_parallel_embedding(ids, table, first as u32, padding)?)
    }

    fn enter(&self, x: &Tensor) -> Result<Tensor> {
        self.tensor.enter(x)
    }

    fn token_parts(&self) -> usize {
        self.tensor.token_parts()
    }

    fn columns(&self) -> ColumnShard {
        ColumnShard { index: self.tensor.ranks.rank(), n_shards: self.tensor.ranks.size() }
    }

    fn leave(&self, y: &Tensor) -> Result<Tensor> {
        self.tensor.leave(y)
    }

    fn attend(
        &self,
        block_idx: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        seqs: &CuSeqlens,
        spec: &AttentionSpec,
    ) -> Result<Tensor> {
        self.attend.attend(block_idx, q, k, v, seqs, spec)
    }
}
