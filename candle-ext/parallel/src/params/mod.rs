//! Parameters and their training state: layout, sharded buffers, gradient reduction, optimizer.
//!
//! A unit's parameters form groups (dense or expert, frozen or trainable, gathered in FP8 or not), each with its own process
//! groups and one flat buffer. Frozen buffers are in the compute dtype or quantized. Trainable groups have master weights, gradients
//! and optimizer states, and a copy in the compute dtype if that differs. Ops read zero-copy views. Master weights and
//! optimizer states may be in CPU memory.

mod buffer_state;
mod buffers;
mod bytes;
mod fp8_gather;
mod grads;
mod layout;
mod micro_batch;
mod offload;
mod optimizer;
mod options;
mod reducer;
mod sharding;
mod state;
mod whole_matrices;

use std::iter::once;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, bail};
use candlewick_model::{FsdpUnit, Model, ParamSpec, UnitWeights};
use candlewick_ops::{Fp8Guard, Fp8Layers, GradScaler, WeightStorage, copy_into, dequantize, quantize};

pub use buffer_state::BufferState;
pub use bytes::StoreBytes;
pub use micro_batch::MicroBatch;
pub use offload::CpuOffload;
pub use options::{MasterRounding, ParamDtypes, StoreMode, StoreOptions};
pub use sharding::{ShardingGroups, ZeroStage};
pub use state::ParamState;
pub use whole_matrices::whole_matrix_shard_len;

pub(crate) use sharding::{GroupRanks, Stages};

use buffers::{GroupWeights, ShardedBuffers};
use layout::ParamLayout;
use optimizer::{ShardedOptimizer, Update};
use reducer::GradReducer;

/// This rank's shards of parameters and training state.
///
/// Methods marked "Collective" must be called by all ranks of the [`ShardingGroups`], in the same order.
pub struct ParamStore {
    layout: ParamLayout,
    buffers: ShardedBuffers,
    /// Weights of this stage's units, as views of the buffers.
    layers: Vec<Option<UnitWeights>>,
    reducer: GradReducer,
    optimizer: ShardedOptimizer,
    options: StoreOptions,
    device: Device,
    /// Linear layers that multiply in FP8, of all stages.
    fp8: Option<Arc<Fp8Layers>>,
}

impl ParamStore {
    /// Allocates zero-filled buffers for `model`. Call [`ParamStore::fill`] to set the weights.
    pub fn new(
        model: &Model,
        dtypes: ParamDtypes,
        mode: StoreMode,
        device: &Device,
        sharding: ShardingGroups,
    ) -> Result<Self> {
        Self::of_units(model.units(), StoreOptions::new(dtypes, mode), device, sharding)
    }

    /// Allocates zero-filled buffers for `units`, some of them in CPU memory.
    pub fn of_units(
        units: &[FsdpUnit],
        options: StoreOptions,
        device: &Device,
        sharding: ShardingGroups,
    ) -> Result<Self> {
        Self::sharing(units, options, device, sharding, None)
    }

    /// Allocates buffers like [`ParamStore::of_units`]. Frozen groups of `base` with the same parameters are shared: they have
    /// the values of `base`, and [`ParamStore::fill`] does not set them.
    pub fn sharing(
        units: &[FsdpUnit],
        options: StoreOptions,
        device: &Device,
        sharding: ShardingGroups,
        base: Option<&Self>,
    ) -> Result<Self> {
        let StoreOptions { dtypes, mode, cpu_offload, fp8_param_gather, .. } = options;
        if fp8_param_gather && sharding.zero_stage != ZeroStage::Three {
            bail!("fp8_param_gather needs weights that ZeRO stage 3 shards")
        }
        if cpu_offload.weights && mode == StoreMode::Train && cpu_offload.optimizer < 1.0 {
            bail!("weights in the host's memory while the optimizer updates them elsewhere")
        }
        if mode == StoreMode::Train {
            let trainable = units.iter().flat_map(|unit| &unit.params).filter(|spec| spec.trainable);
            options.optimizer.check_kinds(trainable).map_err(candle_core::Error::wrap)?;
        }
        let layout = ParamLayout::new(units, &options, sharding)?;
        let reducer = GradReducer::new(&layout, dtypes.masters, device)?;
        let base = base.map(|base| (&base.layout, &base.buffers));
        let buffers = ShardedBuffers::new(&layout, &reducer, dtypes.compute, device, base)?;
        let optimizer = ShardedOptimizer::new(&layout, &buffers, (&options.optimizer, dtypes), device)?;
        let layers = layers(&layout, &buffers)?;
        Ok(Self { layout, buffers, layers, reducer, optimizer, options, device: device.clone(), fp8: None })
    }

