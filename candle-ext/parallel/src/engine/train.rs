//! Forward and backward passes of a step in the order of the pipeline schedule.
//!
//! The `memory` module mirrors the allocations of these functions: change both.

use std::collections::HashMap;

use candle_core::{DType, Result, Tensor};
use candlewick_model::{
    ExpertCountsSummedOverLayers, ForwardContext, GlobalExpertCounts, ParallelOps, ReplayedExperts, RouterContext,
    RouterRows, RouterTotals, RoutingRecord,
};
use candlewick_ops::{
    LossGrad, OutputsToSave, Reduction, SavedOutputs, Tape, add, derive_key, save_outputs, span, spin_workers,
};

use super::expert_counts_summed_over_layers::MicroCounts;
use super::loss::{AuxiliarySums, LossForm, StepLoss, StepLosses, input_grad};
use super::mtp::MtpPass;
use super::routing_replay::{ExpertReadback, MicroExperts, StepRouting};
use super::{ActivationCheckpointing, Engine};
use crate::batch::{Micro, StepMicros};
use crate::context_parallel::TokenShard;
use crate::objective::{MicroLoss, TokenLosses};
use crate::offload::OffloadedActivation;
use crate::params::MicroBatch;
use crate::pipeline::{ChunkPass, StageStep};

/// Part of the seed of the routers' noise in a micro-batch.
const ROUTER_NOISE: u64 = 0x726f_7574_6572;

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

/// A micro-batch between its first forward and its last backward.
struct MicroBatchState<'m> {
    /// The whole micro-batch, before it is split over context parallel ranks.
    whole: &'m Micro,
    part: TokenShard<'m>,
    cos: Tensor,
    sin: Tensor,
    dropout_key: u64,
    /// Rows of this rank's residual stream that routers count.
    router_rows: Option<RouterRows>,
    /// The most rows of any rank's residual stream, if experts are padded.
    most_rows: Option<usize>,
    /// Experts that replace the routers' selections.
    replayed: Option<ReplayedExperts>,
    /// Activations of each chunk between its forward and its backward.
    activations: HashMap<usize, ChunkActivations>,
}

/// Sums of the routers over a step.
#[derive(Default)]
struct StepRouters {
    totals: RouterTotals,
    global_counts: GlobalExpertCounts,
    /// Counts summed over layers, if a loss reads them.
    expert_counts_summed_over_layers: Option<ExpertCountsSummedOverLayers>,
    /// Record of the selections, if the step records them.
    record: Option<RoutingRecord>,
}

/// A pass over a model chunk, with its position in the step.
struct Pass<'a> {
    chunk_pass: ChunkPass,
    routers: &'a StepRouters,
    micro_batch: MicroBatch,
    /// True if the next pass is this one's backward.
    backward_is_next: bool,
}

impl<'a> Pass<'a> {
    fn expert_counts_summed_over_layers(&self) -> MicroCounts<'a> {
        MicroCounts { counts: self.routers.expert_counts_summed_over_layers.as_ref(), micro_idx: self.chunk_pass.micro }
    }
}

impl Engine {
    /// Runs forward and backward over the micro-batches of a step, and accumulates gradients of `loss`, summed over
    /// micro-batches and ranks.
    ///
    /// Returns this rank's losses before normalization; zeros on ranks without [losses](Engine::has_loss). Experts are padded
    /// to their capacity if [`StepMicros::most_tokens`] is known.
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

