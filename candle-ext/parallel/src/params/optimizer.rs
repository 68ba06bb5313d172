//! AdamW over this rank's shards of master weights and moments.
//!
//! With CPU offload, gradients are copied to the CPU, AdamW runs there, and the updated weights are copied back.

use std::collections::BTreeMap;
use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, bail};
use candlewick_ops::{
    AdamW, AdamWState, GradScaler, ShardPosition, StochasticRounding, adamw, adamw_stochastic, copy_into, derive_key,
    upload_into,
};

use super::buffers::ShardedBuffers;
use super::bytes::{StoreBytes, of_tensor};
use super::layout::{ParamGroup, ParamLayout};
use super::offload::{MemoryLocation, UnitOffload};
use super::options::{MasterRounding, ParamDtypes};
use super::reducer::GradReducer;

/// AdamW state of all trainable groups of a stage, by group index.
pub(crate) struct ShardedAdamW {
    shards: BTreeMap<usize, AdamWShard>,
}

/// This rank's shard of a group's optimizer state.
pub(crate) struct AdamWShard {
    /// Master weights; the weights that ops read, if dtype and device agree.
    pub(crate) master: Tensor,
    pub(crate) exp_avg: Tensor,
    pub(crate) exp_avg_sq: Tensor,
    /// This rank's shard of the weights that ops read.
    weights: Tensor,
    offload: UnitOffload,
    /// Number of elements with weight decay, which come first.
    n_decayed: usize,
    /// Parameters of the shard, without padding.
    pieces: Vec<ShardPiece>,
}

/// Part of a parameter in a shard.
struct ShardPiece {
    /// Elements of the shard.
    range: Range<usize>,
    position: ShardPosition,
    /// Hash of the parameter's name.
    name_hash: u64,
}

/// Settings of one update.
pub(super) struct Update<'a> {
    pub(super) hyper: &'a AdamW,
    /// Decision about the step.
    pub(super) scaler: &'a GradScaler,
    pub(super) rounding: MasterRounding,
}

impl ShardedAdamW {
    /// Allocates master weights and moments, zero-filled.
    pub(crate) fn new(
        layout: &ParamLayout,
        buffers: &ShardedBuffers,
        dtypes: ParamDtypes,
        device: &Device,
    ) -> Result<Self> {
        let shard = |(group_idx, group): (usize, &ParamGroup)| {
            Ok((group_idx, AdamWShard::zeros(group, &buffers.group_weights(group_idx).own, dtypes, device)?))
        };
        Ok(Self { shards: layout.trainable().map(shard).collect::<Result<_>>()? })
    }

    /// Returns the AdamW state of a parameter group; `None` for a frozen group.
    pub(crate) fn shard(&self, group_idx: usize) -> Option<&AdamWShard> {
        self.shards.get(&group_idx)
    }

    /// Copies the master weights to the weights that ops read.
    pub(crate) fn write_weights(&self) -> Result<()> {
        self.shards.values().try_for_each(AdamWShard::write_weights)
    }

    /// Runs the AdamW step that the scaler has decided on.
    pub(crate) fn step(&self, by: &Update<'_>, reducer: &GradReducer) -> Result<()> {
        let (mut on_host, on_device): (Vec<_>, Vec<_>) =
            self.shards.iter().partition(|(_, shard)| shard.offload.optimizer == MemoryLocation::Host);
        for (group_idx, shard) in on_device {
            shard.step(by, &reducer.reduced(*group_idx)?)?;
        }
        on_host.sort_by_key(|(group_idx, _)| !reducer.has_host_copy(**group_idx));
        step_on_host(&on_host, by, reducer)
    }

    /// Returns the bytes of master weights and moments on `device`.
    pub(crate) fn device_bytes(&self, device: &Device) -> StoreBytes {
        let sum = |of: fn(&AdamWShard, &Device) -> u64| self.shards.values().map(|shard| of(shard, device)).sum();
        StoreBytes {
            masters: sum(AdamWShard::master_bytes),
            moments: sum(AdamWShard::moment_bytes),
            ..Default::default()
        }
    }
}

