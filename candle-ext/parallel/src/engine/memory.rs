//! Activation memory estimate of training and evaluation steps.

use candle_core::DType;
use candlewick_model::LayerCost;
use candlewick_ops::{CrossEntropyCost, GemmSize};

use super::ActivationCheckpointing;
use crate::offload::MAX_PREFETCHED_BYTES;
use crate::pipeline::{PipelineLayout, PipelineSchedule, PipelineScheduleKind, StageStep};

/// Sizes of a training step on one rank, from which activation memory is estimated.
#[derive(Clone, Debug)]
pub struct StepCost<'a> {
    /// All layers of the model, at least one.
    pub layers: Vec<LayerCost<'a>>,
    /// Decoder layers of the MTP layers.
    pub mtp_layers: Vec<LayerCost<'a>>,
    /// Output layer and loss.
    pub head: HeadCost,
    /// Activation checkpointing of each layer.
    pub checkpointing: Vec<ActivationCheckpointing>,
    /// Memory of offloaded activations.
    pub offload_memory: OffloadMemory,
    /// Layers of each pipeline stage.
    pub layout: &'a PipelineLayout,
    /// Pipeline schedule.
    pub schedule: PipelineScheduleKind,
    /// Index of the pipeline stage.
    pub stage: usize,
    /// Micro-batches of a step.
    pub n_micros: usize,
}

/// Memory that holds offloaded activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadMemory {
    /// Memory of the computing device.
    Device,
    /// Host memory of a GPU. A layer's input is copied back during the backward of the layer after it.
    Host,
    /// Files.
    Files,
}

/// Sizes of final norm, output layer and loss on one rank.
#[derive(Clone, Copy, Debug)]
pub struct HeadCost {
    /// Tensor parallel size.
    pub n_slices: usize,
    /// Tokens of the residual stream on this rank.
    pub n_residual_tokens: u64,
    /// Dtype of the residual stream.
    pub residual: DType,
    /// Output layer and loss.
    pub loss: CrossEntropyCost,
}

/// Activation bytes at the peak, by category.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepBytes {
    /// Activations saved between the forward and the backward of their layers.
    pub activations: u64,
    /// Activations and scratch of the running layer.
    pub layer: u64,
    /// Activations and scratch of output layer and loss.
    pub logits: u64,
}

/// Bytes of one model chunk.
struct ChunkBytes {
    /// Bytes saved between forward and backward.
    saved: u64,
    /// Peak of the chunk: the loss, or the backward of a layer.
    worst: StepBytes,
}

impl StepBytes {
    /// Returns the sum of all categories.
    pub fn total(&self) -> u64 {
        self.activations + self.layer + self.logits
    }

    fn worst(moments: impl IntoIterator<Item = Self>) -> Self {
        moments.into_iter().max_by_key(Self::total).unwrap_or_default()
    }
}