    /// Runs [`Engine::forward_backward`] with a choice of the experts. Returns the recorded experts, too.
    pub(super) fn forward_backward_routed(
        &self,
        step: StepMicros<'_>,
        loss: &StepLoss<'_>,
        dropout_key: impl Fn(usize) -> u64,
        routing: StepRouting<'_>,
    ) -> Result<(StepLosses, Option<ExpertReadback>)> {
        let fp8_key = if step.micros.is_empty() { 0 } else { dropout_key(0) };
        let _fp8 = self.store.enable_fp8(fp8_key)?;
        let mut auxiliary = AuxiliarySums::new(loss, self.model.layers().count());
        let record = matches!(routing, StepRouting::Record).then(RoutingRecord::default);
        let mut routers = StepRouters {
            record,
            expert_counts_summed_over_layers: self.expert_counts_summed_over_layers(),
            ..StepRouters::default()
        };
        let given: Option<&[Option<MicroExperts>]> = match routing {
            StepRouting::Replay(micros) => Some(micros),
            StepRouting::Select | StepRouting::Record => None,
        };
        let lengths: Vec<usize> = step.micros.iter().map(|micro| micro.seqs.n_tokens()).collect();
        let n_tokens = step.micros.iter().map(Micro::n_valid_tokens).collect::<Result<Vec<_>>>()?;
        let most_rows = step.most_tokens_of_parts(self.multiple())?;
        let micros: Vec<_> = step.micros.iter().map(|micro| micro.padded(self.multiple())).collect::<Result<_>>()?;
        let unknown = || Tensor::zeros((), DType::F32, &self.device);
        let mut sums: Vec<_> = micros.iter().map(|_| unknown()).collect::<Result<_>>()?;
        let mut states: Vec<Option<MicroBatchState>> = micros.iter().map(|_| None).collect();
        let steps = self.pipeline.steps(micros.len());
        for (i, step) in steps.iter().enumerate() {
            let (StageStep::Forward(chunk_pass) | StageStep::Backward(chunk_pass)) = *step;
            let micro_batch = if chunk_pass.micro + 1 == micros.len() { MicroBatch::Last } else { MicroBatch::Earlier };
            let _spinning = spin_workers(&self.device);
            match step {
                StageStep::Forward(_) => {
                    let _span = span("micro-batch", "forward");
                    let backward_is_next = steps.get(i + 1) == Some(&StageStep::Backward(chunk_pass));
                    let state = match &mut states[chunk_pass.micro] {
                        Some(state) => state,
                        none => {
                            let idx = chunk_pass.micro;
                            let micro = &micros[idx];
                            let given = given.and_then(|micros| micros[idx].as_ref());
                            let replayed = given.map(|given| self.replayed_experts(micro, lengths[idx], given));
                            let state = self.begin(micro, n_tokens[idx], dropout_key(idx))?;
                            let (most_rows, replayed) = (most_rows[idx], replayed.transpose()?);
                            none.insert(MicroBatchState { most_rows, replayed, ..state })
                        }
                    };
                    let pass = Pass { chunk_pass, routers: &routers, micro_batch, backward_is_next };
                    let (loss, activations) = self.with_parallel_ops(None, |parallel_ops| {
                        self.forward_chunk(&pass, state, loss, parallel_ops, &mut auxiliary)
                    })?;
                    state.activations.insert(chunk_pass.chunk, activations);
                    if let Some(loss) = loss {
                        sums[chunk_pass.micro] = loss;
                    }
                }
                StageStep::Backward(_) => {
                    let _span = span("micro-batch", "backward");
                    let backward_is_next = false;
                    let pass = Pass { chunk_pass, routers: &routers, micro_batch, backward_is_next };
                    let state = states[chunk_pass.micro].as_mut().expect("a forward comes before its backward");
                    let activations =
                        state.activations.remove(&chunk_pass.chunk).expect("a chunk's activations are saved once");
                    self.with_parallel_ops(None, |parallel_ops| {
                        self.backward_chunk(&pass, state, activations, parallel_ops, &mut auxiliary)
                    })?;
                    // The first chunk's backward is last.
                    if chunk_pass.chunk == 0 {
                        states[chunk_pass.micro] = None;
                    }
                }
            }
        }
        self.pipeline.finish()?;
        {
            let _span = span("gradient reduction", "");
            self.store.wait_grad_reduction()?;
        }
        let auxiliary = self.sum_over_residual_ranks(auxiliary.finish(&self.device)?)?;
        let record = routers.record.take();
        let experts = record.map(|record| self.read_back_experts(record, &micros, &lengths)).transpose()?;
        let routers = self.sum_over_residual_ranks(self.totals_of_layers(routers.totals)?)?;
        Ok((StepLosses { micros: sums, auxiliary, routers }, experts))
    }

