//! Tensor parallelism as Megatron-LM has it: a rank has some rows of a branch's first matrices and some columns of its last
//! one, so that a branch costs one exchange at either end. (Shoeybi et al., 2019; <https://arxiv.org/abs/1909.08053>. The
//! residual stream in parts: Korthikanti et al., 2022; <https://arxiv.org/abs/2205.05198>.)
//!
//! t tokens, n ranks, d model; with [`SequenceParallel::On`] a rank has t/n tokens outside of branches

use std::sync::Arc;

use candle_core::{Result, Tensor};
use candlewick_comm::{Collective, Reduce};
use candlewick_model::{AttentionCall, ParallelOps};
use candlewick_ops::{self as ops, Columns, PendingExchange, VocabPart, Weight, record, record_exchange};

use crate::placement::SequenceParallel;

/// The ranks that share every matrix.
#[derive(Clone)]
pub struct TensorParallel {
    /// The ranks.
    pub ranks: Arc<dyn Collective>,
    /// What they see outside of branches.
    pub sequence_parallel: SequenceParallel,
}

impl TensorParallel {
    /// How many parts the tokens fall into outside of branches.
    pub(crate) fn sequence_parallel_size(&self) -> usize {
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

    fn copy_to_tp(&self, x: &Tensor) -> Result<Tensor> {
        let (to, back) = (self.clone(), self.clone());
        record_exchange("tensor_enter", x, move |x| to.gather(x), move |dx| back.start_sum(dx))
    }

    fn reduce_from_tp(&self, y: &Tensor) -> Result<Tensor> {
        let (x, ranks) = (self.start_sum(y)?()?, self.clone());
        Ok(record("tensor_leave", [y.into()], x, move |dx, _| Ok([Some(ranks.gather(dx)?)])))
    }

    /// The first of the tokens, of `n_all`, whose rows this rank has.
    fn first_token(&self, n_all: usize) -> usize {
        self.ranks.rank() * n_all.div_ceil(self.ranks.size())
    }

    /// Calls `f` with the part of a vocabulary of `n_all` tokens that this rank has.
    pub(crate) fn with_vocab<T>(&self, n_all: usize, f: impl FnOnce(&VocabPart<'_>) -> T) -> T {
        let n_largest = n_all.div_ceil(self.ranks.size());
        let gather = |own: &Tensor| Ok(self.ranks.all_gather(own)?);
        f(&VocabPart { first: self.first_token(n_all), n_all, n_largest, gather: &gather })
    }

    /// Puts the scores of all tokens together: f32 [t, rows here] -> [t, v].
    pub(crate) fn gather_logits(&self, part: &Tensor, n_all: usize) -> Result<Tensor> {
        let n_largest = n_all.div_ceil(self.ranks.size());
        let missing = n_largest - part.dim(1)?;
        let padded = part.pad_with_zeros(1, 0, missing)?.t()?.contiguous()?;
        self.ranks.all_gather(&padded)?.narrow(0, 0, n_all)?.t()?.contiguous()
    }
}

/// The parallel_ops of a rank: matrices shared by some ranks, attention answered by another.
pub(crate) struct TensorParallelOps<'a> {
    pub(crate) tensor: &'a TensorParallel,
    pub(crate) n_vocab: usize,
    pub(crate) attention: &'a dyn ParallelOps,
}

impl ParallelOps for TensorParallelOps<'_> {
    fn embedding(&self, ids: &Tensor, table: &Weight, padding: Option<u32>) -> Result<Tensor> {
        let first = self.tensor.first_token(self.n_vocab);
        self.reduce_from_tp(&ops::embedding_part(ids, table, first as u32, padding)?)
    }

    fn copy_to_tp(&self, x: &Tensor) -> Result<Tensor> {
        self.tensor.copy_to_tp(x)
    }

    fn sequence_parallel_size(&self) -> usize {
        self.tensor.sequence_parallel_size()
    }

    fn input_shard(&self) -> Columns {
        Columns { part: self.tensor.ranks.rank(), n_parts: self.tensor.ranks.size() }
    }

    fn reduce_from_tp(&self, y: &Tensor) -> Result<Tensor> {
        self.tensor.reduce_from_tp(y)
    }

    fn attention(&self, call: &AttentionCall) -> Result<Tensor> {
        self.attention.attention(call)
    }
}
