//! Weights that ops read: flat buffers that stay resident, or are all-gathered (unsharded) before use.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Result, Tensor};
use candlewick_comm::{Collective, Pending, Reduce};
use candlewick_model::ParamGroupKind;
use candlewick_ops::{FlatBuffer, Fp8Layers, Weight, WeightStorage, copy_into, upload_into};

use super::bytes::{StoreBytes, of_buffer, of_tensor};
use super::fp8_gather::Fp8Gather;
use super::layout::{ParamGroup, ParamLayout, PlacedParam};
use super::offload::MemoryLocation;
use super::reducer::GradReducer;
use super::sharding::ZeroStage;

/// Weight buffers of all parameter groups of a stage.
pub(crate) struct ShardedBuffers {
    /// Buffers in the order of the layout's groups.
    groups: Vec<GroupWeights>,
    /// Views of the buffers by parameter name.
    weights: HashMap<String, Weight>,
}

/// Flat weight buffer of one parameter group.
pub(crate) struct GroupWeights {
    /// The unsharded buffer, of which ops hold views.
    all: FlatBuffer,
    /// This rank's shard: a view of `all` if that is resident. It may be in CPU memory.
    pub(crate) own: Tensor,
    /// True if the unsharded buffer stays on the device.
    is_resident: bool,
    /// True if the buffer belongs to another store.
    is_shared: bool,
    shard: Arc<dyn Collective>,
    /// Device that computes.
    device: Device,
    gathering: Mutex<Option<Gathering>>,
    /// Weights that are gathered as FP8 codes while they multiply in FP8; `None` if the buffer is gathered in its dtype.
    fp8: Option<Fp8Gather>,
}

/// Running all-gather of a buffer.
enum Gathering {
    /// Elements in the buffer's dtype.
    Elements(Pending),
    /// FP8 codes.
    Fp8Codes(Pending),
}

impl ShardedBuffers {
    /// Allocates zero-filled buffers. Trainable weights get the gradient sinks of `reducer`. Frozen groups that `base` has,
    /// too, share its buffers.
    pub(crate) fn new(
        layout: &ParamLayout,
        reducer: &GradReducer,
        dtype: DType,
        device: &Device,
        base: Option<(&ParamLayout, &Self)>,
    ) -> Result<Self> {
        let zero_stage = layout.sharding.zero_stage;
        let (mut groups, mut weights) = (Vec::new(), HashMap::new());
        for group in &layout.groups {
            let shared = base.and_then(|(layout, buffers)| buffers.shared(layout, group, group.storage.dtype(dtype)));
            let of_group = match shared {
                Some(shared) => shared,
                None => GroupWeights::zeros(group, zero_stage, group.storage.dtype(dtype), device)?,
            };
            for param in &group.params {
                weights.insert(param.spec.name.clone(), of_group.weight(param, reducer)?);
            }
            groups.push(of_group);
        }
        Ok(Self { groups, weights })
    }

    /// Returns the resident buffer of a frozen group with the same layout and dtype, shared.
    fn shared(&self, layout: &ParamLayout, group: &ParamGroup, dtype: DType) -> Option<GroupWeights> {
        let is_same = |(other, weights): &(&ParamGroup, &GroupWeights)| {
            let is_frozen = !group.is_trainable && !other.is_trainable;
            is_frozen && weights.is_resident && weights.own.dtype() == dtype && group.has_layout_of(other)
        };
        layout.groups.iter().zip(&self.groups).find(is_same).map(|(_, weights)| weights.share())
    }

    /// Returns true if the group's buffer belongs to another store.
    pub(crate) fn is_shared(&self, group_idx: usize) -> bool {
        self.groups[group_idx].is_shared
    }

    /// Returns a parameter as an op's weight.
    pub(crate) fn weight(&self, name: &str) -> Weight {
        self.weights[name].clone()
    }

