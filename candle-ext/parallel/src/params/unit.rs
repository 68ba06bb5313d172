//! The parameters of one unit: where each lies in the unit's flat runs.
//!
//! Frozen ones lie in a run of their own. Between parameters lie zeros that stay zeros. Of the trainable ones those with weight
//! decay come first, so that one optimizer call serves each half.

use std::collections::BTreeMap;
use std::ops::Range;

use candle_core::{Device, Result, Tensor};
use candlewick_model::{ParamSpec, Unit};
use candlewick_ops::{Buffer, GradSink, Weight, copy_into};

use super::flat::Weights;
use super::sharing::{ALIGNMENT, Sharing};
use super::trainable::Trainable;
use super::{Formats, Homes, Mode, ParamState, StoreBytes};
use crate::placement::Place;

pub(crate) struct UnitStore {
    pub(crate) unit: Unit,
    /// The unit as its ops see it: without what only other ranks use.
    pub(crate) used: Unit,
    slots: BTreeMap<String, Slot>,
    frozen: Weights,
    pub(crate) trainable: Option<Trainable>,
}

struct Slot {
    /// The shape of all of the parameter, and what of it is here.
    whole: Vec<usize>,
    place: Place,
    /// Its elements in the run, and those behind it that other ranks have more.
    range: Range<usize>,
    is_trainable: bool,
    /// Its elements here, in their shape.
    weight: Weight,
}

impl UnitStore {
    pub(crate) fn new(
        unit: &Unit,
        formats: Formats,
        mode: Mode,
        (device, homes): (&Device, Homes),
        sharing: &Sharing,
    ) -> Result<Self> {
        let is_trainable = |spec: &ParamSpec| mode == Mode::Train && spec.trainable;
        let tensor = &sharing.tensor;
        let ranks = [tensor.ranks.rank(), tensor.ranks.size()];
        let mut placed = Vec::new();
        let mut place = |kind: &dyn Fn(&ParamSpec) -> bool, start: usize| {
            let mut end = start;
            for spec in unit.params.iter().filter(|spec| kind(spec)) {
                let place = Place::of(spec, tensor.norms, ranks)?;
                let range = end..end + place.most(&spec.shape);
                end = range.end.next_multiple_of(ALIGNMENT);
                placed.push((spec.clone(), place, range));
            }
            Ok::<_, candle_core::Error>(end)
        };
        let n_frozen = place(&|spec| !is_trainable(spec), 0)?;
        let n_decayed = place(&|spec| is_trainable(spec) && spec.decay, 0)?;
        let n_trainable = place(&|spec| is_trainable(spec) && !spec.decay, n_decayed)?;
        let trained = || placed.iter().filter(|(spec, ..)| is_trainable(spec));
        let of = |kind: fn(&Place) -> bool| {
            trained().filter(move |(_, place, _)| kind(place)).map(|(.., range)| range.clone()).collect()
        };
        let mut trainable = match sharing.padded(n_trainable) {
            0 => None,
            n => {
                let mut flat = Trainable::zeros(n, n_decayed, formats, (device, homes), sharing)?;
                (flat.parts, flat.summed) = (of(|place| matches!(place, Place::Part(_))), of(Place::is_summed));
                Some(flat)
            }
        };
        let frozen = Weights::zeros(sharing.padded(n_frozen.max(1)), formats.compute, device, homes.weights, sharing)?;
        let mut slots = BTreeMap::new();
        let mut used = unit.clone();
        for (spec, place, range) in placed {
            let view = |buffer: &Buffer| buffer.view(range.start, place.shape(&spec.shape));
            let weight = match trainable.as_ref().filter(|_| is_trainable(&spec)) {
                None => Weight::frozen(view(&frozen.all)?),
                Some(flat) => Weight::trainable(view(&flat.weights.all)?, GradSink::new(view(&flat.grads.all)?)?),
            };
            if place == Place::SummedOnFirst && tensor.ranks.rank() > 0 {
                used.remove_bias(&spec.name);
            }
            let is_trainable = is_trainable(&spec);
            slots.insert(spec.name, Slot { whole: spec.shape, place, range, is_trainable, weight });
        }
        if let Some(flat) = &mut trainable {
            let is_matrix = |slot: &&Slot| slot.is_trainable && slot.range.start < n_decayed;
            let sinks = slots.values().filter(is_matrix).filter_map(|slot| slot.weight.sink().cloned());
            flat.grads.overwrite(sinks.collect(), n_decayed);
        }
        Ok(Self { unit: unit.clone(), used, slots, frozen, trainable })
    }

    /// Returns every weight of the unit that is used here.
    pub(crate) fn weights(&self) -> impl Iterator<Item = (String, Weight)> {
        self.used.params.iter().map(|spec| (spec.name.clone(), self.slots[&spec.name].weight.clone()))
    }