impl AdamWShard {
    fn zeros(group: &ParamGroup, weights: &Tensor, dtypes: ParamDtypes, device: &Device) -> Result<Self> {
        let ParamDtypes { compute, masters, moments } = dtypes;
        if ![DType::F32, compute].contains(&masters) {
            bail!("master weights in {masters:?} cannot be computed with in {compute:?}")
        }
        let (n, offload, weights) = (group.shard.len(), group.offload, weights.clone());
        let device = offload.optimizer.device(device);
        let is_one = compute == masters && offload.weights == offload.optimizer;
        let master = if is_one { weights.clone() } else { Tensor::zeros(n, masters, device)? };
        let moment = || Tensor::zeros(n, moments, device);
        let (exp_avg, exp_avg_sq) = (moment()?, moment()?);
        let n_decayed = group.n_decayed.clamp(group.shard.start, group.shard.end) - group.shard.start;
        let pieces = ShardPiece::all(group);
        Ok(Self { master, exp_avg, exp_avg_sq, weights, offload, n_decayed, pieces })
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

    /// Runs the step on the computing device.
    fn step(&self, by: &Update<'_>, grad: &Tensor) -> Result<()> {
        self.update(by, grad, (!self.has_one_copy()).then_some(&self.weights))
    }

    /// Runs the step on the CPU and copies the weights to the device.
    fn step_on_host(&self, by: &Update<'_>, grad: &Tensor) -> Result<()> {
        if self.offload.weights == MemoryLocation::Host {
            return self.step(by, grad);
        }
        if self.weights.dtype() == self.master.dtype() {
            self.update(by, grad, None)?;
            return upload_into(&self.weights, &self.master);
        }
        let compute = Tensor::zeros(self.weights.shape(), self.weights.dtype(), &Device::Cpu)?;
        self.update(by, grad, Some(&compute))?;
        upload_into(&self.weights, &compute)
    }

    /// Updates master weights and moments by `grad`, and the copy in the compute dtype if there is one.
    fn update(&self, by: &Update<'_>, grad: &Tensor, compute: Option<&Tensor>) -> Result<()> {
        let n = self.master.elem_count();
        match by.rounding {
            MasterRounding::Nearest => [0..self.n_decayed, self.n_decayed..n]
                .into_iter()
                .filter(|range| !range.is_empty())
                .try_for_each(|range| self.update_range(by, grad, compute, (range, None))),
            MasterRounding::Stochastic { key } => self.pieces.iter().try_for_each(|piece| {
                let key = derive_key(key, piece.name_hash);
                let rounding = StochasticRounding { key, position: piece.position.clone() };
                self.update_range(by, grad, compute, (piece.range.clone(), Some(rounding)))
            }),
        }
    }

    /// Updates the elements of a range, which all have weight decay or have none.
    fn update_range(
        &self,
        by: &Update<'_>,
        grad: &Tensor,
        compute: Option<&Tensor>,
        (range, rounding): (Range<usize>, Option<StochasticRounding>),
    ) -> Result<()> {
        let part = |flat: &Tensor| flat.narrow(0, range.start, range.len());
        let compute = compute.map(part).transpose()?;
        let state = AdamWState {
            master: &part(&self.master)?,
            grad: &part(grad)?,
            exp_avg: &part(&self.exp_avg)?,
            exp_avg_sq: &part(&self.exp_avg_sq)?,
            compute: compute.as_ref(),
        };
        let weight_decay = if range.start < self.n_decayed { by.hyper.weight_decay } else { 0.0 };
        let hyper = AdamW { weight_decay, ..*by.hyper };
        match rounding {
            None => adamw(&hyper, by.scaler, state),
            Some(rounding) => adamw_stochastic(&hyper, by.scaler, state, &rounding),
        }
    }

    fn master_bytes(&self, device: &Device) -> u64 {
        if self.has_one_copy() { 0 } else { of_tensor(&self.master, device) }
    }

    fn moment_bytes(&self, device: &Device) -> u64 {
        of_tensor(&self.exp_avg, device) + of_tensor(&self.exp_avg_sq, device)
    }
}

impl ShardPiece {
    /// Returns the pieces of a group's parameters in this rank's shard.
    fn all(group: &ParamGroup) -> Vec<Self> {
        let start = group.shard.start;
        let pieces = group.params.iter().filter_map(|param| Some((param, param.piece(&group.shard)?)));
        let of_param = pieces.map(|(param, piece)| Self {
            position: param.position(&piece),
            range: piece.start - start..piece.end - start,
            name_hash: param.spec.name_hash(),
        });
        of_param.collect()
    }
}

/// Runs the step of offloaded shards. It waits for the scaler's decision once. The gradients of the first shards were copied during
/// backward, the others are copied during the updates.
fn step_on_host(shards: &[(&usize, &AdamWShard)], by: &Update<'_>, reducer: &GradReducer) -> Result<()> {
    if shards.is_empty() {
        return Ok(());
    }
    let Some(scaler) = by.scaler.to_host()? else { return Ok(()) };
    let by = &Update { scaler: &scaler, ..*by };
    let start = |(group_idx, _): &(&usize, _)| reducer.host_copy(**group_idx);
    let mut copy = shards.first().map(start).transpose()?;
    for (i, (_, shard)) in shards.iter().enumerate() {
        let next = shards.get(i + 1).map(start).transpose()?;
        if let Some(copy) = std::mem::replace(&mut copy, next) {
            shard.step_on_host(by, &copy.into_host()?)?;
        }
    }
    Ok(())
}
