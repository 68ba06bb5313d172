//! The block engine: forward through the blocks, loss, and backward block by block, last first. What a rank does not have,
//! other tokens, other heads, other blocks, it asks the ranks that have it.
//!
//! t tokens (packed), d model, v vocabulary

mod inference;
mod loss;
mod memory;
mod micro;
mod train;
mod train_step;

use std::borrow::Cow;
use std::sync::Arc;

use candle_core::{Device, Result, Tensor};
use candlewick_comm::Collective;
use candlewick_model::{ForwardContext, Model, ParallelOps, SingleDevice, TiledMlp, UnitWeights};
use candlewick_ops::{
    AttentionChoice, CrossEntropy, LossAndGrad, Reduction, Rows, Seqs, Upstream, Weight, linear_cross_entropy,
    linear_cross_entropy_part, logits_bytes, rows_of_logits,
};

use crate::context_parallel::{ContextParallel, TokenShard};
use crate::offload::OffloadTarget;
use crate::params::ParamStore;
use crate::pipeline::{HiddenStates, Pipeline};
use crate::tensor_parallel::{TensorParallel, TensorParallelOps};

pub use inference::{PackedTokens, ScoreQuery};
pub use loss::{LossScale, StepLoss, StepLosses};
pub use memory::{HeadCost, StepBytes, StepCost};
pub use micro::Micro;
pub use train_step::{InFlightStep, OptimizerStep, StepResult, TrainBatch};

/// Activations of a block that are saved between its forward and its backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationCheckpointing {
    /// The whole tape: fastest, most memory.
    None,
    /// The input; the forward runs again in backward.
    Full,
    /// The input and attention's output; the rest of the forward runs again in backward.
    Selective,
    /// The input, offloaded where [`Engine::with_offload_target`] says.
    Offload,
}

/// The model, its parameters and the plan of what each block keeps.
pub struct Engine {
    model: Model,
    store: ParamStore,
    checkpointing: Vec<ActivationCheckpointing>,
    offload_target: OffloadTarget,
    group: Arc<dyn Collective>,
    device: Device,
    attention: AttentionChoice,
    tiled_mlp: TiledMlp,
    /// Bytes of logits that the loss may hold at once.
    logits_bytes: usize,
    attention_hook: Option<Arc<dyn ParallelOps + Send + Sync>>,
    sequence: Option<ContextParallel>,
    tensor: Option<TensorParallel>,
    pipeline: Pipeline,
}

impl Engine {
    /// Joins a model with its parameters. `checkpointing` has an entry for each block. Losses and
    /// counts are summed over `group`.
    pub fn new(
        model: Model,
        store: ParamStore,
        checkpointing: Vec<ActivationCheckpointing>,
        group: Arc<dyn Collective>,
        device: Device,
    ) -> Self {
        assert_eq!(checkpointing.len(), model.n_blocks(), "every block has its activation checkpointing");
        let pipeline = Pipeline::alone(model.n_blocks());
        let (offload_target, attention, tiled_mlp) =
            (OffloadTarget::HostMemory, AttentionChoice::default(), TiledMlp::default());
        let logits_bytes = logits_bytes(&device) as usize;
        let (attention_hook, sequence, tensor) = (None, None, None);
        Self {
            model,
            store,
            checkpointing,
            offload_target,
            group,
            device,
            attention,
            tiled_mlp,
            logits_bytes,
            attention_hook,
            sequence,
            tensor,
            pipeline,
        }
    }

    /// The same engine with its attention computed as `attention` says.
    pub fn with_attention(self, attention: AttentionChoice) -> Self {
        Self { attention, ..self }
    }

    /// Computes the attention of every layer in training and evaluation by `hook`, which may add auxiliary losses of queries and
    /// keys. It replaces the exchange of a sequence that ranks share.
    pub fn with_attention_hook(self, hook: Arc<dyn ParallelOps + Send + Sync>) -> Self {
        Self { attention_hook: Some(hook), ..self }
    }

    /// The same engine with the inputs of [`ActivationCheckpointing::Offload`] offloaded there, not in the host's memory.
    pub fn with_offload_target(self, offload_target: OffloadTarget) -> Self {
        Self { offload_target, ..self }
    }

    /// The same engine with its MLPs passing over the tokens as `tiled_mlp` says.
    pub fn with_tiled_mlp(self, tiled_mlp: TiledMlp) -> Self {
        Self { tiled_mlp, ..self }
    }

    /// The same engine with a loss that holds at most so many bytes of logits at once, though always those of a token.
    pub fn with_logits_bytes(self, logits_bytes: usize) -> Self {
        Self { logits_bytes, ..self }
    }

    /// The same engine with the tokens of each micro-batch shared among these ranks: all of them give the same ones.
    pub fn with_context_parallel(self, sequence: ContextParallel) -> Self {
        Self { sequence: Some(sequence), ..self }
    }

    /// The same engine with every matrix shared among these ranks, as its store has them: all of them give the same tokens.
    pub fn with_tensor_parallel(self, ranks: TensorParallel) -> Self {
        Self { tensor: Some(ranks), ..self }
    }

    /// The same engine with the blocks that its stage has, as its store does: all stages give the same tokens.
    pub fn with_pipeline(self, pipeline: Pipeline) -> Self {
        assert_eq!(pipeline.layout().n_blocks(), self.model.n_blocks(), "the stages have every block");
        Self { pipeline, ..self }
    }

    /// Returns the model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Returns the parameters.
    pub fn store(&self) -> &ParamStore {
        &self.store
    }

