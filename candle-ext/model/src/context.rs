//! Inputs of a forward pass that all layers share, and the parallel operations that layers call.
//!
//! Dimensions: t tokens (packed), d hidden size, h query heads, g KV heads, k head size

use std::sync::LazyLock;

use candle_core::{Result, Tensor};
use candlewick_ops::{
    self as ops, AttentionChoice, AttentionSpec, ColumnShard, CuSeqlens, GroupedGemmImpl, RowRanges, Weight,
};

use crate::{ExpertCall, RouterContext, TiledMlp, dropout::DropoutScope};

/// Arguments of one layer's attention: t tokens, h query heads, g KV heads, k head size.
#[derive(Clone, Copy)]
pub struct AttentionCall<'a> {
    /// Index of the layer.
    pub layer_idx: usize,
    /// Queries [t, h, k].
    pub q: &'a Tensor,
    /// Keys [t, g, k].
    pub k: &'a Tensor,
    /// Values [t, g, k].
    pub v: &'a Tensor,
    /// Sequence boundaries.
    pub seqs: &'a CuSeqlens,
    /// Scale, mask and kernel.
    pub spec: &'a AttentionSpec,
}

/// Exchange of tokens between the ranks of the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenExchange {
    /// Tokens travel to the ranks of their experts.
    Dispatch,
    /// Outputs of experts travel back.
    Combine,
}

/// Operations of a layer that act on each token: the collectives of tensor, sequence and expert parallelism. The default
/// methods are those of one device.
pub trait TokenParallel {
    /// Looks up embeddings: u32 token ids [t] -> [t, d]. The row of token `padding` gets no gradient.
    fn embedding(&self, ids: &Tensor, table: &Weight, padding: Option<u32>) -> Result<Tensor> {
        ops::embedding(ids, table, padding)
    }

    /// Prepares the input of attention or of the MLP: [t, d] -> [t, d]. Under sequence parallelism it all-gathers the
    /// tokens.
    fn copy_to_tp(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.clone())
    }

    /// Returns true if [`copy_to_tp`](Self::copy_to_tp) is an exchange, so that layers do not read the norm itself.
    fn exchanges_inputs(&self) -> bool {
        false
    }

    /// Returns the number of ranks that split the residual stream along the sequence; 1 without sequence parallelism.
    fn sequence_parallel_size(&self) -> usize {
        1
    }

    /// Returns the index of this rank among those that split the residual stream; 0 without sequence parallelism.
    fn sequence_parallel_rank(&self) -> usize {
        0
    }

    /// Returns the input columns of the row-parallel output projection that this rank holds.
    fn input_shard(&self) -> ColumnShard {
        ColumnShard::ALL
    }

    /// Reduces the output of attention or of the MLP over the tensor parallel ranks: [t, d] -> [t, d].
    fn reduce_from_tp(&self, y: &Tensor) -> Result<Tensor> {
        Ok(y.clone())
    }

    /// Computes the routed experts of an MoE layer: [t, d] -> [t, d]. Calls `meanwhile` once for each exchange, in their
    /// order: if tokens travel between ranks, while they do.
    fn experts(&self, call: &ExpertCall, meanwhile: &mut dyn FnMut(TokenExchange) -> Result<()>) -> Result<Tensor> {
        let y = call.compute()?;
        meanwhile(TokenExchange::Dispatch)?;
        meanwhile(TokenExchange::Combine)?;
        Ok(y)
    }

    /// Sums a tensor without gradient over the ranks that split a micro-batch's tokens.
    fn sum_over_micro_batch(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.clone())
    }

    /// Sums a tensor without gradient over the ranks that split the tokens of a step: those that split a micro-batch, and
    /// the data parallel ranks.
    fn sum_over_data_parallel(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.clone())
    }
}

/// Operations of a layer that mix the tokens of a sequence, whose tokens may be on several ranks or in a cache. The default
/// methods are those of one device without a cache.
pub trait SequenceMixing {
    /// Computes attention: q [t, h, k], k and v [t, g, k] -> [t, h, k].
    fn attention(&self, call: &AttentionCall) -> Result<Tensor> {
        let AttentionCall { q, k, v, seqs, spec, .. } = *call;
        ops::attention(q, k, v, seqs, spec)
    }
}

/// Operations that a layer calls under parallelism.
#[derive(Clone, Copy)]
pub struct ParallelOps<'a> {
    /// Operations that act on each token.
    pub tokens: &'a dyn TokenParallel,
    /// Operations that mix the tokens of a sequence.
    pub sequence: &'a dyn SequenceMixing,
}

/// The operations of an unsharded model on one device, without a KV cache.
#[derive(Clone, Copy, Debug, Default)]
pub struct SingleDevice;

impl TokenParallel for SingleDevice {}

impl SequenceMixing for SingleDevice {}

impl ParallelOps<'_> {
    /// The operations of one device.
    pub const SINGLE_DEVICE: ParallelOps<'static> = ParallelOps { tokens: &SingleDevice, sequence: &SingleDevice };
}

/// Inputs of a forward pass that all layers share.
#[derive(Clone, Copy)]
pub struct ForwardContext<'a> {
    /// Cosines of the rotary angles, f32 [t, r/2] for r rotated elements of a head.
    pub cos: &'a Tensor,
    /// Sines of the rotary angles, f32 [t, r/2].
    pub sin: &'a Tensor,
    /// Boundaries of the packed sequences.
    pub seqs: &'a CuSeqlens,
    /// Seed of dropout masks; `None` disables dropout.
    pub dropout_key: Option<u64>,
    /// Rows of the micro-batch that this rank computes.
    pub rows: &'a RowRanges,
    /// Attention implementation.
    pub attention: AttentionChoice,
    /// Implementation of the experts' matmuls on a GPU.
    pub experts_implementation: GroupedGemmImpl,
    /// Tiling of the MLP over the tokens.
    pub tiled_mlp: TiledMlp,
    /// Inputs of all routers.
    pub router: RouterContext<'a>,
    /// Operations of this rank.
    pub parallel_ops: ParallelOps<'a>,
}

/// All rows of a micro-batch.
static ALL_ROWS: LazyLock<RowRanges> = LazyLock::new(RowRanges::all);

impl<'a> ForwardContext<'a> {
    /// Creates the context of a forward on one device, with default settings and without dropout.
    pub fn on_single_device([cos, sin]: [&'a Tensor; 2], seqs: &'a CuSeqlens) -> Self {
        Self {
            cos,
            sin,
            seqs,
            dropout_key: None,
            rows: &ALL_ROWS,
            attention: AttentionChoice::default(),
            experts_implementation: GroupedGemmImpl::default(),
            tiled_mlp: TiledMlp::Off,
            router: RouterContext::default(),
            parallel_ops: ParallelOps::SINGLE_DEVICE,
        }
    }

    /// Returns the scope of dropout masks; `None` without dropout.
    pub fn dropout(&self) -> Option<DropoutScope> {
        self.dropout_key.map(|key| DropoutScope::new(key, self.rows))
    }

    /// Returns the scope of the residual stream, of which this rank has `n_rows` rows.
    pub fn residual_dropout(&self, n_rows: usize) -> Option<DropoutScope> {
        self.dropout().map(|dropout| dropout.at_row(self.parallel_ops.tokens.sequence_parallel_rank() * n_rows))
    }
}