    /// Attaches the weights of `fp8` to their layers.
    pub(crate) fn attach_fp8(&mut self, fp8: &Arc<Fp8Layers>, layout: &ParamLayout) {
        for param in layout.groups.iter().flat_map(|group| &group.params) {
            let name = param.spec.name.as_str();
            let layer = fp8.layer(name.strip_suffix(".weight").unwrap_or(name));
            let (Some(layer), Some(weight)) = (layer, self.weights.get_mut(name)) else { continue };
            let layer = match param.spec.group {
                ParamGroupKind::Dense => layer,
                ParamGroupKind::Expert => {
                    let experts = param.experts(layer.n_matrices());
                    layer.with_matrices(experts)
                }
            };
            *weight = weight.clone().with_fp8(layer);
        }
    }

    /// Gathers the groups that the layout marks as codes of `fp8`.
    pub(crate) fn attach_fp8_gathers(&mut self, layout: &ParamLayout, fp8: &Arc<Fp8Layers>) -> Result<()> {
        for (group, weights) in layout.groups.iter().zip(&mut self.groups).filter(|(group, _)| group.gathers_fp8) {
            weights.fp8 = Some(Fp8Gather::new(group, fp8)?);
        }
        Ok(())
    }

    /// Sets the scales of the weights that are gathered as FP8 codes, for a step. Collective over `shard`.
    ///
    /// The amaxes of whole weights take one all-reduce, and none if scales are delayed.
    pub(crate) fn start_fp8_step(&self, fp8: &Fp8Layers, shard: &dyn Collective) -> Result<()> {
        let gathers: Vec<_> = self.groups.iter().filter_map(|group| Some((group, group.fp8.as_ref()?))).collect();
        if gathers.is_empty() {
            return Ok(());
        }
        // What is gathered has the scales of an earlier step.
        gathers.iter().for_each(|(group, _)| group.discard());
        let own = gathers.iter().map(|(group, gather)| gather.record_amaxes(&group.own, &group.device));
        let own = Tensor::cat(&own.collect::<Result<Vec<_>>>()?, 0)?;
        let amaxes = if fp8.weight_scales_need_amaxes() { shard.all_reduce(&own, Reduce::Max)? } else { own };
        let mut first = 0;
        gathers.iter().try_for_each(|(_, gather)| {
            let of_group = amaxes.narrow(0, first, gather.n_weights())?;
            first += gather.n_weights();
            gather.set_scales(&of_group)
        })
    }

    /// Drops the FP8 copies of all weights.
    pub(crate) fn drop_fp8_copies(&self) {
        self.groups.iter().for_each(|group| group.all.drop_fp8_copies());
    }

    /// Returns the buffer of a group.
    pub(crate) fn group_weights(&self, group_idx: usize) -> &GroupWeights {
        &self.groups[group_idx]
    }

    /// Returns the bytes of the weights on `device`.
    pub(crate) fn device_bytes(&self, device: &Device) -> StoreBytes {
        StoreBytes { weights: self.groups.iter().map(|group| group.bytes(device)).sum(), ..StoreBytes::default() }
    }
}

impl GroupWeights {
    fn zeros(group: &ParamGroup, zero_stage: ZeroStage, dtype: DType, device: &Device) -> Result<Self> {
        let location = group.offload.weights;
        let is_resident = zero_stage != ZeroStage::Three && location == MemoryLocation::Device;
        let (n, shard) = (group.numel, &group.shard);
        let (all, own) = match is_resident {
            true => {
                let all = Tensor::zeros(n, dtype, device)?;
                let own = all.narrow(0, shard.start, shard.len())?;
                (FlatBuffer::from_tensor(all), own)
            }
            false => (FlatBuffer::unallocated(n, dtype), Tensor::zeros(shard.len(), dtype, location.device(device))?),
        };
        let shard = Arc::clone(&group.ranks.shard);
        let (device, gathering) = (device.clone(), Mutex::default());
        Ok(Self { all, own, is_resident, is_shared: false, shard, device, gathering, fp8: None })
    }