    /// Returns the activation checkpointing of each block.
    pub fn checkpointing(&self) -> &[ActivationCheckpointing] {
        &self.checkpointing
    }

    /// Returns how MLPs pass over the tokens.
    pub fn tiled_mlp(&self) -> TiledMlp {
        self.tiled_mlp
    }

    /// Returns the device that the engine computes on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the group over which losses and counts are summed.
    pub fn group(&self) -> &dyn Collective {
        self.group.as_ref()
    }

    /// Tells whether the loss of a micro-batch is known here: on the last stage of a pipeline.
    pub fn has_loss(&self) -> bool {
        let layout = self.pipeline.layout();
        layout.is_last(self.pipeline.stage(), layout.n_chunks() - 1)
    }

    /// What this rank computes of a micro-batch, of which there must be as many tokens as the ranks can share evenly.
    fn part<'m>(&self, micro: &'m Micro) -> Result<TokenShard<'m>> {
        match &self.sequence {
            Some(sequence) => sequence.part(micro),
            None => Ok(TokenShard { micro: Cow::Borrowed(micro), rows: Rows::all() }),
        }
    }

    /// Gathers a number of each of this rank's tokens for all tokens of a micro-batch, [t]. All ranks that share it call it.
    fn of_all_tokens(&self, own: &Tensor, micro: &Micro) -> Result<Tensor> {
        match &self.sequence {
            Some(sequence) => sequence.join(own, micro.seqs.n_tokens()),
            None => Ok(own.clone()),
        }
    }

    /// Selects this rank's tokens of a number of each token of a micro-batch, [t].
    fn of_own_tokens(&self, all: &Tensor, micro: &Micro) -> Result<Tensor> {
        match &self.sequence {
            Some(sequence) => sequence.own(all, micro.seqs.n_tokens()),
            None => Ok(all.clone()),
        }
    }

    /// Returns the loss of a whole micro-batch on the first of the ranks that share its tokens, and zero on the others: losses
    /// are summed over these ranks.
    fn counted_once(&self, loss: Tensor) -> Result<Tensor> {
        match &self.sequence {
            Some(sequence) if !sequence.is_first() => loss.zeros_like(),
            _ => Ok(loss),
        }
    }

    /// The number that those of the tokens must be a multiple of.
    fn multiple(&self) -> usize {
        let parts = self.tensor.as_ref().map_or(1, TensorParallel::sequence_parallel_size);
        parts * self.sequence.as_ref().map_or(1, ContextParallel::n_parts)
    }

    /// Calls `f` with the parallel_ops of this rank; attention is answered by `attend`, or else by this engine.
    fn with_parallel_ops<T>(&self, attention: Option<&dyn ParallelOps>, f: impl FnOnce(&dyn ParallelOps) -> T) -> T {
        let own: &dyn ParallelOps = match (&self.attention_hook, &self.sequence) {
            (Some(hook), _) => &**hook,
            (None, Some(sequence)) => sequence,
            (None, None) => &SingleDevice,
        };
        let attention = attention.unwrap_or(own);
        match &self.tensor {
            None => f(attention),
            Some(tensor) => f(&TensorParallelOps { tensor, n_vocab: self.model.config().vocab_size(), attention }),
        }
    }

    /// Describes the hidden states of `n_tokens` tokens of this rank between blocks: [t/n, d].
    fn hidden_states(&self, n_tokens: usize, parallel_ops: &dyn ParallelOps) -> HiddenStates {
        let shape = vec![n_tokens / parallel_ops.sequence_parallel_size(), self.model.config().hidden_size()];
        HiddenStates { dtype: self.store.compute_dtype(), shape }
    }

    /// What the blocks of a forward have in common, outside of training.
    fn context<'a>(
        &self,
        [cos, sin]: [&'a Tensor; 2],
        seqs: &'a Seqs,
        rows: &'a Rows,
        parallel_ops: &'a dyn ParallelOps,
    ) -> ForwardContext<'a> {
        let (attention, tiled_mlp) = (self.attention, self.tiled_mlp);
        ForwardContext { cos, sin, seqs, dropout_key: None, rows, attention, tiled_mlp, parallel_ops }
    }

    /// The weights of a unit, while those of the one that is wanted after it are on their way.
    fn fetch(&self, unit_idx: usize, next: Option<usize>) -> Result<&UnitWeights> {
        let weights = self.store.fetch(unit_idx)?;
        next.map_or(Ok(()), |next| self.store.prefetch(next))?;
        Ok(weights)
    }

    fn head(&self) -> usize {
        self.model.n_blocks() + 1
    }

    /// The loss of the tokens that the head reads, and with an upstream gradient theirs.
    fn cross_entropy(
        &self,
        normed_td: &Tensor,
        lm_head: &Weight,
        targets: &Tensor,
        reduction: Reduction,
        upstream: Upstream,
    ) -> Result<LossAndGrad> {
        let spec =
            |n_tokens| CrossEntropy { reduction, ignore_index: Micro::IGNORED, chunk: self.rows_of_logits(n_tokens) };
        match &self.tensor {
            None => linear_cross_entropy(normed_td, lm_head, targets, &spec(lm_head.dims()[0]), upstream),
            Some(tensor) => tensor.with_vocab(self.model.config().vocab_size(), |part| {
                linear_cross_entropy_part(normed_td, lm_head, targets, &spec(part.n_largest), upstream, part)
            }),
        }
    }

    /// How many rows of logits, of so many tokens each, may exist at once.
    fn rows_of_logits(&self, n_vocab: usize) -> usize {
        rows_of_logits(self.logits_bytes as u64, n_vocab as u64) as usize
    }
}
