//! Master weights and optimizer states of this rank's shards, and their updates.
//!
//! With CPU offload, gradients are copied to the CPU, the update runs there, and the updated weights are copied back.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, bail};
use candlewick_comm::Collective;
use candlewick_ops::{GradScaler, ShardPosition, StochasticRounding, copy_into, derive_key, to_host, upload_into};

use super::buffers::ShardedBuffers;
use super::bytes::{StoreBytes, of_tensor};
use super::layout::{ParamGroup, ParamLayout, ParamSetting, PlacedParam};
use super::offload::{MemoryLocation, UnitOffload};
use super::options::{MasterRounding, ParamDtypes};
use super::reducer::GradReducer;
use crate::optimizer::{
    ElementUpdates, MatrixUpdates, OptimizerGroups, OptimizerKind, ShardUpdate, SlotDtype, StateSlot, StepUpdates,
    UpdateNeed,
};
use crate::placement::{Placement, RankOf};

/// Optimizer state of all trainable groups of a stage, by group index.
pub(crate) struct ShardedOptimizer {
    groups: OptimizerGroups,
    shards: BTreeMap<usize, OptimizerShard>,
    device: Device,
}

/// This rank's shard of a group's optimizer state.
pub(crate) struct OptimizerShard {
    /// Master weights; the weights that ops read, if dtype and device agree.
    pub(crate) master: Tensor,
    /// State in the order of `slots`.
    pub(crate) states: Vec<Tensor>,
    pub(crate) slots: &'static [StateSlot],
    /// This rank's shard of the weights that ops read.
    weights: Tensor,
    offload: UnitOffload,
    /// Parts that one update each may update: runs of parameters.
    runs: Vec<(Range<usize>, ParamSetting)>,
    /// Parameters of the shard, without padding.
    pieces: Vec<ShardPiece>,
    need: UpdateNeed,
    /// Ranks that hold slices of the matrices.
    tensor: Arc<dyn Collective>,
}

/// Part of a parameter in a shard.
struct ShardPiece {
    /// Elements of the shard.
    range: Range<usize>,
    position: ShardPosition,
    /// Hash of the parameter's name.
    name_hash: u64,
    setting: ParamSetting,
    /// Shape of the whole parameter.
    shape: Vec<usize>,
    placement: Placement,
    /// Elements of the largest slice of any rank.
    padded_len: usize,
}

/// Settings of one step.
pub(super) struct Update<'a> {
    pub(super) lr: f64,
    /// Decision about the step.
    pub(super) scaler: &'a GradScaler,
    pub(super) rounding: MasterRounding,
}

/// A step of all optimizer groups, on one device.
struct GroupUpdates<'a> {
    by: &'a Update<'a>,
    groups: &'a OptimizerGroups,
    /// Updates of each optimizer group.
    updates: Vec<StepUpdates<'a>>,
    /// Device that computes.
    device: &'a Device,
}

/// Part of a shard that one update changes.
struct ShardPart {
    lr: f64,
    weight_decay: f64,
    master: Tensor,
    grad: Tensor,
    states: Vec<Tensor>,
    compute: Option<Tensor>,
}

/// Gradient of a shard, and the copy of its weights in the compute dtype if there is one.
#[derive(Clone, Copy)]
struct ShardTensors<'a> {
    grad: &'a Tensor,
    compute: Option<&'a Tensor>,
}

impl ShardedOptimizer {
    /// Allocates master weights and states, zero-filled.
    pub(crate) fn new(
        layout: &ParamLayout,
        buffers: &ShardedBuffers,
        (groups, dtypes): (&OptimizerGroups, ParamDtypes),
        device: &Device,
    ) -> Result<Self> {
        let (mut shards, trainable) = (BTreeMap::new(), layout.groups.iter().enumerate());
        for (group_idx, group) in trainable {
            let Some(kind) = &group.optimizer else { continue };
            let weights = &buffers.group_weights(group_idx).own;
            shards.insert(group_idx, OptimizerShard::zeros(group, &**kind, weights, (dtypes, device))?);
        }
        Ok(Self { groups: groups.clone(), shards, device: device.clone() })
    }