    /// Returns a group that reads this group's resident buffer.
    fn share(&self) -> Self {
        Self {
            all: self.all.clone(),
            own: self.own.clone(),
            is_resident: true,
            is_shared: true,
            shard: Arc::clone(&self.shard),
            device: self.device.clone(),
            gathering: Mutex::default(),
            fp8: None,
        }
    }

    /// Returns the view of a parameter.
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

    /// Starts the all-gather of a sharded buffer.
    pub(crate) fn prefetch(&self) -> Result<()> {
        let mut gathering = self.lock_gathering();
        if gathering.is_none() && !self.is_unsharded() {
            let own = self.own_on_device()?;
            *gathering = Some(match self.enabled_fp8() {
                Some(fp8) => Gathering::Fp8Codes(self.shard.start_all_gather(&fp8.quantize(&own)?)?),
                None => Gathering::Elements(self.shard.start_all_gather(&own)?),
            });
        }
        Ok(())
    }

    /// Returns the weights to gather as FP8 codes now.
    fn enabled_fp8(&self) -> Option<&Fp8Gather> {
        self.fp8.as_ref().filter(|fp8| fp8.is_enabled())
    }

    fn is_unsharded(&self) -> bool {
        self.all.is_allocated() || (self.enabled_fp8().is_some() && self.all.has_fp8_copies())
    }

    fn lock_gathering(&self) -> MutexGuard<'_, Option<Gathering>> {
        self.gathering.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn own_on_device(&self) -> Result<Tensor> {
        if self.own.device().same_device(&self.device) {
            return Ok(self.own.clone());
        }
        let own = Tensor::zeros(self.own.shape(), self.own.dtype(), &self.device)?;
        upload_into(&own, &self.own)?;
        Ok(own)
    }

    /// Makes the unsharded buffer, or the FP8 copies of its weights, available on the device.
    pub(crate) fn unshard(&self) -> Result<()> {
        self.prefetch()?;
        let gathering = self.lock_gathering().take();
        match gathering {
            Some(Gathering::Elements(elements)) => self.all.materialize(elements.wait()?),
            Some(Gathering::Fp8Codes(codes)) => {
                let fp8 = self.fp8.as_ref().expect("codes are of FP8 weights");
                self.all.hold_fp8_copies(fp8.weights(&codes.wait()?)?);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Frees what is or is being gathered, and forgets the scales of FP8 codes.
    fn discard(&self) {
        self.lock_gathering().take();
        if let Some(fp8) = &self.fp8 {
            fp8.clear_scales();
        }
        self.reshard();
    }

    /// Frees the unsharded buffer (FSDP's reshard).
    pub(crate) fn reshard(&self) {
        if !self.is_resident {
            self.all.release();
        }
    }

    /// Distributes this rank's updated shard. A buffer that is not resident is all-gathered at its next use.
    pub(crate) fn publish(&self) -> Result<()> {
        if !self.is_resident {
            // A buffer that is or is being gathered holds stale values.
            self.discard();
            return Ok(());
        }
        self.all.drop_fp8_copies();
        let whole = self.all.data()?;
        // The shard of a resident buffer is a view of it.
        if self.shard.all_gather_in_place(&whole)? {
            return Ok(());
        }
        let gathered = self.shard.all_gather(&self.own)?;
        // A group of one returns its input.
        if gathered.id() == self.own.id() { Ok(()) } else { copy_into(&whole, &gathered) }
    }

    /// Returns the unsharded buffer, which must be available.
    pub(crate) fn whole(&self) -> Result<Tensor> {
        self.all.data()
    }

    /// Returns true if the unsharded buffer stays on the device.
    pub(crate) fn is_resident(&self) -> bool {
        self.is_resident
    }

    fn bytes(&self, device: &Device) -> u64 {
        if self.is_shared {
            return 0;
        }
        // The shard of a resident buffer is a view of it.
        of_buffer(&self.all) + if self.is_resident { 0 } else { of_tensor(&self.own, device) }
    }
}
