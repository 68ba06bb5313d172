//! Megatron-LM's tensor parallelism: column-parallel input projections and row-parallel output projections.
//!
//! A layer's attention and MLP need one collective at their input and one at their output. See Shoeybi et al., 2019,
//! <https://arxiv.org/abs/1909.08053>; sequence parallelism: Korthikanti et al., 2022,
//! <https://arxiv.org/abs/2205.05198>.
//!
//! Dimensions: t tokens, n ranks, d hidden size; with [`SequenceParallel::On`] a rank has t/n tokens of the residual
//! stream

use std::sync::Arc;

use candle_core::{Result, Tensor};
use candlewick_comm::{Collective, Reduce};
use candlewick_model::TokenParallel;
use candlewick_ops::{self as ops, ColumnShard, PendingExchange, VocabShard, Weight, record, record_exchange};

use crate::placement::SequenceParallel;

/// Tensor parallel group of a rank.
#[derive(Clone)]
pub struct TensorParallel {
    /// Process group of the tensor parallel ranks.
    pub ranks: Arc<dyn Collective>,
    /// Sequence parallelism of the residual stream.
    pub sequence_parallel: SequenceParallel,
}

impl TensorParallel {
    /// Returns the number of ranks that split the residual stream.
    pub(crate) fn sequence_parallel_size(&self) -> usize {
        match self.sequence_parallel {
            SequenceParallel::Off => 1,
            SequenceParallel::On => self.ranks.size(),
        }
    }

    /// Returns true if another rank, the first, has the tokens of this rank's residual stream.
    pub(crate) fn holds_copy(&self) -> bool {
        self.sequence_parallel == SequenceParallel::Off && self.ranks.rank() > 0
    }

    /// Sums vectors over the ranks that split the residual stream.
    pub(crate) fn sum_over_residual_ranks(&self, vectors: &[Tensor]) -> Result<Vec<Tensor>> {
        match self.sequence_parallel {
            SequenceParallel::Off => Ok(vectors.to_vec()),
            SequenceParallel::On => vectors.iter().map(|x| Ok(self.ranks.all_reduce(x, Reduce::Sum)?)).collect(),
        }
    }

    /// Returns the rows of this rank's residual stream, of `n_tokens` tokens.
    pub(crate) fn residual_rows(&self, n_tokens: usize) -> std::ops::Range<usize> {
        match self.sequence_parallel {
            SequenceParallel::Off => 0..n_tokens,
            SequenceParallel::On => {
                let n = n_tokens / self.ranks.size();
                self.ranks.rank() * n..(self.ranks.rank() + 1) * n
            }
        }
    }

    /// All-gathers the tokens: [t/n, d] -> [t, d]. Without sequence parallelism it copies the input.
    fn gather(&self, x: &Tensor) -> Result<Tensor> {
        match self.sequence_parallel {
            // A collective returns a new tensor, and so does this.
            SequenceParallel::Off => x.reshape(x.shape()),
            SequenceParallel::On => Ok(self.ranks.all_gather(x)?),
        }
    }

    /// Starts the reduce-scatter [t, d] -> [t/n, d], or the all-reduce without sequence parallelism.
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

    /// Returns the first vocabulary row of this rank, of `n_all` rows.
    fn first_token(&self, n_all: usize) -> usize {
        self.ranks.rank() * n_all.div_ceil(self.ranks.size())
    }

    /// Calls `f` with this rank's shard of a vocabulary of `n_all` tokens.
    pub(crate) fn with_vocab<T>(&self, n_all: usize, f: impl FnOnce(&VocabShard<'_>) -> T) -> T {
        let max_shard_rows = n_all.div_ceil(self.ranks.size());
        let gather = |own: &Tensor| Ok(self.ranks.all_gather(own)?);
        f(&VocabShard { first_row: self.first_token(n_all), n_vocab: n_all, max_shard_rows, all_gather: &gather })
    }

    /// All-gathers vocabulary-parallel logits: f32 [t, rows of this rank] -> [t, v].
    pub(crate) fn gather_logits(&self, part: &Tensor, n_all: usize) -> Result<Tensor> {
        let max_shard_rows = n_all.div_ceil(self.ranks.size());
        let missing = max_shard_rows - part.dim(1)?;
        let padded = part.pad_with_zeros(1, 0, missing)?.t()?.contiguous()?;
        self.ranks.all_gather(&padded)?.narrow(0, 0, n_all)?.t()?.contiguous()
    }
}

/// Operations of a tensor parallel rank.
pub(crate) struct TensorParallelOps<'a> {
    pub(crate) tensor: &'a TensorParallel,
    pub(crate) n_vocab: usize,
}

impl TokenParallel for TensorParallelOps<'_> {
    fn embedding(&self, ids: &Tensor, table: &Weight, padding: Option<u32>) -> Result<Tensor> {
        let first = self.tensor.first_token(self.n_vocab);
        self.reduce_from_tp(&ops::vocab_parallel_embedding(ids, table, first as u32, padding)?)
    }

    fn copy_to_tp(&self, x: &Tensor) -> Result<Tensor> {
        self.tensor.copy_to_tp(x)
    }

    fn exchanges_inputs(&self) -> bool {
        true
    }

    fn sequence_parallel_size(&self) -> usize {
        self.tensor.sequence_parallel_size()
    }

    fn sequence_parallel_rank(&self) -> usize {
        match self.tensor.sequence_parallel {
            SequenceParallel::Off => 0,
            SequenceParallel::On => self.tensor.ranks.rank(),
        }
    }

    fn input_shard(&self) -> ColumnShard {
        ColumnShard { index: self.tensor.ranks.rank(), n_shards: self.tensor.ranks.size() }
    }

    fn reduce_from_tp(&self, y: &Tensor) -> Result<Tensor> {
        self.tensor.reduce_from_tp(y)
    }
}