    /// Returns the optimizer state of a parameter group; `None` for a frozen group.
    pub(crate) fn shard(&self, group_idx: usize) -> Option<&OptimizerShard> {
        self.shards.get(&group_idx)
    }

    /// Copies the master weights to the weights that ops read.
    pub(crate) fn write_weights(&self) -> Result<()> {
        self.shards.values().try_for_each(OptimizerShard::write_weights)
    }

    /// Runs the step that the scaler has decided on.
    pub(crate) fn step(&self, by: &Update<'_>, reducer: &GradReducer) -> Result<()> {
        let (mut on_host, on_device): (Vec<_>, Vec<_>) =
            self.shards.iter().partition(|(_, shard)| shard.offload.optimizer == MemoryLocation::Host);
        let updates = self.updates(by)?;
        for (group_idx, shard) in on_device {
            shard.step(&updates, &reducer.reduced(*group_idx)?)?;
        }
        on_host.sort_by_key(|(group_idx, _)| !reducer.has_host_copy(**group_idx));
        self.step_on_host(&on_host, by, reducer)
    }

    fn updates<'a>(&'a self, by: &'a Update<'a>) -> Result<GroupUpdates<'a>> {
        let of_groups = self.groups.groups().iter().map(|group| group.kind.start_step(by.scaler));
        Ok(GroupUpdates { by, groups: &self.groups, updates: of_groups.collect::<Result<_>>()?, device: &self.device })
    }

    /// Runs the step of offloaded shards. It waits for the scaler's decision once. The gradients of the first shards were copied
    /// during backward, the others are copied during the updates.
    fn step_on_host(&self, shards: &[(&usize, &OptimizerShard)], by: &Update<'_>, reducer: &GradReducer) -> Result<()> {
        if shards.is_empty() {
            return Ok(());
        }
        let Some(scaler) = by.scaler.to_host()? else { return Ok(()) };
        let by = &Update { scaler: &scaler, ..*by };
        let updates = self.updates(by)?;
        let start = |(group_idx, _): &(&usize, _)| reducer.host_copy(**group_idx);
        let mut copy = shards.first().map(start).transpose()?;
        for (i, (_, shard)) in shards.iter().enumerate() {
            let next = shards.get(i + 1).map(start).transpose()?;
            if let Some(copy) = std::mem::replace(&mut copy, next) {
                shard.step_on_host(&updates, &copy.into_host()?)?;
            }
        }
        Ok(())
    }

    /// Returns the bytes of master weights and states on `device`.
    pub(crate) fn device_bytes(&self, device: &Device) -> StoreBytes {
        let sum = |of: fn(&OptimizerShard, &Device) -> u64| self.shards.values().map(|shard| of(shard, device)).sum();
        StoreBytes {
            masters: sum(OptimizerShard::master_bytes),
            optimizer_states: sum(OptimizerShard::state_bytes),
            ..Default::default()
        }
    }
}

impl OptimizerShard {
    fn zeros(
        group: &ParamGroup,
        kind: &dyn OptimizerKind,
        weights: &Tensor,
        (dtypes, device): (ParamDtypes, &Device),
    ) -> Result<Self> {
        let ParamDtypes { compute, masters, .. } = dtypes;
        if ![DType::F32, compute].contains(&masters) {
            bail!("master weights in {masters:?} cannot be computed with in {compute:?}")
        }
        let (n, offload, weights) = (group.shard.len(), group.offload, weights.clone());
        let device = offload.optimizer.device(device);
        let is_one = compute == masters && offload.weights == offload.optimizer;
        let master = if is_one { weights.clone() } else { Tensor::zeros(n, masters, device)? };
        let slots = kind.slots();
        let states = slots.iter().map(|slot| Tensor::zeros(n, dtypes.of_slot(slot), device)).collect::<Result<_>>()?;
        let (runs, pieces, need) = (group.runs(), ShardPiece::all(group), kind.need());
        let tensor = Arc::clone(&group.ranks.tensor);
        Ok(Self { master, states, slots, weights, offload, runs, pieces, need, tensor })
    }

