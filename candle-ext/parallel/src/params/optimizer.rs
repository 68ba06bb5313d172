//! AdamW over this rank's shards of master weights and moments.
//!
//! With CPU offload, gradients are copied to the CPU, AdamW runs there, and the updated weights are copied back.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Tensor, bail};
use candlewick_ops::{AdamW, AdamWState, GradScaler, HostBuffer, adamw, copy_into, upload_into};

use super::buffers::ShardedBuffers;
use super::bytes::{StoreBytes, of_tensor};
use super::layout::{ParamGroup, ParamLayout};
use super::offload::{MemoryLocation, UnitOffload};
use super::options::ParamDtypes;
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

    /// Runs the AdamW step that `scaler` has decided on.
    pub(crate) fn step(&self, hyper: &AdamW, scaler: &GradScaler, reducer: &GradReducer) -> Result<()> {
        let (on_host, on_device): (Vec<_>, Vec<_>) =
            self.shards.iter().partition(|(_, shard)| shard.offload.optimizer == MemoryLocation::Host);
        for (group_idx, shard) in on_device {
            shard.step(hyper, scaler, &reducer.reduced(*group_idx)?)?;
        }
        step_on_host(&on_host, hyper, scaler, reducer)
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
        Ok(Self { master, exp_avg, exp_avg_sq, weights, offload, n_decayed })
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
    fn step(&self, hyper: &AdamW, scaler: &GradScaler, grad: &Tensor) -> Result<()> {
        self.update(hyper, scaler, grad, (!self.has_one_copy()).then_some(&self.weights))
    }

    /// Runs the step on the CPU and copies the weights to the device.
    fn step_on_host(&self, hyper: &AdamW, scaler: &GradScaler, grad: &Tensor) -> Result<()> {
        if self.offload.weights == MemoryLocation::Host {
            return self.step(hyper, scaler, grad);
        }
        if self.weights.dtype() == self.master.dtype() {
            self.update(hyper, scaler, grad, None)?;
            return upload_into(&self.weights, &self.master);
        }
        let compute = Tensor::zeros(self.weights.shape(), self.weights.dtype(), &Device::Cpu)?;
        self.update(hyper, scaler, grad, Some(&compute))?;
        upload_into(&self.weights, &compute)
    }

    /// Updates master weights and moments by `grad`, and the copy in the compute dtype if there is one.
    fn update(&self, hyper: &AdamW, scaler: &GradScaler, grad: &Tensor, compute: Option<&Tensor>) -> Result<()> {
        let exempt = AdamW { weight_decay: 0.0, ..*hyper };
        let n = self.master.elem_count();
        for (hyper, range) in [(hyper, 0..self.n_decayed), (&exempt, self.n_decayed..n)] {
            if range.is_empty() {
                continue;
            }
            let part = |flat: &Tensor| flat.narrow(0, range.start, range.len());
            let compute = compute.map(part).transpose()?;
            let state = AdamWState {
                master: &part(&self.master)?,
                grad: &part(grad)?,
                exp_avg: &part(&self.exp_avg)?,
                exp_avg_sq: &part(&self.exp_avg_sq)?,
                compute: compute.as_ref(),
            };
            adamw(hyper, scaler, state)?;
        }
        Ok(())
    }

    fn master_bytes(&self, device: &Device) -> u64 {
        if self.has_one_copy() { 0 } else { of_tensor(&self.master, device) }
    }

    fn moment_bytes(&self, device: &Device) -> u64 {
        of_tensor(&self.exp_avg, device) + of_tensor(&self.exp_avg_sq, device)
    }
}

/// Runs the step of offloaded shards. It waits for the scaler's decision once, and overlaps gradient copies with
/// updates.
fn step_on_host(
    shards: &[(&usize, &AdamWShard)],
    hyper: &AdamW,
    scaler: &GradScaler,
    reducer: &GradReducer,
) -> Result<()> {
    if shards.is_empty() {
        return Ok(());
    }
    let Some(scaler) = scaler.to_host()? else { return Ok(()) };
    let start = |(group_idx, _): &(&usize, _)| HostBuffer::start(&reducer.reduced(**group_idx)?);
    let mut copy = shards.first().map(start).transpose()?;
    for (i, (_, shard)) in shards.iter().enumerate() {
        let next = shards.get(i + 1).map(start).transpose()?;
        if let Some(copy) = std::mem::replace(&mut copy, next) {
            shard.step_on_host(hyper, &scaler, &copy.into_host()?)?;
        }
    }
    Ok(())
}