    /// Returns one of them.
    pub(crate) fn weight(&self, name: &str) -> Weight {
        self.slots[name].weight.clone()
    }

    /// Returns the bytes that the unit takes on `device` now.
    pub(crate) fn device_bytes(&self, device: &Device) -> StoreBytes {
        let trainable = self.trainable.as_ref().map(|flat| StoreBytes::of_trainable(flat, device));
        StoreBytes::of_weights(&self.frozen, device).plus(trainable.unwrap_or_default())
    }

    /// The unit's runs of weights.
    pub(crate) fn runs(&self) -> impl Iterator<Item = &Weights> {
        std::iter::once(&self.frozen).chain(self.trainable.iter().map(|flat| &flat.weights))
    }

    /// Sets a parameter, of which every rank gives all. What the ops read of trainable ones is to be refreshed.
    pub(crate) fn set(&self, spec: &ParamSpec, value: &Tensor, sharing: &Sharing) -> Result<()> {
        let slot = &self.slots[&spec.name];
        let (target, share) = match self.trainable.as_ref().filter(|_| slot.is_trainable) {
            Some(flat) => (flat.master.clone(), flat.own.clone()),
            None if self.frozen.all.is_at_hand() => (self.frozen.all.get()?, 0..self.frozen.all.len()),
            None => (self.frozen.own.clone(), sharing.own(self.frozen.all.len())),
        };
        let Some(piece) = slot.piece(&share) else { return Ok(()) };
        let value = slot.place.cut(&value.reshape(slot.whole.as_slice())?)?.flatten_all()?;
        let value = value.narrow(0, piece.start - slot.range.start, piece.len())?;
        let target = target.narrow(0, piece.start - share.start, piece.len())?;
        copy_into(&target, &value.to_device(target.device())?)
    }

    /// Returns the parameters' values in model order, of `trainable` for those that are trained: all of their run. All ranks
    /// call it.
    pub(crate) fn values(&self, trainable: Option<&Tensor>, sharing: &Sharing) -> Result<Vec<Tensor>> {
        let of = |spec: &ParamSpec| {
            let slot = &self.slots[&spec.name];
            let run = match (slot.is_trainable, &self.trainable) {
                (true, Some(flat)) => trainable.map_or_else(|| flat.weights.all.get(), |run| Ok(run.clone()))?,
                _ => self.frozen.all.get()?,
            };
            let piece = run.narrow(0, slot.range.start, slot.range.len())?;
            slot.place.gather(&piece, &slot.whole, &*sharing.tensor.ranks)
        };
        self.unit.params.iter().map(of).collect()
    }

    /// Returns this rank's part of the trainable parameters with their gradients and optimizer state, in model order.
    pub(crate) fn states(&self, is_owner: bool, sharing: &Sharing) -> Result<Vec<ParamState>> {
        let Some(flat) = &self.trainable else { return Ok(Vec::new()) };
        let mut states = Vec::new();
        for spec in &self.unit.params {
            let slot = &self.slots[&spec.name];
            let Some(piece) = slot.piece(&flat.own).filter(|_| slot.is_trainable) else { continue };
            let part = |own: &Tensor| own.narrow(0, piece.start - flat.own.start, piece.len());
            let in_slot = piece.start - slot.range.start..piece.end - slot.range.start;
            let (columns, before) = slot.columns();
            states.push(ParamState {
                name: spec.name.clone(),
                shape: slot.whole.clone(),
                columns,
                range: before + in_slot.start..before + in_slot.end,
                is_only: is_owner && (matches!(slot.place, Place::Part(_)) || sharing.tensor.ranks.rank() == 0),
                master: part(&flat.master)?,
                grad: part(&flat.grads.sums()?)?,
                exp_avg: part(&flat.exp_avg)?,
                exp_avg_sq: part(&flat.exp_avg_sq)?,
            });
        }
        Ok(states)
    }
}

impl Slot {
    /// What of it lies in a share of its run.
    fn piece(&self, share: &Range<usize>) -> Option<Range<usize>> {
        let end = self.range.start + self.weight.dims().iter().product::<usize>();
        let piece = self.range.start.max(share.start)..end.min(share.end);
        (!piece.is_empty()).then_some(piece)
    }

    /// Which columns of the whole it has, and how many elements of these come before its own.
    fn columns(&self) -> (Range<usize>, usize) {
        let width = self.whole.last().copied().unwrap_or(1);
        match &self.place {
            Place::Part(slice) if slice.dim == 0 => {
                let row: usize = self.whole[1..].iter().product();
                (0..if self.whole.len() > 1 { width } else { self.whole[0] }, slice.start * row)
            }
            Place::Part(slice) => (slice.start..slice.start + slice.len, 0),
            _ => (0..width, 0),
        }
    }
}
