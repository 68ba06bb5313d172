//! UnitWeights as ops read them: flat runs that stay whole, or are all-gathered (unsharded) when a unit needs them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Device, Result, Tensor};
use candlewick_comm::{Collective, Pending};
use candlewick_ops::{Buffer, Weight, WeightStorage, copy_into, send_into};

use super::bytes::{StoreBytes, of_buffer, of_tensor};
use super::layout::{ParamGroup, ParamLayout, PlacedParam};
use super::offload::MemoryLocation;
use super::reducer::GradReducer;
use super::sharding::ZeroStage;

/// UnitWeights of all groups of a stage.
pub(crate) struct ShardedBuffers {
    /// In the order of the layout's groups.
    runs: Vec<WeightRun>,
    /// Views of the runs by parameter name.
    weights: HashMap<String, Weight>,
}

/// Flat run of one group's weights.
pub(crate) struct WeightRun {
    /// The whole run; ops hold views of it.
    all: Buffer,
    /// This rank's shard: a view of `all` where that is resident. It may lie in the host's memory.
    pub(crate) own: Tensor,
    /// True if the whole run stays on the device.
    is_resident: bool,
    shard: Arc<dyn Collective>,
    /// The device that computes.
    device: Device,
    gathering: Mutex<Option<Pending>>,
}

impl ShardedBuffers {
    /// Allocates the runs, all zero. Trainable weights get the sinks of `reducer`.
    pub(crate) fn new(layout: &ParamLayout, reducer: &GradReducer, dtype: DType, device: &Device) -> Result<Self> {
        let zero_stage = layout.sharding.zero_stage;
        let (mut runs, mut weights) = (Vec::new(), HashMap::new());
        for group in &layout.groups {
            let run = WeightRun::zeros(group, zero_stage, group.storage.dtype(dtype), device)?;
            for param in &group.params {
                weights.insert(param.spec.name.clone(), run.weight(param, reducer)?);
            }
            runs.push(run);
        }
        Ok(Self { runs, weights })
    }

    /// Returns a parameter as ops take it.
    pub(crate) fn weight(&self, name: &str) -> Weight {
        self.weights[name].clone()
    }

    /// Returns a group's run.
    pub(crate) fn run(&self, group_idx: usize) -> &WeightRun {
        &self.runs[group_idx]
    }

    /// Returns the bytes that the weights take on `device`.
    pub(crate) fn device_bytes(&self, device: &Device) -> StoreBytes {
        StoreBytes { weights: self.runs.iter().map(|run| run.bytes(device)).sum(), ..StoreBytes::default() }
    }
}

impl WeightRun {
    fn zeros(group: &ParamGroup, zero_stage: ZeroStage, dtype: DType, device: &Device) -> Result<Self> {
        let location = group.offload.weights;
        let is_resident = zero_stage != ZeroStage::Three && location == MemoryLocation::Device;
        let (n, shard) = (group.numel, &group.shard);
        let (all, own) = match is_resident {
            true => {
                let all = Tensor::zeros(n, dtype, device)?;
                let own = all.narrow(0, shard.start, shard.len())?;
                (Buffer::of(all), own)
            }
            false => (Buffer::away(n, dtype), Tensor::zeros(shard.len(), dtype, location.device(device))?),
        };
        let shard = Arc::clone(&group.ranks.shard);
        Ok(Self { all, own, is_resident, shard, device: device.clone(), gathering: Mutex::default() })
    }

    /// Returns a parameter's view of the run.
    fn weight(&self, param: &PlacedParam, reducer: &GradReducer) -> Result<Weight> {
        let (shape, start) = (param.shape(), param.range.start);
        match (param.spec.storage, shape.as_slice()) {
            (WeightStorage::Quantized(format), &[n, k]) => {
                Weight::quantized(self.all.view(start, param.n_elements())?, format, [n, k])
            }
            _ => {
                let view = self.all.view(start, shape)?;
                Ok(match reducer.sink(&param.spec.name) {
                    Some(sink) => Weight::trainable(view, sink.clone()),
                    None => Weight::frozen(view),
                })
            }
        }
    }

    /// Starts the all-gather of a run that is not whole.
    pub(crate) fn prefetch(&self) -> Result<()> {
        let mut gathering = self.gathering.lock().unwrap_or_else(PoisonError::into_inner);
        if gathering.is_none() && !self.all.is_at_hand() {
            *gathering = Some(self.shard.start_all_gather(&self.own_on_device()?)?);
        }
        Ok(())
    }

    fn own_on_device(&self) -> Result<Tensor> {
        if self.own.device().same_device(&self.device) {
            return Ok(self.own.clone());
        }
        let own = Tensor::zeros(self.own.shape(), self.own.dtype(), &self.device)?;
        send_into(&own, &self.own)?;
        Ok(own)
    }

    /// Makes the whole run available on the device.
    pub(crate) fn unshard(&self) -> Result<()> {
        self.prefetch()?;
        match self.gathering.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(gathering) => self.all.put(gathering.wait()?),
            None => Ok(()),
        }
    }

    /// Frees what other ranks or the host keep.
    pub(crate) fn reshard(&self) {
        if !self.is_resident {
            self.all.take();
        }
    }

    /// Gives the other ranks this rank's changed shard, and takes theirs. A run that is not resident is gathered anew later.
    pub(crate) fn publish(&self) -> Result<()> {
        if !self.is_resident {
            // A run that is gathered, or being gathered, holds stale values.
            self.gathering.lock().unwrap_or_else(PoisonError::into_inner).take();
            self.all.take();
            return Ok(());
        }
        let gathered = self.shard.all_gather(&self.own)?;
        // A group of one returns its input.
        if gathered.id() == self.own.id() { Ok(()) } else { copy_into(&self.all.get()?, &gathered) }
    }

    /// Returns the whole run, which must be unsharded.
    pub(crate) fn whole(&self) -> Result<Tensor> {
        self.all.get()
    }

    /// Returns whether the run is stored whole on each rank.
    pub(crate) fn is_resident(&self) -> bool {
        self.is_resident
    }

    fn bytes(&self, device: &Device) -> u64 {
        // The shard of a resident run is a view of it.
        of_buffer(&self.all) + if self.is_resident { 0 } else { of_tensor(&self.own, device) }
    }
}
