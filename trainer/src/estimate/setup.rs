//! What of a plan decides its memory.

use candle_core::DType;
use candlewick_model::{FsdpUnit, Model, ModelError, ParamSpec, TiledMlp};
use candlewick_ops::AttentionImpl;
use candlewick_parallel::{PipelineLayout, PipelineScheduleKind, max_shard_bytes, max_shard_numel};
use serde_json::{Value, json};

use super::Capacity;
use super::compute_device::ComputeDevice;
use crate::checkpoint::Kind;
use crate::plan::{Activations, ComputeDtype, Init, Plan, RanksPlan, TasksPlan, dtype};

/// The part of a plan that the formulas read.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The units with every parameter's shape.
    pub model: Model,
    /// The number format of forward and backward.
    pub compute: ComputeDtype,
    /// Of master weights and gradients.
    pub masters: ComputeDtype,
    /// Of AdamW's moments.
    pub moments: ComputeDtype,
    /// What trades time for memory.
    pub modes: Modes,
    /// The most tokens of a row.
    pub row_tokens: u64,
    /// Rows of a micro-batch.
    pub rows: u64,
    /// Whether inputs that are parked stay in the memory that computes.
    pub offloads_to_ram: bool,
    /// How the ranks share what they have in common.
    pub ranks: RanksPlan,
    /// Which stage of a pipeline has which blocks.
    pub layout: PipelineLayout,
    /// The order in which stages compute.
    pub schedule: PipelineScheduleKind,
    /// Micro-batches of a step that a stage computes.
    pub n_micros: usize,
    /// The stage that is looked at.
    pub stage: usize,
    /// The share of the parameters whose masters and moments are in the RAM of a GPU's host.
    pub optimizer_on_host: f64,
    /// Whether the weights are there, too.
    pub weights_on_host: bool,
    /// What computes.
    pub compute_device: ComputeDevice,
    /// All the memory of the GPU that computes, if it is known.
    pub gpu_bytes: Option<u64>,
    /// What computes attention.
    pub attention: AttentionImpl,
    /// Where the weights come from.
    pub init: Init,
    /// Whether there is evaluation.
    pub evaluates: bool,
    /// The load of tasks, if there are some.
    pub eval_load: Option<EvalLoad>,
    /// What is saved.
    pub saves: Vec<Kind>,
    /// Whether a save is written from a copy while training goes on.
    pub copies_to_save: bool,
}

/// What trades time for memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Modes {
    /// What blocks keep for backward.
    pub activations: Activations,
    /// Whether MLPs are computed in tiles.
    pub tiled_mlp: bool,
}

/// Batches of the tasks evaluated during training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvalLoad {
    /// True if one of them generates text.
    pub generates: bool,
    /// Sequences of a forward, if the number is set.
    pub batch_size: Option<usize>,
    /// Tokens of context, if the number is set.
    pub max_length: Option<usize>,
}

/// Why nothing can be said about a plan. Completes "failed to ...".
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// The model's config is on the Hub only.
    #[error("estimate the memory: the model's config is not known")]
    NoConfig,
    /// The config makes no model.
    #[error(transparent)]
    Model(#[from] ModelError),
}

impl Setup {
    /// Takes what matters from a plan that runs on a device.
    pub fn on(plan: &Plan, capacity: &Capacity) -> Result<Self, SetupError> {
        Ok(Self { gpu_bytes: capacity.gpu_bytes, ..Self::of(plan, capacity.compute_device)? })
    }

