//! Gradient reduction that overlaps with backward: reduce-scatter over shards, all-reduce over replicas.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Result, Tensor};
use candlewick_comm::{Collective, Pending, Reduce};
use candlewick_model::ParamGroupKind;
use candlewick_ops::{GradSink, HostBuffer, copy_into, count_zeros, sum_of_squares};

use super::bytes::StoreBytes;
use super::grads::GroupGrads;
use super::layout::{ParamGroup, ParamLayout};
use super::micro_batch::MicroBatch;
use super::offload::MemoryLocation;
use super::sharding::GroupRanks;
use crate::placement::Placement;

/// Gradients of all trainable groups of a stage.
pub(crate) struct GradReducer {
    /// Gradient buffers by group index.
    grads: BTreeMap<usize, GroupGrads>,
    sinks: HashMap<String, GradSink>,
    dtype: DType,
    /// Dtype in which ranks send gradients and may round partial sums; `None` sends `dtype` and sums in f32.
    reduce_dtype: Option<DType>,
    device: Device,
    in_flight: Mutex<InFlight>,
    /// Copies to host memory of this step's gradients, by group index: those that offloaded optimizers read.
    host_copies: Mutex<BTreeMap<usize, HostBuffer>>,
}

/// Parameter groups whose gradients are being reduced, oldest first. All ranks start collectives in the same order.
#[derive(Default)]
struct InFlight {
    /// Running reduce-scatters.
    scattering: VecDeque<ReductionInFlight>,
    /// Running all-reduces over replicas.
    summing: VecDeque<ReductionInFlight>,
}

/// Collective of a group's gradients.
struct ReductionInFlight {
    group_idx: usize,
    micro_batch: MicroBatch,
    pending: Pending,
}

/// Maximum number of groups in each collective at a time.
const MAX_IN_FLIGHT: usize = 1;

/// Most groups whose gradients are in host memory at a time: one that is read and one that is copied.
const MAX_HOST_COPIES: usize = 2;

/// Most elements of partial gradients in one all-reduce, unless a single parameter has more.
const BUCKET_ELEMENTS: usize = 1 << 20;

impl GradReducer {
    /// Allocates zero-filled gradients of the trainable groups.
    pub(crate) fn new(layout: &ParamLayout, dtype: DType, device: &Device) -> Result<Self> {
        let (mut grads, mut sinks) = (BTreeMap::new(), HashMap::new());
        for (group_idx, group) in layout.trainable() {
            let (of_group, sinks_of_group) = GroupGrads::zeros(group, layout.sharding.zero_stage, dtype, device)?;
            grads.insert(group_idx, of_group);
            sinks.extend(sinks_of_group);
        }
        Ok(Self {
            grads,
            sinks,
            dtype,
            reduce_dtype: None,
            device: device.clone(),
            in_flight: Mutex::default(),
            host_copies: Mutex::default(),
        })
    }

    /// Sends gradients in `reduce_dtype` to other ranks.
    pub(crate) fn with_reduce_dtype(self, reduce_dtype: DType) -> Self {
        Self { reduce_dtype: Some(reduce_dtype), ..self }
    }

    /// Returns the gradient sink of a trainable parameter.
    pub(crate) fn sink(&self, name: &str) -> Option<&GradSink> {
        self.sinks.get(name)
    }

    /// Returns a group's gradient buffers; `None` for a frozen group.
    pub(crate) fn group_grads(&self, group_idx: usize) -> Option<&GroupGrads> {
        self.grads.get(&group_idx)
    }

    /// Returns this rank's shard of a trainable group's reduced gradients.
    pub(crate) fn reduced(&self, group_idx: usize) -> Result<Tensor> {
        self.grads[&group_idx].reduced()
    }

    /// Clears all gradients.
    pub(crate) fn clear(&self) -> Result<()> {
        self.host_copies.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.grads.values().try_for_each(GroupGrads::clear)
    }

