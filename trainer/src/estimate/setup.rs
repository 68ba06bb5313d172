//! The settings of a plan that decide its memory.

use candle_core::DType;
use candlewick_model::{FsdpUnit, FsdpUnitKind, Model, ModelError, ParamSpec, RouterDtype, TiledMlp};
use candlewick_ops::{AttentionImpl, DeviceKind};
use candlewick_parallel::{OptimizerGroups, PipelineLayout, PipelineScheduleKind, max_shard_bytes, max_shard_numel};
use serde_json::{Value, json};

use super::Capacity;
use crate::checkpoint::CheckpointFormat;
use crate::plan::{CheckpointingMode, Fp8RecipePlan, Plan, RanksPlan, RouterPlan, TasksPlan, WeightInit, dtype};
use crate::recipe::FloatDtype;

/// The settings of a plan that the formulas read.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The units, with every parameter's shape.
    pub model: Model,
    /// The dtype of forward and backward.
    pub compute: FloatDtype,
    /// The dtype of master weights and gradients.
    pub masters: FloatDtype,
    /// The dtype of optimizer states.
    pub moments: FloatDtype,
    /// The optimizer of the trained parameters.
    pub optimizer: OptimizerGroups,
    /// Activation checkpointing and tiled MLPs, which trade time for memory.
    pub modes: Modes,
    /// The most tokens of a row.
    pub row_tokens: u64,
    /// Rows of a micro-batch.
    pub rows: u64,
    /// True if offloaded activations stay in the memory of the device that computes.
    pub offloads_to_ram: bool,
    /// The factor of the capacity to which experts are padded; `None` without padding.
    pub padded_capacity_factor: Option<f64>,
    /// The degrees of parallelism and the ZeRO stage.
    pub ranks: RanksPlan,
    /// The blocks of each pipeline stage.
    pub layout: PipelineLayout,
    /// The pipeline schedule.
    pub schedule: PipelineScheduleKind,
    /// Micro-batches of a step that a pipeline stage computes.
    pub n_micros: usize,
    /// The pipeline stage to estimate.
    pub stage: usize,
    /// The fraction of the parameters whose master weights and optimizer states are offloaded to a GPU's host.
    pub optimizer_on_host: f64,
    /// True if the weights are offloaded to the host, too.
    pub weights_on_host: bool,
    /// The kind of device that computes.
    pub compute_device: DeviceKind,
    /// The total memory of the GPU in bytes; `None` if unknown.
    pub gpu_bytes: Option<u64>,
    /// The attention implementation.
    pub attention: AttentionImpl,
    /// True if weights that multiply in FP8 are gathered as codes.
    pub fp8_param_gather: bool,
    /// The recipe of FP8; `None` without FP8.
    pub fp8_recipe: Option<Fp8RecipePlan>,
    /// True if linear layers round operands to FP8 and multiply in the compute dtype.
    pub fake_quantize: bool,
    /// The dtype of the routers' matmuls.
    pub router: RouterDtype,
    /// The source of the initial weights.
    pub init: WeightInit,
    /// True if the run evaluates the loss.
    pub evaluates: bool,
    /// The batches of task evaluation; `None` without tasks.
    pub eval_load: Option<EvalLoad>,
    /// The checkpoints that the run writes.
    pub saves: Vec<CheckpointFormat>,
    /// True if a checkpoint is written asynchronously, from a copy.
    pub copies_to_save: bool,
}

/// Activation checkpointing and tiled MLPs, which trade time for memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Modes {
    /// The activations that blocks save for backward.
    pub activations: CheckpointingMode,
    /// True if MLPs are computed in tiles of tokens.
    pub tiled_mlp: bool,
}

/// Batches of the tasks evaluated during training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvalLoad {
    /// True if a task generates text.
    pub generates: bool,
    /// Sequences of a forward; `None` chooses by tokens.
    pub batch_size: Option<usize>,
    /// Tokens of context; `None` takes the model's.
    pub max_length: Option<usize>,
}

/// The reason why a plan cannot be estimated. Completes "failed to ...".
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// The model's config is on the Hub only.
    #[error("estimate the memory: the model's config is not downloaded")]
    NoConfig,
    /// The config does not describe a supported model.
    #[error(transparent)]
    Model(#[from] ModelError),
}

impl Setup {
    /// Extracts the settings of a plan for a device of known capacity.
    pub fn on(plan: &Plan, capacity: &Capacity) -> Result<Self, SetupError> {
        Ok(Self { gpu_bytes: capacity.gpu_bytes, ..Self::of(plan, capacity.compute_device)? })
    }