impl StepCost<'_> {
    /// Returns the peak of [`Engine::forward_backward`](super::Engine::forward_backward): the running model chunk plus
    /// all saved activations.
    pub fn training(&self) -> StepBytes {
        let chunks: Vec<_> = (0..self.layout.n_chunks()).map(|chunk| self.chunk(chunk)).collect();
        let (table, mut saved) = (self.pipeline_schedule(), 0);
        let moments = table.stage_steps(self.stage).map(|step| {
            let (StageStep::Forward(pass) | StageStep::Backward(pass)) = step;
            let ChunkBytes { saved: of_chunk, worst } = &chunks[pass.chunk];
            let others = match step {
                StageStep::Forward(_) => saved,
                StageStep::Backward(_) => saved - of_chunk,
            };
            saved = if matches!(step, StageStep::Forward(_)) { saved + of_chunk } else { others };
            StepBytes { activations: worst.activations + others, ..*worst }
        });
        StepBytes::worst(moments)
    }

    /// Returns the peak of an evaluation: one forward without autograd, then the losses.
    pub fn evaluation(&self) -> StepBytes {
        let layer = self.layers.iter().map(|layer| layer.in_evaluation().forward_bytes()).max().unwrap_or(0);
        let logits = if self.has_head() { self.head.forward_bytes() } else { 0 };
        let activations = self.layers[0].activation_bytes() + self.layers[0].rope_bytes();
        if layer > logits {
            StepBytes { activations, layer, logits: 0 }
        } else {
            StepBytes { activations, layer: 0, logits }
        }
    }

    /// Returns the peak bytes of offloaded activations. With several model chunks each counts as the largest.
    pub fn offloaded_bytes(&self) -> u64 {
        let is_here = |layer_idx: usize| self.layout.stage_of(layer_idx + 1) == self.stage;
        let offloaded = self
            .checkpointing
            .iter()
            .enumerate()
            .filter(|(_, checkpointing)| **checkpointing == ActivationCheckpointing::Offload);
        let n_layers = offloaded.filter(|(layer_idx, _)| is_here(*layer_idx)).count() as u64;
        let n_in_flight = self.pipeline_schedule().max_in_flight(self.stage).div_ceil(self.layout.n_chunks()) as u64;
        n_layers * n_in_flight * self.layers[0].activation_bytes()
    }

    fn pipeline_schedule(&self) -> PipelineSchedule {
        PipelineSchedule::new(self.schedule, self.layout.n_stages(), self.layout.n_chunks(), self.n_micros)
    }

    /// Returns true if the stage computes losses.
    fn has_head(&self) -> bool {
        self.stage + 1 == self.layout.n_stages()
    }

    /// Mirrors `forward_chunk` and `backward_chunk`. The input stays to the end: it is the first layer's.
    fn chunk(&self, chunk: usize) -> ChunkBytes {
        let run = self.layout.blocks(self.stage, chunk);
        let input = self.layers[0].activation_bytes();
        let mut saved = input + self.layers[0].rope_bytes();
        let mut moments = Vec::new();
        for layer_idx in run.clone() {
            // The output at the end of a saved tape is the next layer's input.
            let is_saved = layer_idx == run.start || self.checkpointing[layer_idx - 1] == ActivationCheckpointing::None;
            let of_layer = self.layer(layer_idx, if is_saved { 0 } else { input }, &mut saved);
            let prefetched = if layer_idx == run.start { 0 } else { self.prefetched_bytes(layer_idx - 1) };
            moments.extend(of_layer.into_iter().map(|moment| StepBytes { layer: moment.layer + prefetched, ..moment }));
        }
        if self.layout.is_last(self.stage, chunk) {
            let has_output = run.last().is_some_and(|last| self.checkpointing[last] == ActivationCheckpointing::None);
            let layer = if has_output { 0 } else { input };
            moments.push(StepBytes { activations: saved, layer, logits: self.head.backward_bytes() });
            moments.extend(self.mtp(saved + layer));
        }
        ChunkBytes { saved, worst: StepBytes::worst(moments) }
    }

    /// Returns the bytes of a layer's offloaded input that is on the device during the backward of the next layer.
    fn prefetched_bytes(&self, layer_idx: usize) -> u64 {
        let is_offloaded = self.checkpointing[layer_idx] == ActivationCheckpointing::Offload;
        let bytes = self.layers[layer_idx].activation_bytes();
        match self.offload_memory {
            OffloadMemory::Host if is_offloaded && bytes <= MAX_PREFETCHED_BYTES => bytes,
            OffloadMemory::Host | OffloadMemory::Device | OffloadMemory::Files => 0,
        }
    }

    /// Mirrors `mtp_backward`: forward and loss of each MTP layer, then backward of each. `saved` includes the last
    /// layer's output.
    fn mtp(&self, saved: u64) -> Vec<StepBytes> {
        let (residual, hidden) = (self.head.residual_bytes(), self.head.hidden_bytes());
        // The final norm's output and its gradient.
        let mut saved = saved + 2 * hidden;
        let mut moments = Vec::new();
        for cost in &self.mtp_layers {
            // The embedding, both inputs of the projection, its output, and the output of the norm.
            saved += 2 * residual + 3 * hidden;
            let with_layer = saved + cost.saved_bytes();
            moments.push(StepBytes { activations: with_layer, layer: 0, logits: self.head.loss_bytes() });
            // The gradients of the layer's output and of the norm's output.
            moments.push(StepBytes { activations: saved, layer: residual + hidden + cost.backward_bytes(), logits: 0 });
            saved = with_layer + hidden;
        }
        moments
    }

    /// Mirrors `forward_block` and `backward_block`. Adds to `saved` the bytes that the layer saves.
    fn layer(&self, layer_idx: usize, unsaved_input: u64, saved: &mut u64) -> Vec<StepBytes> {
        let cost = &self.layers[layer_idx];
        let input = cost.activation_bytes();
        // A recomputed layer is recorded next to the gradient of its output, which has the size of an input.
        let replay = input + cost.backward_bytes().max(cost.recorded_forward_bytes());
        let moment = |activations: u64, layer: u64| StepBytes { activations, layer, logits: 0 };
        if self.checkpointing[layer_idx] == ActivationCheckpointing::Offload {
            // The input is in memory while the layer computes.
            let moments = vec![moment(*saved, input + cost.forward_bytes().max(replay))];
            *saved += cost.always_saved_bytes() + if self.offload_memory == OffloadMemory::Device { input } else { 0 };
            return moments;
        }
        *saved += unsaved_input;
        let backward = moment(*saved, replay);
        match self.checkpointing[layer_idx] {
            ActivationCheckpointing::None => {
                let moments =
                    vec![moment(*saved, input + cost.backward_bytes()), moment(*saved, cost.recorded_forward_bytes())];
                *saved += cost.saved_bytes();
                return moments;
            }
            ActivationCheckpointing::Selective => *saved += cost.selective_bytes() + cost.always_saved_bytes(),
            ActivationCheckpointing::Full | ActivationCheckpointing::Offload => *saved += cost.always_saved_bytes(),
        }
        vec![backward, moment(*saved, cost.forward_bytes())]
    }
}