    /// Returns the copy of a group's reduced gradients to host memory, which may have started during backward.
    pub(crate) fn host_copy(&self, group_idx: usize) -> Result<HostBuffer> {
        let started = self.host_copies.lock().unwrap_or_else(PoisonError::into_inner).remove(&group_idx);
        started.map_or_else(|| HostBuffer::start(&self.reduced(group_idx)?), Ok)
    }

    /// Starts the reduction of a trainable group's gradients of a micro-batch, or of all if they are resident.
    pub(crate) fn start(&self, layout: &ParamLayout, group_idx: usize, micro_batch: MicroBatch) -> Result<()> {
        let unreduced = self.grads[&group_idx].take_unreduced()?;
        let mut in_flight = self.in_flight.lock().unwrap_or_else(PoisonError::into_inner);
        let ranks = &layout.groups[group_idx].ranks;
        let pending = match self.reduce_dtype.filter(|_| ranks.shard.size() * ranks.replicate.size() > 1) {
            Some(dtype) => ranks.shard.start_reduce_scatter_in_dtype(&unreduced.to_dtype(dtype)?)?,
            None => ranks.shard.start_reduce_scatter(&unreduced)?,
        };
        drop(unreduced);
        in_flight.scattering.push_back(ReductionInFlight { group_idx, micro_batch, pending });
        self.advance(&mut in_flight, layout, MAX_IN_FLIGHT)
    }

    /// Waits until all gradients are reduced.
    pub(crate) fn wait(&self, layout: &ParamLayout) -> Result<()> {
        self.advance(&mut self.in_flight.lock().unwrap_or_else(PoisonError::into_inner), layout, 0)?;
        layout.kinds().try_for_each(|(kind, _)| self.reduce_partial_grads(layout, kind))?;
        self.reduce_tied_grads(layout)
    }

    fn advance(&self, in_flight: &mut InFlight, layout: &ParamLayout, max_in_flight: usize) -> Result<()> {
        let InFlight { scattering, summing } = in_flight;
        while scattering.len() > max_in_flight {
            let Some(ReductionInFlight { group_idx, micro_batch, pending }) = scattering.pop_front() else { break };
            let replicate = &layout.groups[group_idx].ranks.replicate;
            let sum = pending.wait()?;
            let pending = match self.reduce_dtype {
                Some(_) => replicate.start_all_reduce_in_dtype(&sum)?,
                None => replicate.start_all_reduce(&sum, Reduce::Sum)?,
            };
            summing.push_back(ReductionInFlight { group_idx, micro_batch, pending });
        }
        while summing.len() > max_in_flight {
            let Some(ReductionInFlight { group_idx, micro_batch, pending }) = summing.pop_front() else { break };
            self.grads[&group_idx].store_reduced(pending.wait()?.to_dtype(self.dtype)?)?;
            if micro_batch == MicroBatch::Last {
                self.start_host_copy(layout, group_idx)?;
            }
        }
        Ok(())
    }

    /// Starts to copy a group's gradients to host memory if the optimizer is there, no later exchange changes them, and the host
    /// updates the group first.
    fn start_host_copy(&self, layout: &ParamLayout, group_idx: usize) -> Result<()> {
        let group = &layout.groups[group_idx];
        let is_partial = group.params.iter().any(|param| param.placement.is_partial());
        let is_tied = layout.tied_groups().any(|tied| tied == group_idx);
        let mut host_copies = self.host_copies.lock().unwrap_or_else(PoisonError::into_inner);
        if group.offload.optimizer == MemoryLocation::Host
            && !is_partial
            && !is_tied
            && host_copies.len() < MAX_HOST_COPIES
        {
            host_copies.insert(group_idx, HostBuffer::start(&self.reduced(group_idx)?)?);
        }
        Ok(())
    }