    /// Splits a padded micro-batch, of which the first `n_tokens` tokens are no padding.
    fn begin<'m>(&self, micro: &'m Micro, n_tokens: usize, dropout_key: u64) -> Result<MicroBatchState<'m>> {
        let part = self.part(micro)?;
        let (cos, sin) = self.rope_of(micro, &part)?;
        let router_rows = self.router_rows(micro, n_tokens)?;
        Ok(MicroBatchState {
            whole: micro,
            part,
            cos,
            sin,
            dropout_key,
            router_rows,
            most_rows: None,
            replayed: None,
            activations: HashMap::new(),
        })
    }

    /// Returns the total of each router; zeros for layers of other stages.
    fn totals_of_layers(&self, totals: RouterTotals) -> Result<Vec<Tensor>> {
        let mut totals = totals.into_layers();
        let layers = self.model.layers().filter_map(|layer| Some((layer.layer_idx, layer.n_experts()?)));
        let of_layer = |(layer_idx, n_experts): (usize, usize)| match totals.remove(&layer_idx) {
            Some(total) => Ok(total),
            None => Tensor::zeros(RouterTotals::len_of(n_experts), DType::F32, &self.device),
        };
        layers.map(of_layer).collect()
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
        loss: &StepLoss,
        parallel_ops: &dyn ParallelOps,
        auxiliary: &mut AuxiliarySums,
    ) -> Result<(Option<Tensor>, ChunkActivations)> {
        let (layout, stage, chunk) = (self.pipeline.layout(), self.pipeline.stage(), pass.chunk_pass.chunk);
        let micro = &state.part.micro;
        // The forward that backward repeats does not count.
        let mut context = self.training_context(pass, state, parallel_ops);
        context.router.totals = Some(&pass.routers.totals);
        context.router.record = pass.routers.record.as_ref();
        let (embedded, mut x) = match layout.is_first(stage, chunk) {
            true => {
                let tape = Tape::record(&[], || self.model.embed(self.store.fetch(0)?, &micro.ids, parallel_ops))?;
                self.store.release(0);
                let x = tape.output().clone();
                (Some(tape), x)
            }
            false => {
                let expected = self.hidden_states(micro.positions.len(), parallel_ops);
                let x = self.pipeline.receive_activation(expected)?;
                self.receive_counts_forward(pass.expert_counts_summed_over_layers())?;
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
            self.send_counts_forward(pass.expert_counts_summed_over_layers())?;
            return Ok((None, ChunkActivations { embedded, blocks, dy: None }));
        }
        let (loss, dx) = self.loss_and_grad(&x, pass, state, loss, &context, auxiliary)?;
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
        parallel_ops: &dyn ParallelOps,
        auxiliary: &mut AuxiliarySums,
    ) -> Result<()> {
        let ChunkActivations { embedded, blocks, dy } = activations;
        let context = self.training_context(pass, state, parallel_ops);
        let mut dx = match dy {
            Some(dy) => dy,
            None => {
                let expected = self.hidden_states(state.part.micro.positions.len(), parallel_ops);
                let dy = self.pipeline.receive_gradient(expected)?;
                self.receive_counts_backward(pass.expert_counts_summed_over_layers())?;
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
            dx = self.backward_block(block_idx, saved, &dx, &context, auxiliary)?;
            self.release_unit(block_idx + 1, pass.micro_batch)?;
        }
        let Some(embedded) = embedded else {
            self.pipeline.send_gradient(&dx)?;
            return self.send_counts_backward(pass.expert_counts_summed_over_layers());
        };
        self.store.prepare_grads(0)?;
        embedded.backward(&dx)?;
        self.release_unit(0, pass.micro_batch)
    }

    fn training_context<'a>(
        &'a self,
        pass: &Pass<'a>,
        state: &'a MicroBatchState,
        parallel_ops: &'a dyn ParallelOps,
    ) -> ForwardContext<'a> {
        let MicroBatchState { part, cos, sin, dropout_key, router_rows, replayed, .. } = state;
        ForwardContext {
            dropout_key: Some(*dropout_key),
            router: RouterContext {
                settings: &self.router,
                rows: router_rows.as_ref(),
                totals: None,
                global_counts: Some(&pass.routers.global_counts),
                expert_counts_summed_over_layers: pass.routers.expert_counts_summed_over_layers.as_ref(),
                record: None,
                replayed: replayed.as_ref(),
                micro_idx: pass.chunk_pass.micro,
                noise_key: derive_key(*dropout_key, ROUTER_NOISE),
                most_tokens: state.most_rows,
            },
            ..self.context([cos, sin], &part.micro.seqs, &part.rows, parallel_ops)
        }
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
        context: &ForwardContext,
        auxiliary: &mut AuxiliarySums,
    ) -> Result<Tensor> {
        let _span = span("block", "backward");
        // The embedding's backward reads no weights.
        let weights = self.fetch(block_idx + 1, Some(block_idx).filter(|unit_idx| *unit_idx > 0))?;
        self.store.prepare_grads(block_idx + 1)?;
        let (x, outputs) = match kept {
            SavedActivation::Tape(x, tape) => return auxiliary.input_grad(block_idx, tape, (&x, dy), &context.router),
            SavedActivation::Input(x, outputs) => (x, outputs),
            SavedActivation::Offloaded(offloaded, outputs) => (offloaded.fetch()?, outputs),
        };
        let forward = || self.model.block(weights, &x, context);
        let tape = Tape::replay(outputs, &[&x], forward)?;
        auxiliary.input_grad(block_idx, tape, (&x, dy), &context.router)
    }

    /// Returns the loss of a micro-batch, and the gradient of the scaled loss with respect to the last layer's output.
    fn loss_and_grad(
        &self,
        x_td: &Tensor,
        pass: &Pass,
        state: &MicroBatchState,
        loss: &StepLoss,
        context: &ForwardContext,
        auxiliary: &mut AuxiliarySums,
    ) -> Result<(Tensor, Tensor)> {
        let _span = span("head", "forward and backward");
        let weights = self.store.fetch(self.head())?;
        self.store.prepare_grads(self.head())?;
        let tape = Tape::record(&[x_td], || self.model.final_norm(weights, x_td))?;
        let lm_head = self.model.lm_head(weights)?;
        let (part, mut value) = (&state.part, None);
        let mut dy = self.hidden_states_grad(tape.output(), context.parallel_ops, |normed_td| {
            let cross_entropy = |reduction, upstream| {
                let form = LossForm { reduction, label_smoothing: self.label_smoothing };
                self.cross_entropy(normed_td, &lm_head, &part.micro.targets, form, upstream)
            };
            let token_losses =
                || self.of_all_tokens(&cross_entropy(Reduction::None, LossGrad::NoGrad)?.loss, state.whole);
            let out = match loss.objective.loss(&TokenLosses::new(state.whole, &token_losses))? {
                MicroLoss::SumOfTokens => {
                    let out = cross_entropy(Reduction::Sum, loss.scale.upstream())?;
                    value = Some(out.loss.clone());
                    out
                }
                MicroLoss::Weighted { loss: of_micro, weights } => {
                    let rows = loss.scale.times_weights(&self.of_own_tokens(&weights, state.whole)?)?;
                    value = Some(self.counted_once(of_micro)?);
                    cross_entropy(Reduction::None, LossGrad::PerToken(&rows))?
                }
            };
            Ok(out.dx)
        })?;
        let mtp = MtpPass { head: weights, micro: state.whole, context, position: pass.micro_batch };
        if let Some(of_mtp) = self.mtp_backward(&mtp, tape.output(), auxiliary)? {
            dy = add(&dy, &of_mtp)?;
        }
        Ok((value.expect("the objective has a loss"), input_grad(tape, x_td, &dy, &[])?))
    }

    /// Returns the gradient of hidden states after a norm, [t/n, d]. `loss_grad` returns that of the output layer's
    /// input, [t, d].
    pub(super) fn hidden_states_grad(
        &self,
        normed: &Tensor,
        parallel_ops: &dyn ParallelOps,
        loss_grad: impl FnOnce(&Tensor) -> Result<Option<Tensor>>,
    ) -> Result<Tensor> {
        let tape = Tape::record(&[normed], || parallel_ops.copy_to_tp(normed))?;
        let dx = loss_grad(tape.output())?.expect("an upstream gradient was given");
        input_grad(tape, normed, &dx, &[])
    }
}
