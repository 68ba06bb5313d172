//! Forward and backward passes of a step in the order of the pipeline schedule.
//!
//! The `memory` module mirrors the allocations of these functions: change both.

use std::borrow::Cow;
use std::collections::HashMap;

use candle_core::{DType, Device, Result, Tensor};
use candlewick_model::{ForwardContext, LayerOutputSpec, LayerOutputs, ParallelOps};
use candlewick_ops::{
    LossGrad, OutputsToSave, Reduction, SavedOutputs, Tape, Weight, add, save_outputs, span, spin_workers, to_host,
};

use super::loss::{LossForm, LossSums, StepLoss, StepLosses, input_grad};
use super::mtp::MtpPass;
use super::{ActivationCheckpointing, Engine};
use crate::batch::{Micro, StepMicros};
use crate::context_parallel::TokenShard;
use crate::objective::{MetricReduction, MicroLoss, TokenLosses};
use crate::offload::OffloadedActivation;
use crate::params::MicroBatch;
use crate::pipeline::{ChunkPass, StageStep};
use crate::routing::{MicroRouting, RankTokens, RoutingReadback, RoutingStep, StepRouting};
use crate::tensor_parallel::TensorParallel;

/// Activations of a layer between its forward and its backward.
enum SavedActivation {
    /// Input and tape.
    Tape(Tensor, Tape),
    /// Input, and outputs that are not recomputed.
    Input(Tensor, SavedOutputs),
    /// Input in host memory, and outputs that are not recomputed.
    Offloaded(OffloadedActivation, SavedOutputs),
}

impl SavedActivation {
    /// Starts to copy an input in host memory back to the device.
    fn prefetch(&mut self) -> Result<()> {
        match self {
            Self::Offloaded(offloaded, _) => offloaded.prefetch(),
            Self::Tape(..) | Self::Input(..) => Ok(()),
        }
    }
}

/// Activations of a model chunk between its forward and its backward.
struct ChunkActivations {
    /// Tape of the embedding, if the chunk begins with it.
    embedded: Option<Tape>,
    blocks: Vec<SavedActivation>,
    /// Gradient of the chunk's output, if the head follows it.
    dy: Option<Tensor>,
}

/// A micro-batch of a step, padded to split evenly over the ranks.
struct PaddedMicro<'m> {
    micro: Cow<'m, Micro>,
    /// Tokens before the padding.
    n_tokens: usize,
    /// Tokens before the padding; 0 for a micro-batch without targets.
    n_valid_tokens: usize,
    /// The most rows of any rank's residual stream, if layers pad to it.
    most_rows: Option<usize>,
    dropout_key: u64,
}

/// A micro-batch between its first forward and its last backward.
struct MicroBatchState<'m> {
    /// The whole micro-batch, before it is split over context parallel ranks.
    whole: &'m Micro,
    part: TokenShard<'m>,
    cos: Tensor,
    sin: Tensor,
    dropout_key: u64,
    routing: MicroRouting,
    /// Activations of each chunk between its forward and its backward.
    activations: HashMap<usize, ChunkActivations>,
}

/// Inputs and outputs that all passes of a step share.
struct StepContext<'a> {
    loss: &'a StepLoss<'a>,
    micros: &'a [PaddedMicro<'a>],
    routing: RoutingStep<'a>,
    outputs: LayerOutputs,
}

/// A step between its passes.
struct RunningStep<'a> {
    /// Loss of each micro-batch, so far.
    losses: Vec<Tensor>,
    sums: LossSums<'a>,
    states: Vec<Option<MicroBatchState<'a>>>,
}

/// A pass over a model chunk, with its position in the step.
struct Pass<'a> {
    step: &'a StepContext<'a>,
    chunk_pass: ChunkPass,
    micro_batch: MicroBatch,
    /// True if the next pass is this one's backward.
    backward_is_next: bool,
}

impl Pass<'_> {
    /// Returns the factors of an auxiliary loss that are known once all layers have run.
    fn factors(&self, loss: &Tensor) -> Result<Option<Tensor>> {
        self.step.routing.deferred_factors(self.chunk_pass.micro, loss)
    }
}