    /// Returns true if the copy of a group's gradients to host memory has started.
    pub(crate) fn has_host_copy(&self, group_idx: usize) -> bool {
        self.host_copies.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&group_idx)
    }

    /// All-reduces the partial gradients of replicated parameters over the tensor axis. Small ones share a call.
    fn reduce_partial_grads(&self, layout: &ParamLayout, kind: ParamGroupKind) -> Result<()> {
        let groups = || layout.trainable().filter(|(_, group)| group.kind == kind);
        let Some((_, first)) = groups().find(|(_, group)| group.params.iter().any(|it| it.placement.is_partial()))
        else {
            return Ok(());
        };
        let mut views = Vec::new();
        for (group_idx, group) in groups() {
            let reduced = self.reduced(group_idx)?;
            for piece in group.in_shard(|param| param.placement.is_partial()) {
                views.push(reduced.narrow(0, piece.start, piece.len())?);
            }
        }
        if views.is_empty() {
            // Every rank of the axis must take part, with an element even if its shard has none of them.
            views.push(Tensor::zeros(1, self.dtype, &self.device)?);
        }
        buckets(views, BUCKET_ELEMENTS).iter().try_for_each(|bucket| all_reduce_in_place(bucket, &*first.ranks.tensor))
    }

    /// All-reduces the gradients of parameters that two stages tie.
    fn reduce_tied_grads(&self, layout: &ParamLayout) -> Result<()> {
        let tied_embedding = &layout.sharding.stages.tied_embedding;
        for group_idx in layout.tied_groups() {
            let grad = self.reduced(group_idx)?;
            let sum = tied_embedding.all_reduce(&grad, Reduce::Sum)?;
            // A group of one returns its input.
            if sum.id() != grad.id() {
                copy_into(&grad, &sum)?;
            }
        }
        Ok(())
    }

    /// Returns the sums of squares of all gradients, f64, one for each group kind and unit.
    ///
    /// Each kind is summed over the ranks that hold distinct elements of it.
    pub(crate) fn squares(&self, layout: &ParamLayout) -> Result<Tensor> {
        let of_kind = |(kind, ranks): (ParamGroupKind, &GroupRanks)| {
            let of_unit = |unit_idx| {
                let groups = layout.groups_of(unit_idx).filter(|_| layout.owns(unit_idx));
                let trained = groups.filter(|idx| layout.groups[*idx].kind == kind && self.grads.contains_key(idx));
                let squares = trained.map(|idx| self.distinct_squares(idx, &layout.groups[idx]));
                let sum = squares.reduce(|sum, squares| sum? + squares?);
                sum.unwrap_or_else(|| Tensor::zeros((), DType::F64, &self.device))
            };
            let squares = (0..layout.units.len()).map(of_unit).collect::<Result<Vec<_>>>()?;
            Ok(ranks.distinct.all_reduce(&Tensor::stack(&squares, 0)?, Reduce::Sum)?)
        };
        Tensor::cat(&layout.kinds().map(of_kind).collect::<Result<Vec<_>>>()?, 0)
    }

    /// Returns the sum of squared gradients of this rank's shard, f64.
    ///
    /// Only rank 0 of the tensor axis counts replicated parameters.
    fn distinct_squares(&self, group_idx: usize, group: &ParamGroup) -> Result<Tensor> {
        let reduced = self.reduced(group_idx)?;
        if group.ranks.tensor.rank() == 0 {
            return sum_of_squares(&reduced);
        }
        let none = Tensor::zeros((), DType::F64, reduced.device())?;
        let pieces = group.in_shard(|param| matches!(param.placement, Placement::Shard(_)));
        pieces
            .map(|piece| sum_of_squares(&reduced.narrow(0, piece.start, piece.len())?))
            .try_fold(none, |sum, part| sum + part?)
    }

    /// Returns the number of gradient elements that are zero, an f64 scalar. Padding does not count. Collective.
    pub(crate) fn zeros(&self, layout: &ParamLayout) -> Result<Tensor> {
        let none = || Tensor::zeros((), DType::F64, &self.device);
        let of_kind = |(kind, ranks): (ParamGroupKind, &GroupRanks)| {
            let owned = (0..layout.units.len()).filter(|unit_idx| layout.owns(*unit_idx));
            let groups = owned.flat_map(|unit_idx| layout.groups_of(unit_idx));
            let of_group = |group_idx: usize| self.distinct_zeros(group_idx, &layout.groups[group_idx]);
            let trained = groups.filter(|idx| layout.groups[*idx].kind == kind && self.grads.contains_key(idx));
            let own = trained.map(of_group).try_fold(none()?, |sum, part| sum + part?)?;
            Ok(ranks.distinct.all_reduce(&own, Reduce::Sum)?)
        };
        layout.kinds().map(of_kind).try_fold(none()?, |sum, part: Result<Tensor>| sum + part?)
    }

    /// Returns the number of zeros in this rank's shard of a group's gradients, f64.
    ///
    /// Only rank 0 of the tensor axis counts replicated parameters.
    fn distinct_zeros(&self, group_idx: usize, group: &ParamGroup) -> Result<Tensor> {
        let reduced = self.reduced(group_idx)?;
        let is_counted =
            |placement: &Placement| group.ranks.tensor.rank() == 0 || matches!(placement, Placement::Shard(_));
        let counted = group.params.iter().filter(|param| is_counted(&param.placement));
        let pieces = counted.filter_map(|param| param.piece(&group.shard));
        pieces
            .map(|piece| count_zeros(&reduced.narrow(0, piece.start - group.shard.start, piece.len())?))
            .try_fold(Tensor::zeros((), DType::F64, reduced.device())?, |sum, part| sum + part?)
    }

    /// Returns the bytes of the gradients.
    pub(crate) fn device_bytes(&self) -> StoreBytes {
        StoreBytes { gradients: self.grads.values().map(GroupGrads::bytes).sum(), ..StoreBytes::default() }
    }
}

