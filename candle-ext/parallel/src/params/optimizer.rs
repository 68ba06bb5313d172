//! AdamW over this rank's shards of the masters and moments.
//!
//! They lie with the weights, or on the host (CPU offload). Then gradients are copied to the host, AdamW updates the masters
//! there, and the weights that ops read are copied back.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Tensor, bail};
use candlewick_ops::{AdamW, AdamWState, GradScaler, HostCopy, adamw, copy_into, send_into};

use super::buffers::ShardedBuffers;
use super::bytes::{StoreBytes, of_tensor};
use super::layout::{ParamGroup, ParamLayout};
use super::offload::{MemoryLocation, UnitOffload};
use super::options::ParamDtypes;
use super::reducer::GradReducer;

/// ShardedAdamW state of all trainable groups of a stage, by group index.
pub(crate) struct ShardedAdamW {
    shards: BTreeMap<usize, AdamWShard>,
}

/// This rank's shard of a group's optimizer state.
pub(crate) struct AdamWShard {
    /// The weights that AdamW updates: the ops' own where they have one format and place.
    pub(crate) master: Tensor,
    pub(crate) exp_avg: Tensor,
    pub(crate) exp_avg_sq: Tensor,
    /// This rank's shard of the weights that ops read.
    weights: Tensor,
    offload: UnitOffload,
    /// Elements with weight decay: those before.
    n_decayed: usize,
}

impl ShardedAdamW {
    /// Allocates masters and moments, all zero.
    pub(crate) fn new(
        layout: &ParamLayout,
        buffers: &ShardedBuffers,
        dtypes: ParamDtypes,
        device: &Device,
    ) -> Result<Self> {
        let shard = |(group_idx, group): (usize, &ParamGroup)| {
            Ok((group_idx, AdamWShard::zeros(group, &buffers.run(group_idx).own, dtypes, device)?))
        };
        Ok(Self { shards: layout.trainable().map(shard).collect::<Result<_>>()? })
    }

    /// Returns the state of a group; `None` for a frozen one.
    pub(crate) fn shard(&self, group_idx: usize) -> Option<&AdamWShard> {
        self.shards.get(&group_idx)
    }

    /// Writes the masters to the weights that ops read.
    pub(crate) fn write_weights(&self) -> Result<()> {
        self.shards.values().try_for_each(AdamWShard::write_weights)
    }

    /// Takes the AdamW step that `scaler` has decided upon.
    pub(crate) fn step(&self, hyper: &AdamW, scaler: &GradScaler, reducer: &GradReducer) -> Result<()> {
        let (on_host, on_device): (Vec<_>, Vec<_>) =
            self.shards.iter().partition(|(_, shard)| shard.offload.optimizer == MemoryLocation::Host);
        for (group_idx, shard) in on_device {
            shard.step(hyper, scaler, &reducer.reduced(*group_idx)?)?;
        }
        step_on_host(&on_host, hyper, scaler, reducer)
    }

    /// Returns the bytes of masters and moments on `device`.
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

    /// Returns whether the ops read what AdamW updates.
    fn has_one_copy(&self) -> bool {
        self.weights.dtype() == self.master.dtype() && self.offload.weights == self.offload.optimizer
    }

    fn write_weights(&self) -> Result<()> {
        match self.offload.optimizer {
            _ if self.has_one_copy() => Ok(()),
            MemoryLocation::Host => send_into(&self.weights, &self.master.to_dtype(self.weights.dtype())?),
            MemoryLocation::Device => copy_into(&self.weights, &self.master),
        }
    }

    /// Takes the step where the weights are.
    fn step(&self, hyper: &AdamW, scaler: &GradScaler, grad: &Tensor) -> Result<()> {
        self.update(hyper, scaler, grad, (!self.has_one_copy()).then_some(&self.weights))
    }

    /// Takes the step on the host, and sends the weights to where the ops read them.
    fn step_on_host(&self, hyper: &AdamW, scaler: &GradScaler, grad: &Tensor) -> Result<()> {
        if self.offload.weights == MemoryLocation::Host {
            return self.step(hyper, scaler, grad);
        }
        if self.weights.dtype() == self.master.dtype() {
            self.update(hyper, scaler, grad, None)?;
            return send_into(&self.weights, &self.master);
        }
        let compute = Tensor::zeros(self.weights.shape(), self.weights.dtype(), &Device::Cpu)?;
        self.update(hyper, scaler, grad, Some(&compute))?;
        send_into(&self.weights, &compute)
    }

    /// Updates masters and moments by `grad`, and their copy in another format if there is one.
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

/// Takes the step of offloaded shards. It waits for the scaler's decision once, and copies the next gradient while one is used.
fn step_on_host(
    shards: &[(&usize, &AdamWShard)],
    hyper: &AdamW,
    scaler: &GradScaler,
    reducer: &GradReducer,
) -> Result<()> {
    if shards.is_empty() {
        return Ok(());
    }
    let Some(scaler) = scaler.on_host()? else { return Ok(()) };
    let start = |(group_idx, _): &(&usize, _)| HostCopy::start(&reducer.reduced(**group_idx)?);
    let mut copy = shards.first().map(start).transpose()?;
    for (i, (_, shard)) in shards.iter().enumerate() {
        let next = shards.get(i + 1).map(start).transpose()?;
        if let Some(copy) = std::mem::replace(&mut copy, next) {
            shard.step_on_host(hyper, &scaler, &copy.into_host()?)?;
        }
    }
    Ok(())
}