    /// Extracts the settings of a plan for a kind of device whose memory is unknown.
    pub fn of(plan: &Plan, compute_device: DeviceKind) -> Result<Self, SetupError> {
        let config = plan.model.config.clone().ok_or(SetupError::NoConfig)?;
        Ok(Self {
            layout: plan.pipeline.layout(&config),
            schedule: plan.pipeline.schedule_kind(),
            n_micros: plan.data.gradient_accumulation_steps,
            stage: 0,
            model: plan.build_model(config)?,
            compute: plan.model.dtype,
            masters: plan.optimizer.masters,
            moments: plan.optimizer.moments,
            optimizer: plan.optimizer.groups(),
            modes: Modes::of(plan),
            row_tokens: plan.data.max_length as u64,
            rows: plan.data.micro_batch_size as u64,
            offloads_to_ram: compute_device == DeviceKind::Cpu && plan.model.offloads_to_ram,
            padded_capacity_factor: plan.moe.as_ref().and_then(RouterPlan::padded_capacity_factor),
            ranks: plan.ranks,
            optimizer_on_host: if compute_device == DeviceKind::Gpu { plan.optimizer_on_host } else { 0.0 },
            weights_on_host: compute_device == DeviceKind::Gpu && plan.weights_on_host,
            compute_device,
            gpu_bytes: None,
            attention: plan.model.attention.implementation,
            fp8_param_gather: plan.fp8.as_ref().is_some_and(|fp8| fp8.param_gather),
            fp8_recipe: plan.fp8.as_ref().map(|fp8| fp8.recipe),
            fake_quantize: plan.fp8.as_ref().is_some_and(|fp8| fp8.fake_quantize),
            router: plan.moe.as_ref().map(|moe| moe.dtype.into()).unwrap_or_default(),
            init: plan.model.init,
            evaluates: plan.eval.is_some(),
            eval_load: plan.tasks.as_ref().map(EvalLoad::of),
            saves: plan.checkpoints.iter().map(|checkpoint| checkpoint.format).collect(),
            copies_to_save: plan.checkpoints.iter().any(|checkpoint| checkpoint.async_save),
        })
    }

    /// Returns the dtype of the residual stream.
    pub(super) fn residual(&self) -> DType {
        self.model.residual_dtype(dtype(self.compute))
    }

    /// Returns the dtype of base weights' gradients; `None` if an adapter is trained and they are frozen.
    pub(super) fn base_grad(&self) -> Option<DType> {
        self.model.lora().is_none().then(|| dtype(self.masters))
    }

    /// Returns the largest number of tokens that one rank computes of a micro-batch.
    pub fn n_micro_batch_tokens(&self) -> u64 {
        (self.row_tokens * self.rows).div_ceil(self.ranks.n_of_micro_batch() as u64)
    }

    /// Returns a rank's tokens outside of attention and MLP: sequence parallelism shards them over tensor-parallel
    /// ranks.
    pub(super) fn n_residual_tokens(&self) -> u64 {
        self.n_micro_batch_tokens().div_ceil(if self.ranks.sequence_parallel { self.ranks.tensor as u64 } else { 1 })
    }

    /// Returns the units whose parameters this stage holds: its own, and those tied to its head.
    pub(super) fn units(&self) -> impl Iterator<Item = &FsdpUnit> {
        let units = self.model.units();
        let is_tied_to_head = |unit_idx| units[units.len() - 1].tied.iter().any(|tied| tied.owner == unit_idx);
        let is_here = move |unit_idx: &usize| {
            self.layout.stage_of(*unit_idx) == self.stage || (self.has_head() && is_tied_to_head(*unit_idx))
        };
        (0..units.len()).filter(is_here).map(|unit_idx| &units[unit_idx])
    }

    /// Returns the head and the units that it ties, if this stage has them.
    pub(super) fn head_units(&self) -> impl Iterator<Item = &FsdpUnit> {
        let units = self.model.units();
        let head = units.last().filter(|_| self.has_head());
        head.into_iter().flat_map(|head| head.tied.iter().map(|tied| &units[tied.owner]).chain([head]))
    }

    /// Returns the MTP layers, if this stage has them.
    pub(super) fn mtp_units(&self) -> impl Iterator<Item = &FsdpUnit> {
        self.units().filter(|unit| matches!(unit.kind, FsdpUnitKind::Mtp(_)))
    }

    /// Returns true if this stage computes the loss.
    pub(super) fn has_head(&self) -> bool {
        self.stage + 1 == self.layout.n_stages()
    }

    /// Returns the bytes of a parameter's largest tensor- or expert-parallel shard, before ZeRO shards it.
    pub(super) fn weight_bytes(&self, param: &ParamSpec) -> u64 {
        let dense = self.numel_here(param) * self.compute.n_bytes();
        max_shard_bytes(param, self.ranks.split_sizes(), dtype(self.compute)).map_or(dense, |bytes| bytes as u64)
    }

    /// Returns the elements of a parameter's largest tensor- or expert-parallel shard, before ZeRO shards it.
    pub(super) fn numel_here(&self, param: &ParamSpec) -> u64 {
        // The plan refuses shapes that cannot be sharded.
        max_shard_numel(param, self.ranks.split_sizes()).unwrap_or_else(|_| param.numel()) as u64
    }
}

impl Modes {
    /// Returns the modes of a plan.
    pub fn of(plan: &Plan) -> Self {
        Self { activations: plan.model.activations, tiled_mlp: plan.model.tiled_mlp }
    }

    /// Returns the setting of tiled MLPs.
    pub(super) fn tiled_mlp(self) -> TiledMlp {
        if self.tiled_mlp { TiledMlp::On } else { TiledMlp::Off }
    }

    /// Returns the recipe keys and values that switch these modes on.
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