impl Engine {
    /// Runs forward and backward over the micro-batches of a step, and accumulates gradients of `loss`, summed over
    /// micro-batches and ranks.
    ///
    /// Returns this rank's losses before normalization; zeros on ranks without [losses](Engine::has_loss). Layers may pad to
    /// [`StepMicros::most_tokens`] if they are known.
    /// `dropout_keys` seed the dropout of each micro-batch. Does not synchronize with the GPU: read the losses at the
    /// end of the step.
    pub fn forward_backward<'m, 'l>(
        &self,
        micros: impl Into<StepMicros<'m>>,
        loss: impl Into<StepLoss<'l>>,
        dropout_key: impl Fn(usize) -> u64,
    ) -> Result<StepLosses> {
        Ok(self.forward_backward_routed(micros.into(), &loss.into(), dropout_key, StepRouting::Select)?.0)
    }

    /// Runs [`Engine::forward_backward`] with a choice of the routing. Returns the recorded one, too.
    pub(super) fn forward_backward_routed(
        &self,
        step: StepMicros<'_>,
        loss: &StepLoss<'_>,
        dropout_key: impl Fn(usize) -> u64,
        routing: StepRouting<'_>,
    ) -> Result<(StepLosses, Option<RoutingReadback>)> {
        let columns = self.with_columns(step.micros, loss.objective)?;
        let fp8_key = if step.micros.is_empty() { 0 } else { dropout_key(0) };
        let _fp8 = self.store.enable_fp8(fp8_key)?;
        let micros = self.padded_micros(&columns, &step.most_tokens_of_parts(self.multiple())?, dropout_key)?;
        let routing = self.routing.begin_step(&self.model, routing, &self.device);
        let step = StepContext { loss, micros: &micros, routing, outputs: LayerOutputs::default() };
        let running = self.run_schedule(&step)?;
        self.pipeline.finish()?;
        {
            let _span = span("gradient reduction", "");
            self.store.wait_grad_reduction()?;
        }
        let RunningStep { losses, sums, .. } = running;
        self.finish(&step, losses, sums)
    }