    /// Returns true if ops read the master weights directly.
    fn has_one_copy(&self) -> bool {
        self.weights.dtype() == self.master.dtype() && self.offload.weights == self.offload.optimizer
    }

    fn write_weights(&self) -> Result<()> {
        match self.offload.optimizer {
            _ if self.has_one_copy() => Ok(()),
            MemoryLocation::Host => upload_into(&self.weights, &self.master.to_dtype(self.weights.dtype())?),
            MemoryLocation::Device => copy_into(&self.weights, &self.master),
        }
    }

    /// Runs the step on the device of the states.
    fn step(&self, updates: &GroupUpdates<'_>, grad: &Tensor) -> Result<()> {
        self.update(updates, ShardTensors { grad, compute: (!self.has_one_copy()).then_some(&self.weights) })
    }

    /// Runs the step on the CPU and copies the weights to the device.
    fn step_on_host(&self, updates: &GroupUpdates<'_>, grad: &Tensor) -> Result<()> {
        if self.offload.weights == MemoryLocation::Host {
            return self.step(updates, grad);
        }
        if self.weights.dtype() == self.master.dtype() {
            self.update(updates, ShardTensors { grad, compute: None })?;
            return upload_into(&self.weights, &self.master);
        }
        let compute = Tensor::zeros(self.weights.shape(), self.weights.dtype(), &Device::Cpu)?;
        self.update(updates, ShardTensors { grad, compute: Some(&compute) })?;
        upload_into(&self.weights, &compute)
    }

    /// Updates master weights and states, and the copy in the compute dtype if there is one.
    fn update(&self, updates: &GroupUpdates<'_>, tensors: ShardTensors<'_>) -> Result<()> {
        match (self.need, updates.by.rounding) {
            (UpdateNeed::WholeMatrices, _) => self.update_matrices(updates, tensors),
            (UpdateNeed::Elements, MasterRounding::Nearest) => self.runs.iter().try_for_each(|(range, setting)| {
                updates.elements(setting)?.update(&self.part(updates, tensors, (range, setting))?.as_update())
            }),
            (UpdateNeed::Elements, MasterRounding::Stochastic { key }) => self.pieces.iter().try_for_each(|piece| {
                let part = self.part(updates, tensors, (&piece.range, &piece.setting))?;
                let rounding = Some(piece.rounding(key));
                updates.elements(&piece.setting)?.update(&ShardUpdate { rounding, ..part.as_update() })
            }),
        }
    }

    /// Updates matrices, of which tensor parallel ranks hold slices. One all-gather joins the slices of all matrices of the shard,
    /// so all ranks issue as many, whatever matrices they have.
    fn update_matrices(&self, updates: &GroupUpdates<'_>, tensors: ShardTensors<'_>) -> Result<()> {
        let parts = self.pieces.iter().map(|piece| self.part(updates, tensors, (&piece.range, &piece.setting)));
        let parts = parts.collect::<Result<Vec<_>>>()?;
        let (n, device) = (self.master.elem_count(), updates.device);
        let slices = Tensor::zeros(n, DType::F32, device)?;
        for (piece, part) in self.pieces.iter().zip(&parts) {
            let slice = updates.matrices(&piece.setting)?.gathered(&part.as_update())?.to_device(device)?;
            copy_into(&slices.narrow(0, piece.range.start, slice.elem_count())?, &slice)?;
        }
        let all = self.tensor.all_gather(&slices)?;
        let own = RankOf { rank: self.tensor.rank(), n_ranks: self.tensor.size() };
        for (piece, part) in self.pieces.iter().zip(&parts) {
            let shard_of = |rank: usize| all.narrow(0, rank * n + piece.range.start, piece.padded_len);
            let whole = piece.placement.join(shard_of, &piece.shape, own)?;
            let updates = updates.matrices(&piece.setting)?;
            let step = piece.placement.cut(&updates.step(&whole)?)?.flatten_all()?;
            let step = if part.master.device().same_device(device) { step } else { to_host(&step)? };
            updates.apply(&part.as_update(), &step)?;
        }
        Ok(())
    }