    /// Takes what matters from a plan that runs on a device of which nothing is known.
    pub fn of(plan: &Plan, compute_device: ComputeDevice) -> Result<Self, SetupError> {
        let config = plan.model.config.clone().ok_or(SetupError::NoConfig)?;
        Ok(Self {
            layout: plan.pipeline.layout(&config),
            schedule: plan.pipeline.order(),
            n_micros: plan.data.gradient_accumulation_steps,
            stage: 0,
            model: Model::new(config, plan.model.adapter.clone())?,
            compute: plan.model.dtype,
            masters: plan.optimizer.masters,
            moments: plan.optimizer.moments,
            modes: Modes::of(plan),
            row_tokens: plan.data.max_length as u64,
            rows: plan.data.micro_batch_size as u64,
            offloads_to_ram: compute_device == ComputeDevice::Cpu && plan.model.offloads_to_ram,
            ranks: plan.ranks,
            optimizer_on_host: if compute_device == ComputeDevice::Gpu { plan.optimizer_on_host } else { 0.0 },
            weights_on_host: compute_device == ComputeDevice::Gpu && plan.weights_on_host,
            compute_device,
            gpu_bytes: None,
            attention: plan.model.attention.implementation,
            init: plan.model.init,
            evaluates: plan.eval.is_some(),
            eval_load: plan.tasks.as_ref().map(EvalLoad::of),
            saves: plan.checkpoints.iter().map(|checkpoint| checkpoint.kind).collect(),
            copies_to_save: plan.checkpoints.iter().any(|checkpoint| checkpoint.async_save),
        })
    }

    /// Returns the dtype of base weights' gradients; `None` if an adapter is trained and they are frozen.
    pub(super) fn base_grad(&self) -> Option<DType> {
        self.model.lora().is_none().then(|| dtype(self.masters))
    }

    /// The most tokens of a micro-batch that a rank computes.
    pub fn tokens(&self) -> u64 {
        (self.row_tokens * self.rows).div_ceil(self.ranks.n_of_micro_batch() as u64)
    }

    /// How many of them it has outside of branches, if it shares matrices with others.
    pub(super) fn tokens_outside(&self) -> u64 {
        self.tokens().div_ceil(if self.ranks.sequence_parallel { self.ranks.tensor as u64 } else { 1 })
    }

    /// The units of which this stage has the parameters: its own, and those that its head borrows.
    pub(super) fn units(&self) -> impl Iterator<Item = &FsdpUnit> {
        let units = self.model.units();
        let borrowed = |unit_idx| units[units.len() - 1].tied.iter().any(|tied| tied.owner == unit_idx);
        let is_here = move |unit_idx: &usize| {
            self.layout.stage_of(*unit_idx) == self.stage || (self.has_head() && borrowed(*unit_idx))
        };
        (0..units.len()).filter(is_here).map(|unit_idx| &units[unit_idx])
    }

    /// Whether this stage computes the losses.
    pub(super) fn has_head(&self) -> bool {
        self.stage + 1 == self.layout.n_stages()
    }

    /// Returns the bytes of a parameter's weights on a rank: the most that any has.
    pub(super) fn weight_bytes(&self, param: &ParamSpec) -> u64 {
        let dense = self.kept(param) * self.compute.n_bytes();
        max_shard_bytes(param, self.ranks.tensor, dtype(self.compute)).map_or(dense, |bytes| bytes as u64)
    }

    /// The number of elements that a rank keeps of a parameter: the most that any does.
    pub(super) fn kept(&self, param: &ParamSpec) -> u64 {
        // The plan has refused what cannot be shared out.
        max_shard_numel(param, self.ranks.tensor).unwrap_or_else(|_| param.numel()) as u64
    }
}

impl Modes {
    /// The modes of a plan.
    pub fn of(plan: &Plan) -> Self {
        Self { activations: plan.model.activations, tiled_mlp: plan.model.tiled_mlp }
    }

    /// Returns the tokens of an MLP at a time.
    pub(super) fn tiled_mlp(self) -> TiledMlp {
        if self.tiled_mlp { TiledMlp::On } else { TiledMlp::Off }
    }

    /// The recipe's keys and values that switch these modes on.
    pub fn keys(self) -> Vec<(&'static str, Value)> {
        let activations = ("model.activation_checkpoint", json!(self.activations.to_recipe()));
        let tiled_mlp = self.tiled_mlp.then_some(("tiled_mlp_compute", json!(true)));
        [activations].into_iter().chain(tiled_mlp).collect()
    }
}

impl EvalLoad {
    pub(super) fn of(tasks: &TasksPlan) -> Self {
        Self { generates: tasks.generates, batch_size: tasks.batch_size, max_length: tasks.max_length }
    }
}
