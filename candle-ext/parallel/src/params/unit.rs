//! The parameters of one unit: where each lies in the unit's flat runs.
//!
//! Frozen ones lie in a run of their own. Between parameters lie zeros that stay zeros. Of the trainable ones those with weight
//! decay come first, so that one optimizer call serves each half.

use std::collections::BTreeMap;
use std::ops::Range;

use candle_core::{Device, Result, Tensor};
use candlewick_model::{ParamSpec, Unit};
use candlewick_ops::{GradSink, Weight, copy_into};

use super::flat::Weights;
use super::sharing::{ALIGNMENT, Sharing};
use super::trainable::Trainable;
use super::{Formats, Home, Mode, ParamState};

pub(crate) struct UnitStore {
    pub(crate) unit: Unit,
    slots: BTreeMap<String, Slot>,
    frozen: Weights,
    pub(crate) trainable: Option<Trainable>,
}

struct Slot {
    shape: Vec<usize>,
    /// Its elements in the run.
    range: Range<usize>,
    is_trainable: bool,
    weight: Weight,
}

impl UnitStore {
    pub(crate) fn new(
        unit: &Unit,
        formats: Formats,
        mode: Mode,
        (device, home): (&Device, Home),
        sharing: &Sharing,
    ) -> Result<Self> {
        let is_trainable = |spec: &ParamSpec| mode == Mode::Train && spec.trainable;
        let mut placed = Vec::new();
        let mut place = |kind: &dyn Fn(&ParamSpec) -> bool, start: usize| {
            let mut end = start;
            for spec in unit.params.iter().filter(|spec| kind(spec)) {
                let range = end..end + spec.numel();
                end = range.end.next_multiple_of(ALIGNMENT);
                placed.push((spec.clone(), range));
            }
            end
        };
        let n_frozen = place(&|spec| !is_trainable(spec), 0);
        let n_decayed = place(&|spec| is_trainable(spec) && spec.decay, 0);
        let n_trainable = place(&|spec| is_trainable(spec) && !spec.decay, n_decayed);
        let trainable = match sharing.padded(n_trainable) {
            0 => None,
            n => Some(Trainable::zeros(n, n_decayed, formats, (device, home), sharing)?),
        };
        let frozen = Weights::zeros(sharing.padded(n_frozen.max(1)), formats.compute, device, sharing)?;
        let mut slots = BTreeMap::new();
        for (spec, range) in placed {
            let view = |buffer: &candlewick_ops::Buffer| buffer.view(range.start, spec.shape.as_slice());
            let weight = match trainable.as_ref().filter(|_| is_trainable(&spec)) {
                None => Weight::frozen(view(&frozen.all)?),
                Some(flat) => Weight::trainable(view(&flat.weights.all)?, GradSink::new(view(&flat.grads.all)?)?),
            };
            let is_trainable = is_trainable(&spec);
            slots.insert(spec.name, Slot { shape: spec.shape, range, is_trainable, weight });
        }
        Ok(Self { unit: unit.clone(), slots, frozen, trainable })
    }

    /// Returns every weight that the unit owns.
    pub(crate) fn weights(&self) -> impl Iterator<Item = (String, Weight)> {
        self.slots.iter().map(|(name, slot)| (name.clone(), slot.weight.clone()))
    }

    /// Returns one of them.
    pub(crate) fn weight(&self, name: &str) -> Weight {
        self.slots[name].weight.clone()
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
        let value = value.flatten_all()?.narrow(0, piece.start - slot.range.start, piece.len())?;
        let target = target.narrow(0, piece.start - share.start, piece.len())?;
        copy_into(&target, &value.to_device(target.device())?)
    }

    /// Returns the parameters' values in model order, of `trainable` for those that are trained: all of their run.
    pub(crate) fn values<'s>(&'s self, trainable: Option<&Tensor>) -> Result<Vec<(&'s ParamSpec, Tensor)>> {
        let of = |spec: &'s ParamSpec| {
            let slot: &Slot = &self.slots[&spec.name];
            Ok((
                spec,
                match trainable.filter(|_| slot.is_trainable) {
                    Some(flat) => flat.narrow(0, slot.range.start, slot.range.len())?.reshape(slot.shape.as_slice())?,
                    None => slot.weight.value()?,
                },
            ))
        };
        self.unit.params.iter().map(of).collect()
    }

    /// Returns this rank's part of the trainable parameters with their gradients and optimizer state, in model order.
    pub(crate) fn states(&self) -> Result<Vec<ParamState>> {
        let Some(flat) = &self.trainable else { return Ok(Vec::new()) };
        let mut states = Vec::new();
        for spec in &self.unit.params {
            let slot = &self.slots[&spec.name];
            let Some(piece) = slot.piece(&flat.own).filter(|_| slot.is_trainable) else { continue };
            let part = |own: &Tensor| own.narrow(0, piece.start - flat.own.start, piece.len());
            states.push(ParamState {
                name: spec.name.clone(),
                shape: slot.shape.clone(),
                range: piece.start - slot.range.start..piece.end - slot.range.start,
                master: part(&flat.master)?,
                grad: part(&flat.grads.sums()?)?,
                exp_avg: part(&flat.exp_avg)?,
                exp_avg_sq: part(&flat.exp_avg_sq)?,
            });
        }
        Ok(states)
    }

    /// Returns the number of parameters, and how many of them are trained.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let n = |slots: &mut dyn Iterator<Item = &Slot>| slots.map(|slot| slot.range.len()).sum();
        (n(&mut self.slots.values()), n(&mut self.slots.values().filter(|slot| slot.is_trainable)))
    }
}

impl Slot {
    /// What of it lies in a share of its run.
    fn piece(&self, share: &Range<usize>) -> Option<Range<usize>> {
        let piece = self.range.start.max(share.start)..self.range.end.min(share.end);
        (!piece.is_empty()).then_some(piece)
    }
}
