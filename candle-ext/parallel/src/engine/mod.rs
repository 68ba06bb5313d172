//! The training and inference engine: forward, loss and backward, layer by layer.
//!
//! Dimensions: t tokens (packed), d hidden size, v vocabulary size

mod fp8;
mod inference;
mod loss;
mod memory;
mod metrics;
mod mtp;
mod reference;
mod step_results;
mod train;
mod train_step;

use std::borrow::Cow;
use std::sync::Arc;

use candle_core::{Device, Result, Tensor};
use candlewick_comm::Collective;
use candlewick_model::{
    ForwardContext, LayerOutputSpec, LayerSpec, Model, ParallelOps, SequenceMixing, SingleDevice, TiledMlp,
    TokenParallel, UnitWeights,
};
use candlewick_ops::{
    AttentionChoice, CrossEntropy, CuSeqlens, LossAndGrad, LossGrad, RowRanges, Weight, linear_cross_entropy,
    logits_bytes, max_logit_rows, vocab_parallel_cross_entropy,
};

use crate::batch::Micro;
use crate::context_parallel::{ContextParallel, TokenShard};
use crate::offload::OffloadTarget;
use crate::params::ParamStore;
use crate::pipeline::{HiddenStates, Pipeline};
use crate::routing::EngineRouting;
use crate::tensor_parallel::{TensorParallel, TensorParallelOps};

pub use fp8::Fp8LayerStats;
pub use inference::{PackedTokens, ScoreQuery};
use loss::LossForm;
pub use loss::{LossScale, StepLoss, StepLosses};
pub use memory::{HeadCost, OffloadMemory, StepBytes, StepCost};
pub use mtp::mtp_loss_name;
pub use step_results::{SideOutput, SideOutputs};
pub use train_step::{InFlightStep, OptimizerStep, StepResult, TrainBatch, ZeroGradCount};

/// Activation checkpointing of a layer: the activations saved between its forward and its backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationCheckpointing {
    /// All activations are saved: fastest, most memory.
    None,
    /// Input and routing are saved. Backward recomputes the rest.
    Full,
    /// Input, routing and attention output are saved. Backward recomputes the rest.
    Selective,
    /// Routing is saved, and the input is offloaded, see [`Engine::with_offload_target`]. Backward recomputes the rest.
    Offload,
}

/// A model, its parameters, and the parallelism and checkpointing of a rank.
pub struct Engine {
    model: Model,
    store: ParamStore,
    checkpointing: Vec<ActivationCheckpointing>,
    offload_target: OffloadTarget,
    group: Arc<dyn Collective>,
    device: Device,
    attention: AttentionChoice,
    tiled_mlp: TiledMlp,
    /// Maximum bytes of logits at once.
    logits_bytes: usize,
    /// Label smoothing of the training loss.
    label_smoothing: f32,
    attention_hook: Option<Arc<dyn SequenceMixing + Send + Sync>>,
    sequence: Option<ContextParallel>,
    tensor: Option<TensorParallel>,
    routing: EngineRouting,
    pipeline: Pipeline,
    /// Side outputs of the model's layers.
    layer_outputs: Vec<LayerOutputSpec>,
    /// Frozen engine of objectives that compare with one.
    reference: Option<Box<Engine>>,
}