    /// Makes the linear layers of `fp8` multiply in FP8 while that is enabled. Layers of other stages may be among them.
    pub fn with_fp8(mut self, fp8: Fp8Layers) -> Result<Self> {
        let fp8 = Arc::new(fp8);
        self.buffers.attach_fp8(&fp8, &self.layout);
        self.buffers.attach_fp8_gathers(&self.layout, &fp8)?;
        self.layers = layers(&self.layout, &self.buffers)?;
        Ok(Self { fp8: Some(fp8), ..self })
    }

    /// Sends gradients in `reduce_dtype` to the ranks that sum them. Partial sums may be rounded to it. Gradients that tensor
    /// parallel ranks or tied pipeline stages sum stay in the dtype of gradients.
    #[must_use]
    pub fn with_reduce_dtype(self, reduce_dtype: DType) -> Self {
        Self { reducer: self.reducer.with_reduce_dtype(reduce_dtype), ..self }
    }

    /// Returns the linear layers that multiply in FP8.
    pub fn fp8(&self) -> Option<&Fp8Layers> {
        self.fp8.as_deref()
    }

    /// Turns FP8 on for a step, until the guard is dropped, and sets the scales of the weights that are gathered as FP8 codes.
    /// `key` seeds stochastic rounding. Collective.
    pub(crate) fn enable_fp8(&self, key: u64) -> Result<Option<Fp8Guard<'_>>> {
        let Some(fp8) = self.fp8() else { return Ok(None) };
        let guard = fp8.enable(key)?;
        self.buffers.start_fp8_step(fp8, &*self.layout.sharding.dense.shard)?;
        Ok(Some(guard))
    }

    /// Drops the FP8 copies of all weights, whose scales have changed.
    pub(crate) fn drop_fp8_copies(&self) {
        self.buffers.drop_fp8_copies();
    }

    /// Returns the current bytes on the device, by category.
    pub fn device_bytes(&self) -> StoreBytes {
        let weights = self.buffers.device_bytes(&self.device);
        weights.plus(self.reducer.device_bytes()).plus(self.optimizer.device_bytes(&self.device))
    }

    /// Returns the compute dtype.
    pub fn compute_dtype(&self) -> DType {
        self.options.dtypes.compute
    }

    /// Sets all parameters of this stage. `source` returns a whole parameter in any floating-point dtype. Collective.
    pub fn fill<E: From<candle_core::Error>>(
        &self,
        mut source: impl FnMut(&ParamSpec) -> std::result::Result<Tensor, E>,
    ) -> std::result::Result<(), E> {
        for (unit_idx, unit) in self.layout.units.iter().enumerate().filter(|(idx, _)| self.layout.has(*idx)) {
            let is_own = |spec: &&ParamSpec| !self.buffers.is_shared(self.layout.find(unit_idx, &spec.name).0);
            for spec in unit.params.iter().filter(is_own) {
                self.set(unit_idx, spec, &source(spec)?)?;
            }
        }
        Ok(self.refresh()?)
    }

    /// Sets this rank's shard from the whole parameter. Trainable ones need [`ParamStore::refresh`] before ops read
    /// them.
    fn set(&self, unit_idx: usize, spec: &ParamSpec, whole: &Tensor) -> Result<()> {
        let (group_idx, group, param) = self.layout.find(unit_idx, &spec.name);
        let (target, elements) = match self.optimizer.shard(group_idx) {
            Some(shard) => (shard.master.clone(), group.shard.clone()),
            None => self.frozen_elements(group_idx)?,
        };
        let Some(piece) = param.piece(&elements) else { return Ok(()) };
        let value = param.placement.cut(&whole.reshape(spec.shape.as_slice())?)?;
        let value = match spec.storage {
            WeightStorage::Dense | WeightStorage::F32 => value.flatten_all()?,
            WeightStorage::Quantized(format) => quantize(&value, format)?,
        };
        let value = value.narrow(0, piece.start - param.range.start, piece.len())?;
        let target = target.narrow(0, piece.start - elements.start, piece.len())?;
        copy_into(&target, &value.to_device(target.device())?)
    }

    /// Returns the elements of a frozen group on this rank, and their range in the group's buffer.
    fn frozen_elements(&self, group_idx: usize) -> Result<(Tensor, Range<usize>)> {
        let (group, weights) = (&self.layout.groups[group_idx], self.buffers.group_weights(group_idx));
        match weights.is_resident() {
            true => Ok((weights.whole()?, 0..group.numel)),
            false => Ok((weights.own.clone(), group.shard.clone())),
        }
    }

    /// Returns the weights that a unit reads, all-gathered if they are sharded. Collective.
    pub fn fetch(&self, unit_idx: usize) -> Result<&UnitWeights> {
        self.buffers_to_read(unit_idx).try_for_each(GroupWeights::unshard)?;
        match &self.layers[unit_idx] {
            Some(layer) => Ok(layer),
            None => bail!("{} is with another stage", self.layout.units[unit_idx].name),
        }
    }

    /// Starts the all-gather of the weights that a unit reads; no-op if another stage has the unit. Collective.
    pub fn prefetch(&self, unit_idx: usize) -> Result<()> {
        self.buffers_to_read(unit_idx).try_for_each(GroupWeights::prefetch)
    }

    /// Frees the unsharded weights of a unit and of those that it ties (FSDP's reshard).
    pub fn release(&self, unit_idx: usize) {
        let groups = self.layout.groups_with_borrowed(unit_idx);
        groups.for_each(|group_idx| self.buffers.group_weights(group_idx).reshard());
    }

    /// Allocates the gradients that a unit's backward accumulates into.
    pub fn prepare_grads(&self, unit_idx: usize) -> Result<()> {
        let groups = self.layout.groups_with_borrowed(unit_idx);
        let mut of_unit = groups.filter_map(|group_idx| self.reducer.group_grads(group_idx));
        of_unit.try_for_each(|grads| grads.prepare())
    }

    /// Starts the gradient reduction of a unit and of the parameters that it ties. Collective.
    ///
    /// Gradients that accumulate in place are reduced after the last micro-batch.
    pub fn start_grad_reduction(&self, unit_idx: usize, micro_batch: MicroBatch) -> Result<()> {
        let borrowed = self.layout.units[unit_idx].tied.iter().map(|tied| tied.owner);
        let units = once(unit_idx).chain(borrowed.filter(|unit_idx| !self.layout.owns(*unit_idx)));
        for group_idx in units.flat_map(|unit_idx| self.layout.groups_of(unit_idx)) {
            let grads = self.reducer.group_grads(group_idx);
            if grads.is_some_and(|grads| micro_batch == MicroBatch::Last || !grads.is_resident()) {
                self.reducer.start(&self.layout, group_idx, micro_batch)?;
            }
        }
        Ok(())
    }

    /// Waits until the gradient reductions of this step are complete. Collective.
    pub fn wait_grad_reduction(&self) -> Result<()> {
        self.reducer.wait(&self.layout)
    }

    /// Returns every parameter in the compute dtype, in model order. Collective; exhaust the iterator on every rank.
    pub fn values(&self) -> impl Iterator<Item = Result<(&ParamSpec, Tensor)>> {
        self.gather_units(WeightCopy::Compute)
    }

    /// Returns every parameter in full precision (master weights where there are any), in model order. Collective;
    /// exhaust the iterator on every rank.
    pub fn masters(&self) -> impl Iterator<Item = Result<(&ParamSpec, Tensor)>> {
        self.gather_units(WeightCopy::Masters)
    }

    fn gather_units(&self, of: WeightCopy) -> impl Iterator<Item = Result<(&ParamSpec, Tensor)>> {
        let specs = self.layout.units.iter().enumerate();
        specs.flat_map(move |(unit_idx, unit)| match self.whole(unit_idx, of) {
            Ok(values) => unit.params.iter().zip(values).map(Ok).collect(),
            Err(error) => vec![Err(error)],
        })
    }

    /// Returns all whole parameters of a unit, broadcast from the stage that has it. Collective.
    fn whole(&self, unit_idx: usize, of: WeightCopy) -> Result<Vec<Tensor>> {
        let stages = &self.layout.sharding.stages;
        let owner = stages.owner(unit_idx);
        let values = if self.layout.owns(unit_idx) { self.gather(unit_idx, of)? } else { self.zeros(unit_idx, of)? };
        values.iter().map(|value| Ok(stages.ranks.broadcast(value, owner)?)).collect()
    }

    /// Gathers all whole parameters of a unit from the ranks of its stage.
    fn gather(&self, unit_idx: usize, of: WeightCopy) -> Result<Vec<Tensor>> {
        let groups = self.layout.groups_of(unit_idx);
        groups.clone().try_for_each(|group_idx| self.buffers.group_weights(group_idx).unshard())?;
        let whole_group = |group_idx| match self.optimizer.shard(group_idx).filter(|_| of == WeightCopy::Masters) {
            Some(shard) => Ok(self.layout.groups[group_idx].ranks.shard.all_gather(&shard.master)?),
            None => self.buffers.group_weights(group_idx).whole(),
        };
        let whole_groups = groups.clone().map(whole_group).collect::<Result<Vec<_>>>()?;
        let value = |spec: &ParamSpec| {
            let (group_idx, group, param) = self.layout.find(unit_idx, &spec.name);
            let piece = whole_groups[group_idx - groups.start].narrow(0, param.range.start, param.range.len())?;
            let piece = match spec.storage {
                WeightStorage::Dense | WeightStorage::F32 => piece,
                WeightStorage::Quantized(format) => {
                    dequantize(&piece, format, &param.shape(), self.compute_dtype())?.flatten_all()?
                }
            };
            let ranks = &group.ranks;
            param.placement.gather(&piece, &spec.shape, (&*ranks.split, ranks.tensor.size()))
        };
        let values = self.layout.units[unit_idx].params.iter().map(value).collect();
        groups.clone().for_each(|group_idx| self.buffers.group_weights(group_idx).reshard());
        values
    }

    /// Returns receive buffers for the parameters of another stage's unit.
    fn zeros(&self, unit_idx: usize, of: WeightCopy) -> Result<Vec<Tensor>> {
        let StoreOptions { dtypes, mode, .. } = self.options;
        let zeros = |spec: &ParamSpec| {
            let dtype = match spec.storage {
                WeightStorage::F32 => DType::F32,
                _ if of == WeightCopy::Masters && mode.trains(spec) => dtypes.masters,
                _ => dtypes.compute,
            };
            Tensor::zeros(spec.shape.as_slice(), dtype, &self.device)
        };
        self.layout.units[unit_idx].params.iter().map(zeros).collect()
    }

    /// Updates the weights that ops read after the master weights were set. Collective.
    pub fn refresh(&self) -> Result<()> {
        self.drop_fp8_copies();
        self.optimizer.write_weights()?;
        self.publish()
    }

    /// Distributes the updated shards of the trainable weights.
    fn publish(&self) -> Result<()> {
        self.layout.trainable().try_for_each(|(group_idx, _)| self.buffers.group_weights(group_idx).publish())
    }

    /// Clears all gradients; the next step's first micro-batch overwrites them.
    pub fn zero_grads(&self) -> Result<()> {
        self.reducer.clear()
    }

    /// Returns the sums of squares of all gradients, f64 `[n]` on their device: one for each group kind and unit.
    /// Collective.
    pub fn grad_squares(&self) -> Result<Tensor> {
        self.reducer.squares(&self.layout)
    }

    /// Returns the number of gradient elements that are zero, an f64 scalar on their device. Collective.
    pub fn grad_zeros(&self) -> Result<Tensor> {
        self.reducer.zeros(&self.layout)
    }

    /// Runs the optimizer step that `scaler` has decided on, with the learning rate `lr` times each group's factor. Collective.
    ///
    /// It waits for the GPU only if the optimizer is offloaded.
    pub fn step(&self, lr: f64, scaler: &GradScaler, rounding: MasterRounding) -> Result<()> {
        self.optimizer.step(&Update { lr, scaler, rounding }, &self.reducer)?;
        self.publish()
    }

    /// Returns the number of parameters, and how many of them are trained.
    pub fn counts(&self) -> (usize, usize) {
        let params = || self.layout.units.iter().flat_map(|unit| &unit.params);
        let trained = params().filter(|spec| self.options.mode.trains(spec));
        (params().map(ParamSpec::numel).sum(), trained.map(ParamSpec::numel).sum())
    }

    /// Returns the weight buffers that a unit reads, as far as this stage has them.
    fn buffers_to_read(&self, unit_idx: usize) -> impl Iterator<Item = &GroupWeights> {
        self.layout.groups_to_read(unit_idx).map(|group_idx| self.buffers.group_weights(group_idx))
    }
}

/// Copy of the weights to read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WeightCopy {
    Compute,
    Masters,
}

/// Builds the weights of all units; `None` for those of other stages.
fn layers(layout: &ParamLayout, buffers: &ShardedBuffers) -> Result<Vec<Option<UnitWeights>>> {
    (0..layout.units.len()).map(|unit_idx| layer(layout, buffers, unit_idx)).collect()
}

/// Builds the weights of a unit; `None` if another stage has it.
fn layer(layout: &ParamLayout, buffers: &ShardedBuffers, unit_idx: usize) -> Result<Option<UnitWeights>> {
    let Some(unit) = layout.used(unit_idx) else { return Ok(None) };
    let shared = unit.tied.iter().filter(|tied| layout.has(tied.owner)).map(|tied| &tied.name);
    let names = unit.params.iter().map(|spec| &spec.name).chain(shared);
    UnitWeights::new(unit, names.map(|name| (name.clone(), buffers.weight(name)))).map(Some)
}