impl HeadCost {
    /// Returns the bytes of a loss without backward, with the final norm's output.
    pub fn forward_bytes(&self) -> u64 {
        self.normed_bytes() + self.loss.forward().scratch_bytes
    }

    /// Returns the bytes of `loss_and_grad`. The final norm's output and its gradient stay while logits exist.
    pub fn backward_bytes(&self) -> u64 {
        // The gradient of the norm's input is allocated after the logits are freed.
        self.hidden_bytes() + self.loss_bytes().max(self.normed_bytes() + self.residual_bytes())
    }

    /// Returns the bytes of output layer and loss with their backward: gradient of the input, logits, and the exchanged
    /// input under tensor parallelism.
    fn loss_bytes(&self) -> u64 {
        let exchanged = if self.n_slices > 1 { self.normed_bytes() } else { 0 };
        self.normed_bytes() + self.loss.forward_backward().scratch_bytes + exchanged
    }

    /// Returns the bytes of this rank's residual stream.
    fn residual_bytes(&self) -> u64 {
        self.n_residual_tokens * self.loss.n_in * self.residual.size_in_bytes() as u64
    }

    /// Returns the bytes of this rank's hidden states after a norm.
    fn hidden_bytes(&self) -> u64 {
        self.n_residual_tokens * self.token_bytes()
    }

    /// Returns the GEMM sizes of one chunk of logits.
    pub fn matmuls(&self) -> [GemmSize; 2] {
        let (n, v, d) = (self.loss.rows_per_chunk(), self.loss.n_vocab, self.loss.n_in);
        [GemmSize { m: n, n: v, k: d }, GemmSize { m: n, n: d, k: v }]
    }

    fn token_bytes(&self) -> u64 {
        self.loss.n_in * self.loss.dtype.size_in_bytes() as u64
    }

    fn normed_bytes(&self) -> u64 {
        self.loss.n_tokens * self.token_bytes()
    }
}