    /// Pads the micro-batches of a step to split evenly over the ranks.
    fn padded_micros<'m>(
        &self,
        micros: &'m [Micro],
        most_rows: &[Option<usize>],
        dropout_key: impl Fn(usize) -> u64,
    ) -> Result<Vec<PaddedMicro<'m>>> {
        let padded = |(i, micro): (usize, &'m Micro)| {
            Ok(PaddedMicro {
                micro: micro.padded(self.multiple())?,
                n_tokens: micro.seqs.n_tokens(),
                n_valid_tokens: micro.n_valid_tokens()?,
                most_rows: most_rows[i],
                dropout_key: dropout_key(i),
            })
        };
        micros.iter().enumerate().map(padded).collect()
    }

    /// Runs all passes of this stage.
    fn run_schedule<'a>(&'a self, step: &'a StepContext<'a>) -> Result<RunningStep<'a>> {
        let n_micros = step.micros.len();
        let unknown = || Tensor::zeros((), DType::F32, &self.device);
        let mut running = RunningStep {
            losses: (0..n_micros).map(|_| unknown()).collect::<Result<_>>()?,
            sums: LossSums::new(step.loss, self.model.layers().count()),
            states: (0..n_micros).map(|_| None).collect(),
        };
        let passes = self.pipeline.steps(n_micros);
        for (i, stage_step) in passes.iter().enumerate() {
            let (StageStep::Forward(chunk_pass) | StageStep::Backward(chunk_pass)) = *stage_step;
            let micro_batch = if chunk_pass.micro + 1 == n_micros { MicroBatch::Last } else { MicroBatch::Earlier };
            let is_forward = matches!(stage_step, StageStep::Forward(_));
            let backward_is_next = is_forward && passes.get(i + 1) == Some(&StageStep::Backward(chunk_pass));
            let pass = Pass { step, chunk_pass, micro_batch, backward_is_next };
            let _spinning = spin_workers(&self.device);
            match stage_step {
                StageStep::Forward(_) => self.forward_pass(&pass, &mut running)?,
                StageStep::Backward(_) => self.backward_pass(&pass, &mut running)?,
            }
        }
        Ok(running)
    }

    fn forward_pass<'a>(&'a self, pass: &Pass<'a>, running: &mut RunningStep<'a>) -> Result<()> {
        let _span = span("micro-batch", "forward");
        let (micro_idx, chunk) = (pass.chunk_pass.micro, pass.chunk_pass.chunk);
        let state = match &mut running.states[micro_idx] {
            Some(state) => state,
            none => none.insert(self.begin(pass.step, micro_idx)?),
        };
        let (loss, activations) = self
            .with_parallel_ops(None, |parallel_ops| self.forward_chunk(pass, state, parallel_ops, &mut running.sums))?;
        state.activations.insert(chunk, activations);
        if let Some(loss) = loss {
            running.losses[micro_idx] = loss;
        }
        Ok(())
    }

    fn backward_pass<'a>(&'a self, pass: &Pass<'a>, running: &mut RunningStep<'a>) -> Result<()> {
        let _span = span("micro-batch", "backward");
        let (micro_idx, chunk) = (pass.chunk_pass.micro, pass.chunk_pass.chunk);
        let state = running.states[micro_idx].as_mut().expect("a forward comes before its backward");
        let activations = state.activations.remove(&chunk).expect("a chunk's activations are saved once");
        self.with_parallel_ops(None, |parallel_ops| {
            self.backward_chunk(pass, state, activations, parallel_ops, &mut running.sums)
        })?;
        // The first chunk's backward is last.
        if chunk == 0 {
            running.states[micro_idx] = None;
        }
        Ok(())
    }

    /// Begins a micro-batch: splits it over the ranks.
    fn begin<'a>(&self, step: &StepContext<'a>, micro_idx: usize) -> Result<MicroBatchState<'a>> {
        let PaddedMicro { micro, n_tokens, n_valid_tokens, most_rows, dropout_key } = &step.micros[micro_idx];
        let part = self.part(micro)?;
        let (cos, sin) = self.rope_of(micro, &part)?;
        let tokens = RankTokens {
            micro,
            micro_idx,
            n_tokens: *n_tokens,
            n_valid_tokens: *n_valid_tokens,
            most_rows: *most_rows,
            tokens_of_rows: &|| self.residual_tokens(micro),
        };
        let routing = step.routing.begin_micro(&self.model, || self.own_layers(), &tokens)?;
        let (dropout_key, activations) = (*dropout_key, HashMap::new());
        Ok(MicroBatchState { whole: micro, part, cos, sin, dropout_key, routing, activations })
    }

    /// Sums the side outputs of a step over the ranks that split the residual stream.
    fn finish(
        &self,
        step: &StepContext<'_>,
        micros: Vec<Tensor>,
        sums: LossSums<'_>,
    ) -> Result<(StepLosses, Option<RoutingReadback>)> {
        let (auxiliary, metrics) = sums.finish(&self.device)?;
        let auxiliary = self.sum_over_residual_ranks(auxiliary)?;
        let is_copy = self.tensor.as_ref().is_some_and(TensorParallel::holds_copy);
        let rows_of = |micro_idx: usize| {
            let PaddedMicro { micro, n_tokens, .. } = &step.micros[micro_idx];
            Ok((self.residual_tokens(micro)?, *n_tokens))
        };
        let routed = step.routing.read_back(micros.len(), is_copy, rows_of)?;
        let layers = self.sum_over_residual_ranks(self.layer_outputs(&step.outputs)?)?;
        Ok((StepLosses { micros, auxiliary, layers, metrics }, routed))
    }

    /// Returns the side output of each layer that has one; zeros for layers of other stages.
    fn layer_outputs(&self, outputs: &LayerOutputs) -> Result<Vec<Tensor>> {
        let of_layer = |spec: &LayerOutputSpec| match outputs.take(spec) {
            Some(values) => Ok(values),
            None => Tensor::zeros(spec.n_numbers, DType::F32, &self.device),
        };
        self.layer_outputs.iter().map(of_layer).collect()
    }

    /// Returns the token of each row of this rank's residual stream, as an index into the padded micro-batch.
    fn residual_tokens(&self, micro: &Micro) -> Result<Vec<usize>> {
        let tokens = Tensor::arange(0u32, micro.seqs.n_tokens() as u32, &Device::Cpu)?;
        let own = to_host(&self.of_own_tokens(&tokens, micro)?)?.to_vec1::<u32>()?;
        let rows = match &self.tensor {
            Some(tensor) => tensor.residual_rows(own.len()),
            None => 0..own.len(),
        };
        Ok(own[rows].iter().map(|token| *token as usize).collect())
    }

    /// Returns the indices of the layers that this rank computes.
    fn own_layers(&self) -> Vec<usize> {
        let (layout, stage) = (self.pipeline.layout(), self.pipeline.stage());
        let blocks = (0..layout.n_chunks()).flat_map(|chunk| layout.blocks(stage, chunk));
        let mtp_layers = self.model.n_blocks()..self.model.layers().count();
        blocks.chain(mtp_layers.filter(|_| self.has_loss())).collect()
    }

    /// Sums vectors over the tensor parallel ranks, if these split the residual stream.
    fn sum_over_residual_ranks(&self, vectors: Vec<Tensor>) -> Result<Vec<Tensor>> {
        match &self.tensor {
            Some(tensor) if !vectors.is_empty() => tensor.sum_over_residual_ranks(&vectors),
            _ => Ok(vectors),
        }
    }

    /// Runs the forward of a model chunk, including embedding and head if it has them.
    fn forward_chunk(
        &self,
        pass: &Pass<'_>,
        state: &MicroBatchState,
        parallel_ops: ParallelOps,
        sums: &mut LossSums,
    ) -> Result<(Option<Tensor>, ChunkActivations)> {
        let (layout, stage, chunk) = (self.pipeline.layout(), self.pipeline.stage(), pass.chunk_pass.chunk);
        let micro = &state.part.micro;
        // The forward that backward repeats does not count.
        let context = self.training_context(pass, state, parallel_ops, Some(&pass.step.outputs));
        let (embedded, mut x) = match layout.is_first(stage, chunk) {
            true => {
                let tape =
                    Tape::record(&[], || self.model.embed(self.store.fetch(0)?, &micro.ids, parallel_ops.tokens))?;
                self.store.release(0);
                let x = tape.output().clone();
                (Some(tape), x)
            }
            false => {
                let expected = self.hidden_states(micro.positions.len(), parallel_ops);
                let x = self.pipeline.receive_activation(expected)?;
                pass.step.routing.receive_forward(&self.pipeline, pass.chunk_pass.micro)?;
                (None, x)
            }
        };
        let run = layout.blocks(stage, chunk);
        let mut blocks = Vec::with_capacity(run.len());
        for block_idx in run.clone() {
            let (y, keep) = self.forward_block(block_idx, x, &context)?;
            // If the backward comes next, it uses the last layer's weights at once; after those of MTP layers.
            if block_idx + 1 < run.end || !pass.backward_is_next || self.model.config().n_mtp_layers() > 0 {
                self.store.release(block_idx + 1);
            }
            blocks.push(keep);
            x = y;
        }
        // No later layer releases the last input before the head needs memory.
        if let Some(SavedActivation::Offloaded(input, _)) = blocks.last() {
            input.release_source()?;
        }
        if !layout.is_last(stage, chunk) {
            self.pipeline.send_activation(&x)?;
            pass.step.routing.send_forward(&self.pipeline, pass.chunk_pass.micro)?;
            return Ok((None, ChunkActivations { embedded, blocks, dy: None }));
        }
        let (loss, dx) = self.loss_and_grad(&x, pass, state, &context, sums)?;
        drop(x);
        self.release_unit(self.head(), pass.micro_batch)?;
        Ok((Some(loss), ChunkActivations { embedded, blocks, dy: Some(dx) }))
    }

    /// Runs the backward of a model chunk, including the embedding if it has one.
    fn backward_chunk(
        &self,
        pass: &Pass<'_>,
        state: &MicroBatchState,
        activations: ChunkActivations,
        parallel_ops: ParallelOps,
        sums: &mut LossSums,
    ) -> Result<()> {
        let ChunkActivations { embedded, blocks, dy } = activations;
        let context = self.training_context(pass, state, parallel_ops, None);
        let mut dx = match dy {
            Some(dy) => dy,
            None => {
                let expected = self.hidden_states(state.part.micro.positions.len(), parallel_ops);
                let dy = self.pipeline.receive_gradient(expected)?;
                pass.step.routing.receive_backward(&self.pipeline, pass.chunk_pass.micro)?;
                dy
            }
        };
        let run = self.pipeline.layout().blocks(self.pipeline.stage(), pass.chunk_pass.chunk);
        let mut blocks: Vec<_> = run.zip(blocks).collect();
        while let Some((block_idx, mut saved)) = blocks.pop() {
            saved.prefetch()?;
            // The next layer's input is copied during this layer's backward.
            if let Some((_, next)) = blocks.last_mut() {
                next.prefetch()?;
            }
            dx = self.backward_block(block_idx, saved, &dx, (&context, pass), sums)?;
            self.release_unit(block_idx + 1, pass.micro_batch)?;
        }
        let Some(embedded) = embedded else {
            self.pipeline.send_gradient(&dx)?;
            return pass.step.routing.send_backward(&self.pipeline, pass.chunk_pass.micro);
        };
        self.store.prepare_grads(0)?;
        embedded.backward(&dx)?;
        self.release_unit(0, pass.micro_batch)
    }

    fn training_context<'a>(
        &'a self,
        pass: &Pass<'a>,
        state: &'a MicroBatchState,
        parallel_ops: ParallelOps<'a>,
        outputs: Option<&'a LayerOutputs>,
    ) -> ForwardContext<'a> {
        let MicroBatchState { part, cos, sin, dropout_key, routing, .. } = state;
        let context = self.context([cos, sin], &part.micro.seqs, &part.rows, parallel_ops);
        let context = ForwardContext { dropout_key: Some(*dropout_key), ..context };
        pass.step.routing.in_context(context, routing, outputs)
    }

    /// Reshards a unit's weights after its backward, and starts its gradient reduction.
    pub(super) fn release_unit(&self, unit_idx: usize, micro_batch: MicroBatch) -> Result<()> {
        self.store.release(unit_idx);
        self.store.start_grad_reduction(unit_idx, micro_batch)
    }

    fn forward_block(
        &self,
        block_idx: usize,
        x: Tensor,
        context: &ForwardContext,
    ) -> Result<(Tensor, SavedActivation)> {
        let _span = span("block", "forward");
        let weights = self.fetch(block_idx + 1, Some(self.next_unit(block_idx)))?;
        if self.checkpointing[block_idx] == ActivationCheckpointing::None {
            let tape = Tape::record(&[&x], || self.model.block(weights, &x, context))?;
            return Ok((tape.output().clone(), SavedActivation::Tape(x, tape)));
        }
        // The copy to host memory runs during the forward.
        let is_offloaded = self.checkpointing[block_idx] == ActivationCheckpointing::Offload;
        let offloaded = is_offloaded.then(|| OffloadedActivation::offload(&x, &self.offload_target)).transpose()?;
        let forward = || self.model.block(weights, &x, context);
        let (y, outputs) = match self.checkpointing[block_idx] {
            ActivationCheckpointing::Selective => save_outputs(OutputsToSave::All, forward)?,
            _ => save_outputs(OutputsToSave::Routing, forward)?,
        };
        let kept = match offloaded {
            Some(offloaded) => SavedActivation::Offloaded(offloaded, outputs),
            None => SavedActivation::Input(x, outputs),
        };
        Ok((y, kept))
    }

    fn backward_block(
        &self,
        block_idx: usize,
        kept: SavedActivation,
        dy: &Tensor,
        (context, pass): (&ForwardContext, &Pass),
        sums: &mut LossSums,
    ) -> Result<Tensor> {
        let _span = span("block", "backward");
        let factors = |loss: &Tensor| pass.factors(loss);
        // The embedding's backward reads no weights.
        let weights = self.fetch(block_idx + 1, Some(block_idx).filter(|unit_idx| *unit_idx > 0))?;
        self.store.prepare_grads(block_idx + 1)?;
        let (x, outputs) = match kept {
            SavedActivation::Tape(x, tape) => return sums.input_grad(block_idx, tape, (&x, dy), &factors),
            SavedActivation::Input(x, outputs) => (x, outputs),
            SavedActivation::Offloaded(offloaded, outputs) => (offloaded.fetch()?, outputs),
        };
        let forward = || self.model.block(weights, &x, context);
        let tape = Tape::replay(outputs, &[&x], forward)?;
        sums.input_grad(block_idx, tape, (&x, dy), &factors)
    }

    /// Returns the loss of a micro-batch, and the gradient of the scaled loss with respect to the last layer's output.
    fn loss_and_grad(
        &self,
        x_td: &Tensor,
        pass: &Pass,
        state: &MicroBatchState,
        context: &ForwardContext,
        sums: &mut LossSums,
    ) -> Result<(Tensor, Tensor)> {
        let _span = span("head", "forward and backward");
        let weights = self.store.fetch(self.head())?;
        self.store.prepare_grads(self.head())?;
        let tape = Tape::record(&[x_td], || self.model.final_norm(weights, x_td))?;
        let lm_head = self.model.lm_head(weights)?;
        let mut value = None;
        let mut dy = self.hidden_states_grad(tape.output(), context.parallel_ops, |normed_td| {
            let (loss, dx) = self.objective_loss(normed_td, &lm_head, (pass.step.loss, state), sums)?;
            value = Some(loss);
            Ok(dx)
        })?;
        let factors = |loss: &Tensor| pass.factors(loss);
        let mtp = MtpPass { head: weights, micro: state.whole, context, position: pass.micro_batch, factors: &factors };
        if let Some(of_mtp) = self.mtp_backward(&mtp, tape.output(), sums)? {
            dy = add(&dy, &of_mtp)?;
        }
        Ok((value.expect("the objective has a loss"), input_grad(tape, x_td, &dy, &[])?))
    }

    /// Returns the objective's loss of a micro-batch, and the gradient of the scaled loss with respect to the output layer's
    /// input.
    fn objective_loss(
        &self,
        normed_td: &Tensor,
        lm_head: &Weight,
        (loss, state): (&StepLoss, &MicroBatchState),
        sums: &mut LossSums,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let cross_entropy = |reduction, upstream| {
            let form = LossForm { reduction, label_smoothing: self.label_smoothing };
            self.cross_entropy(normed_td, lm_head, &state.part.micro.targets, form, upstream)
        };
        let token_losses = || self.of_all_tokens(&cross_entropy(Reduction::None, LossGrad::NoGrad)?.loss, state.whole);
        let tokens = TokenLosses::new(state.whole, loss.objective.metrics(), &token_losses);
        let of_micro = loss.objective.loss(&tokens)?;
        for (i, value) in tokens.into_emitted() {
            // All context parallel ranks have the metrics of the whole micro-batch.
            let value = match loss.objective.metrics()[i].reduction {
                MetricReduction::Max => value,
                MetricReduction::Sum | MetricReduction::Mean => self.counted_once(value)?,
            };
            sums.add_metric(i, value)?;
        }
        match of_micro {
            MicroLoss::SumOfTokens => {
                let out = cross_entropy(Reduction::Sum, loss.scale.upstream())?;
                Ok((out.loss, out.dx))
            }
            MicroLoss::Weighted { loss: of_micro, weights } => {
                let rows = loss.scale.times_weights(&self.of_own_tokens(&weights, state.whole)?)?;
                let out = cross_entropy(Reduction::None, LossGrad::PerToken(&rows))?;
                Ok((self.counted_once(of_micro)?, out.dx))
            }
        }
    }

    /// Returns the gradient of hidden states after a norm, [t/n, d]. `loss_grad` returns that of the output layer's
    /// input, [t, d].
    pub(super) fn hidden_states_grad(
        &self,
        normed: &Tensor,
        parallel_ops: ParallelOps,
        loss_grad: impl FnOnce(&Tensor) -> Result<Option<Tensor>>,
    ) -> Result<Tensor> {
        let tape = Tape::record(&[normed], || parallel_ops.tokens.copy_to_tp(normed))?;
        let dx = loss_grad(tape.output())?.expect("an upstream gradient was given");
        input_grad(tape, normed, &dx, &[])
    }
}