    /// Returns the tensors and settings of a range of the shard.
    fn part(
        &self,
        updates: &GroupUpdates<'_>,
        ShardTensors { grad, compute }: ShardTensors<'_>,
        (range, setting): (&Range<usize>, &ParamSetting),
    ) -> Result<ShardPart> {
        let part = |flat: &Tensor| flat.narrow(0, range.start, range.len());
        Ok(ShardPart {
            lr: updates.by.lr * updates.groups.groups()[setting.group_idx].lr_factor,
            weight_decay: setting.weight_decay,
            master: part(&self.master)?,
            grad: part(grad)?,
            states: self.states.iter().map(part).collect::<Result<Vec<_>>>()?,
            compute: compute.map(part).transpose()?,
        })
    }

    fn master_bytes(&self, device: &Device) -> u64 {
        if self.has_one_copy() { 0 } else { of_tensor(&self.master, device) }
    }

    fn state_bytes(&self, device: &Device) -> u64 {
        self.states.iter().map(|state| of_tensor(state, device)).sum()
    }
}

impl GroupUpdates<'_> {
    fn elements(&self, setting: &ParamSetting) -> Result<&dyn ElementUpdates> {
        match &self.updates[setting.group_idx] {
            StepUpdates::Elements(updates) => Ok(&**updates),
            StepUpdates::WholeMatrices(_) => bail!("the optimizer declared that it updates elements"),
        }
    }

    fn matrices(&self, setting: &ParamSetting) -> Result<&dyn MatrixUpdates> {
        match &self.updates[setting.group_idx] {
            StepUpdates::WholeMatrices(updates) => Ok(&**updates),
            StepUpdates::Elements(_) => bail!("the optimizer declared that it updates whole matrices"),
        }
    }
}

impl ShardPart {
    fn as_update(&self) -> ShardUpdate<'_> {
        let Self { lr, weight_decay, master, grad, states, compute } = self;
        let (lr, weight_decay) = (*lr, *weight_decay);
        ShardUpdate { lr, weight_decay, master, grad, slots: states, compute: compute.as_ref(), rounding: None }
    }
}

impl ParamDtypes {
    /// Returns the dtype of a slot of optimizer state.
    fn of_slot(self, slot: &StateSlot) -> DType {
        match slot.dtype {
            SlotDtype::Configured => self.optimizer_states,
            SlotDtype::F32 => DType::F32,
        }
    }
}

impl ShardPiece {
    /// Returns the pieces of a group's parameters in this rank's shard.
    fn all(group: &ParamGroup) -> Vec<Self> {
        let start = group.shard.start;
        let pieces = group.params.iter().filter_map(|param| Some((param, param.piece(&group.shard)?)));
        let of_param = pieces.map(|(param, piece): (&PlacedParam, _)| Self {
            position: param.position(&piece),
            range: piece.start - start..piece.end - start,
            name_hash: param.spec.name_hash(),
            setting: param.setting,
            shape: param.spec.shape.clone(),
            placement: param.placement.clone(),
            padded_len: param.range.len(),
        });
        of_param.collect()
    }

    fn rounding(&self, key: u64) -> StochasticRounding {
        StochasticRounding { key: derive_key(key, self.name_hash), position: self.position.clone() }
    }
}