/// Groups vectors, in order, into buckets of at most `limit` elements. A longer vector has a bucket of its own.
fn buckets(vectors: Vec<Tensor>, limit: usize) -> Vec<Vec<Tensor>> {
    let mut buckets: Vec<Vec<Tensor>> = Vec::new();
    let mut n_elements = 0;
    for vector in vectors {
        n_elements += vector.elem_count();
        match buckets.last_mut() {
            Some(bucket) if n_elements <= limit => bucket.push(vector),
            _ => {
                n_elements = vector.elem_count();
                buckets.push(vec![vector]);
            }
        }
    }
    buckets
}

/// Sums vectors over the ranks of a group, in one call. A single vector is not copied before the call.
fn all_reduce_in_place(vectors: &[Tensor], group: &dyn Collective) -> Result<()> {
    let own = match vectors {
        [single] => single.clone(),
        several => Tensor::cat(several, 0)?,
    };
    let sum = group.all_reduce(&own, Reduce::Sum)?;
    // A group of one returns its input.
    if sum.id() == own.id() {
        return Ok(());
    }
    let mut start = 0;
    for vector in vectors {
        let n = vector.elem_count();
        copy_into(vector, &sum.narrow(0, start, n)?)?;
        start += n;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candlewick_comm::{Options, threads};

    use super::*;

    #[test]
    fn partial_gradients_are_summed_in_buckets() {
        let results = threads::run(2, Options::default(), |world| -> Result<(Vec<usize>, Vec<f32>)> {
            let rank = world.rank() as f32 + 1.0;
            let all = Tensor::arange(0f32, 20., &Device::Cpu)?.affine(f64::from(rank), 0.0)?;
            // The last element belongs to no vector.
            let ranges = [0..3, 3..8, 8..17, 17..18, 18..19];
            let vectors = ranges.map(|range| all.narrow(0, range.start, range.len()).unwrap()).to_vec();
            let buckets = buckets(vectors, 8);
            buckets.iter().try_for_each(|bucket| all_reduce_in_place(bucket, &*world.group()))?;
            Ok((buckets.iter().map(Vec::len).collect(), all.to_vec1()?))
        });
        for (rank, (sizes, all)) in results.unwrap().into_iter().enumerate() {
            assert_eq!(sizes, [2, 1, 2]);
            let own = 19.0 * (rank as f32 + 1.0);
            assert_eq!(all, (0..19).map(|i| 3.0 * i as f32).chain([own]).collect::<Vec<_>>());
        }
    }
}