impl Engine {
    /// Creates an engine of a model and its parameters. `checkpointing` has one entry per layer. Losses and counts are
    /// summed over `group`.
    pub fn new(
        model: Model,
        store: ParamStore,
        checkpointing: Vec<ActivationCheckpointing>,
        group: Arc<dyn Collective>,
        device: Device,
    ) -> Self {
        assert_eq!(checkpointing.len(), model.n_blocks(), "every block has its activation checkpointing");
        let pipeline = Pipeline::alone(model.n_blocks());
        let layer_outputs = model.layers().filter_map(LayerSpec::side_output).collect();
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
            label_smoothing: 0.0,
            attention_hook,
            sequence,
            tensor,
            routing: EngineRouting::default(),
            pipeline,
            layer_outputs,
            reference: None,
        }
    }

    /// Sets the attention implementation.
    pub fn with_attention(self, attention: AttentionChoice) -> Self {
        Self { attention, ..self }
    }

    /// Sets a hook that computes attention of every layer and may add auxiliary losses. It replaces the attention of
    /// context parallelism.
    pub fn with_attention_hook(self, hook: Arc<dyn SequenceMixing + Send + Sync>) -> Self {
        Self { attention_hook: Some(hook), ..self }
    }

    /// Sets the destination of activations under [`ActivationCheckpointing::Offload`]; the default is CPU memory.
    pub fn with_offload_target(self, offload_target: OffloadTarget) -> Self {
        Self { offload_target, ..self }
    }

    /// Sets the tiling of MLPs.
    pub fn with_tiled_mlp(self, tiled_mlp: TiledMlp) -> Self {
        Self { tiled_mlp, ..self }
    }

    /// Limits the bytes of logits at once. The logits of one token are always allowed.
    pub fn with_logits_bytes(self, logits_bytes: usize) -> Self {
        Self { logits_bytes, ..self }
    }

    /// Sets the label smoothing of the training loss, at least 0 (the default: off) and below 1; see
    /// [`CrossEntropy::label_smoothing`]. Inference and the losses of MTP layers have none.
    pub fn with_label_smoothing(self, label_smoothing: f32) -> Self {
        Self { label_smoothing, ..self }
    }

    /// Splits the tokens of each micro-batch over context parallel ranks. All of them must pass the same micro-batches.
    pub fn with_context_parallel(self, sequence: ContextParallel) -> Self {
        Self { sequence: Some(sequence), ..self }
    }

    /// Sets the tensor parallel group, which must be that of the parameter store. All its ranks must pass the same
    /// tokens.
    pub fn with_tensor_parallel(self, ranks: TensorParallel) -> Self {
        Self { tensor: Some(ranks), ..self }
    }

    /// Changes the routing of tokens.
    pub(crate) fn with_routing(self, change: impl FnOnce(EngineRouting) -> EngineRouting) -> Self {
        Self { routing: change(self.routing), ..self }
    }

    /// Sets the pipeline, which must be that of the parameter store. All stages must pass the same tokens.
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

    /// Returns the activation checkpointing of each layer.
    pub fn checkpointing(&self) -> &[ActivationCheckpointing] {
        &self.checkpointing
    }

    /// Returns the tiling of MLPs.
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

    /// Returns true on rank 0 of the mesh.
    pub fn is_first_rank(&self) -> bool {
        self.group.rank() == 0 && self.tensor.as_ref().is_none_or(|tensor| tensor.ranks.rank() == 0)
    }

    /// Returns true if this rank computes losses: on the last pipeline stage.
    pub fn has_loss(&self) -> bool {
        let layout = self.pipeline.layout();
        layout.is_last(self.pipeline.stage(), layout.n_chunks() - 1)
    }

    /// Returns this rank's share of a micro-batch. The number of tokens must be divisible by the ranks.
    fn part<'m>(&self, micro: &'m Micro) -> Result<TokenShard<'m>> {
        match &self.sequence {
            Some(sequence) => sequence.part(micro),
            None => Ok(TokenShard { micro: Cow::Borrowed(micro), rows: RowRanges::all() }),
        }
    }

    /// Returns the RoPE cosines and sines of this rank's tokens. Sequences have the length of all ranks' tokens.
    fn rope_of(&self, micro: &Micro, part: &TokenShard<'_>) -> Result<(Tensor, Tensor)> {
        let classes = part.rows.select(&self.model.length_classes(&micro.positions));
        self.model.rope(&part.micro.positions, &classes, &self.device)
    }

    /// All-gathers a value per token, [t], from the context parallel ranks. Collective.
    fn of_all_tokens(&self, own: &Tensor, micro: &Micro) -> Result<Tensor> {
        match &self.sequence {
            Some(sequence) => sequence.join(own, micro.seqs.n_tokens()),
            None => Ok(own.clone()),
        }
    }

    /// Selects this rank's tokens of a value per token, [t].
    fn of_own_tokens(&self, all: &Tensor, micro: &Micro) -> Result<Tensor> {
        match &self.sequence {
            Some(sequence) => sequence.own(all, micro.seqs.n_tokens()),
            None => Ok(all.clone()),
        }
    }

    /// Returns the loss of a whole micro-batch on the first context parallel rank and zero on the others, because
    /// losses are summed over them.
    fn counted_once(&self, loss: Tensor) -> Result<Tensor> {
        match &self.sequence {
            Some(sequence) if !sequence.is_first() => loss.zeros_like(),
            _ => Ok(loss),
        }
    }

    /// Returns the divisor that token counts must have.
    fn multiple(&self) -> usize {
        let parts = self.tensor.as_ref().map_or(1, TensorParallel::sequence_parallel_size);
        parts * self.sequence.as_ref().map_or(1, ContextParallel::n_parts)
    }

    /// Calls `f` with the operations of this rank. `sequence` overrides the engine's attention.
    fn with_parallel_ops<T>(&self, sequence: Option<&dyn SequenceMixing>, f: impl FnOnce(ParallelOps) -> T) -> T {
        let own: &dyn SequenceMixing = match (&self.attention_hook, &self.sequence) {
            (Some(hook), _) => &**hook,
            (None, Some(sequence)) => sequence,
            (None, None) => &SingleDevice,
        };
        let sequence = sequence.unwrap_or(own);
        let n_vocab = self.model.config().vocab_size();
        let tensor = self.tensor.as_ref().map(|tensor| TensorParallelOps { tensor, n_vocab });
        let inner: &dyn TokenParallel = tensor.as_ref().map_or(&SingleDevice, |tensor| tensor);
        self.routing.with_token_parallel(inner, |tokens| f(ParallelOps { tokens, sequence }))
    }

    /// Describes the hidden states of `n_tokens` tokens of this rank between blocks: [t/n, d].
    fn hidden_states(&self, n_tokens: usize, parallel_ops: ParallelOps) -> HiddenStates {
        let shape = vec![n_tokens / parallel_ops.tokens.sequence_parallel_size(), self.model.config().hidden_size()];
        HiddenStates { dtype: self.model.residual_dtype(self.store.compute_dtype()), shape }
    }

    /// Returns the forward context of inference.
    fn context<'a>(
        &'a self,
        [cos, sin]: [&'a Tensor; 2],
        seqs: &'a CuSeqlens,
        rows: &'a RowRanges,
        parallel_ops: ParallelOps<'a>,
    ) -> ForwardContext<'a> {
        let (attention, tiled_mlp) = (self.attention, self.tiled_mlp);
        let on_single_device = ForwardContext::on_single_device([cos, sin], seqs);
        self.routing.in_inference(ForwardContext { rows, attention, tiled_mlp, parallel_ops, ..on_single_device })
    }

    /// Returns the weights of a unit, and prefetches those of `next`.
    fn fetch(&self, unit_idx: usize, next: Option<usize>) -> Result<&UnitWeights> {
        let weights = self.store.fetch(unit_idx)?;
        next.map_or(Ok(()), |next| self.store.prefetch(next))?;
        Ok(weights)
    }

    fn head(&self) -> usize {
        self.model.units().len() - 1
    }

    /// Returns the unit that forward fetches after a layer's: the next layer, or the head. MTP layers come after the
    /// head.
    fn next_unit(&self, block_idx: usize) -> usize {
        if block_idx + 1 < self.model.n_blocks() { block_idx + 2 } else { self.head() }
    }

    /// Computes the loss of the output layer's tokens, and their gradient if an upstream gradient is given.
    fn cross_entropy(
        &self,
        normed_td: &Tensor,
        lm_head: &Weight,
        targets: &Tensor,
        form: impl Into<LossForm>,
        upstream: LossGrad,
    ) -> Result<LossAndGrad> {
        let LossForm { reduction, label_smoothing } = form.into();
        let ignore_index = Micro::IGNORED;
        let spec = |n_vocab| {
            let chunk = self.max_logit_rows(n_vocab);
            CrossEntropy { reduction, ignore_index, label_smoothing, chunk }
        };
        match &self.tensor {
            None => linear_cross_entropy(normed_td, lm_head, targets, &spec(lm_head.dims()[0]), upstream),
            Some(tensor) => tensor.with_vocab(self.model.config().vocab_size(), |part| {
                vocab_parallel_cross_entropy(normed_td, lm_head, targets, &spec(part.max_shard_rows), upstream, part)
            }),
        }
    }

    /// Returns the number of token rows whose logits fit the limit.
    fn max_logit_rows(&self, n_vocab: usize) -> usize {
        max_logit_rows(self.logits_bytes as u64, n_vocab as u64) as usize
    }
}
