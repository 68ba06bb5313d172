//! The parameters and their training state, resident on this device.
//!
//! A unit's parameters lie in flat buffers: frozen ones in the compute format; trainable ones as masters with their
//! gradients and AdamW's moments, and a compute copy when that format is another. What an op gets is a zero-copy view.
//! Between parameters lie zeros that stay zeros. Within a flat trainable buffer the parameters with weight decay come
//! first, so that one optimizer call serves each half. Masters and moments may lie on the host: see `trainable`.

use std::collections::BTreeMap;
use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};
use candlewick_model::{Model, ParamSpec, Unit, Weights};
use candlewick_ops::{AdamW, GradScaler, GradSink, Weight, copy_into, sum_of_squares, zero_};

use crate::trainable::{Home, Trainable, step_on_host};

/// What the parameters are kept for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Trainable parameters have a master, a gradient and optimizer state.
    Train,
    /// Every parameter is only read.
    Infer,
}

/// The number formats of what is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Formats {
    /// Of the weights that ops read, and of frozen ones: f32, bf16 or f16.
    pub compute: DType,
    /// Of the weights that AdamW updates, and of their gradients: f32, or bf16 if `compute` is that, too. Small updates
    /// of a bf16 weight are lost in rounding.
    pub masters: DType,
    /// Of AdamW's moments: f32 or bf16.
    pub moments: DType,
}

impl Formats {
    /// This format to compute in, all else in f32.
    pub fn computing_in(compute: DType) -> Self {
        Self { compute, masters: DType::F32, moments: DType::F32 }
    }
}

/// All parameters of a model on one device.
pub struct Resident {
    units: Vec<UnitStore>,
}

struct UnitStore {
    unit: Unit,
    slots: BTreeMap<String, Slot>,
    frozen: Tensor,
    trainable: Option<Trainable>,
}

#[derive(Clone)]
struct Slot {
    shape: Vec<usize>,
    range: Range<usize>,
    is_trainable: bool,
    /// Where the gradient of a trainable parameter goes.
    sink: Option<GradSink>,
}

/// Every parameter begins at a multiple of so many elements: of 256 bytes, as fast products on GPUs want it.
const ALIGNMENT: usize = 128;

/// One trainable parameter with its state: views of the parameter's shape, written in place.
pub struct ParamState {
    /// The parameter's Hugging Face name.
    pub name: String,
    /// The weights that the optimizer updates, in [`Formats::masters`].
    pub master: Tensor,
    /// The gradient summed since [`Resident::zero_grads`].
    pub grad: Tensor,
    /// Adam's running mean of the gradient, in [`Formats::moments`].
    pub exp_avg: Tensor,
    /// Adam's running mean of the squared gradient, likewise.
    pub exp_avg_sq: Tensor,
}

impl Resident {
    /// Allocates the buffers of `model`'s parameters, all zero. [`Resident::fill`] sets the weights.
    pub fn new(model: &Model, formats: Formats, mode: Mode, device: &Device) -> Result<Self> {
        let units = model.units().iter();
        let units = units.map(|unit| UnitStore::new(unit, formats, mode, device, Home::WithTheWeights));
        Ok(Self { units: units.collect::<Result<_>>()? })
    }

    /// The same for training, with masters and moments of about this share of the parameters in the host's memory, whole
    /// units at a time: there AdamW updates them.
    pub fn with_optimizer_on_host(model: &Model, formats: Formats, share: f64, device: &Device) -> Result<Self> {
        let n_trained =
            |unit: &Unit| unit.params.iter().filter(|spec| spec.trainable).map(ParamSpec::numel).sum::<usize>() as f64;
        let wanted = share * model.units().iter().map(n_trained).sum::<f64>();
        let mut n_seen = 0.0;
        let units = model.units().iter().map(|unit| {
            // A unit goes where most of it belongs.
            let home = if n_seen + n_trained(unit) / 2.0 <= wanted { Home::Host } else { Home::WithTheWeights };
            n_seen += n_trained(unit);
            UnitStore::new(unit, formats, Mode::Train, device, home)
        });
        Ok(Self { units: units.collect::<Result<_>>()? })
    }

    /// Sets every parameter from `source`, which may give any float dtype.
    pub fn fill<E: From<candle_core::Error>>(
        &self,
        mut source: impl FnMut(&ParamSpec) -> std::result::Result<Tensor, E>,
    ) -> std::result::Result<(), E> {
        for unit in &self.units {
            for spec in &unit.unit.params {
                let slot = &unit.slots[&spec.name];
                let target = unit.value(slot, Copy::Master)?;
                copy_into(&target, &source(spec)?.to_device(target.device())?)?;
                if slot.is_trainable {
                    unit.refresh(slot)?;
                }
            }
        }
        Ok(())
    }

    /// Returns the weights of one unit, the trainable ones with their sinks.
    pub fn fetch(&self, unit_idx: usize) -> Result<Weights> {
        let store = &self.units[unit_idx];
        let mut weights = BTreeMap::new();
        for (name, slot) in &store.slots {
            weights.insert(name.clone(), store.weight(slot)?);
        }
        for shared in &store.unit.shared {
            let owner = &self.units[shared.unit];
            weights.insert(shared.name.clone(), owner.weight(&owner.slots[&shared.name])?);
        }
        Weights::new(&store.unit, weights)
    }

    /// Returns every parameter as it is computed with, in model order.
    pub fn values(&self) -> impl Iterator<Item = Result<(&ParamSpec, Tensor)>> {
        self.units.iter().flat_map(|store| {
            store.unit.params.iter().map(|spec| Ok((spec, store.value(&store.slots[&spec.name], Copy::Compute)?)))
        })
    }

    /// Returns every parameter at its full precision (the master where there is one), in model order.
    pub fn masters(&self) -> impl Iterator<Item = Result<(&ParamSpec, Tensor)>> {
        self.units.iter().flat_map(|store| {
            store.unit.params.iter().map(|spec| Ok((spec, store.value(&store.slots[&spec.name], Copy::Master)?)))
        })
    }

    /// Returns the trainable parameters with their gradients and optimizer state, in model order.
    pub fn states(&self) -> Result<Vec<ParamState>> {
        let mut states = Vec::new();
        for store in &self.units {
            for spec in &store.unit.params {
                let slot = &store.slots[&spec.name];
                if let (true, Some(flat)) = (slot.is_trainable, &store.trainable) {
                    states.push(ParamState {
                        name: spec.name.clone(),
                        master: slot.view(&flat.master)?,
                        grad: slot.view(&flat.grad)?,
                        exp_avg: slot.view(&flat.exp_avg)?,
                        exp_avg_sq: slot.view(&flat.exp_avg_sq)?,
                    });
                }
            }
        }
        Ok(states)
    }

    /// Rewrites the compute copies after the masters were set from outside.
    pub fn refresh(&self) -> Result<()> {
        for store in &self.units {
            for slot in store.slots.values().filter(|slot| slot.is_trainable) {
                store.refresh(slot)?;
            }
        }
        Ok(())
    }

    /// Sets all gradients to zero.
    pub fn zero_grads(&self) -> Result<()> {
        self.trainables().try_for_each(|flat| zero_(&flat.grad))
    }

    /// Returns the sums of the squares of all gradients, f64 `[n]` on their device, one for each unit that is trained.
    pub fn grad_squares(&self) -> Result<Tensor> {
        let squares = self.trainables().map(|flat| sum_of_squares(&flat.grad)).collect::<Result<Vec<_>>>()?;
        match squares.is_empty() {
            true => Tensor::zeros(1, DType::F64, self.units[0].frozen.device()),
            false => Tensor::stack(&squares, 0),
        }
    }

    /// Takes the AdamW step that `scaler` has decided upon. Parameters that the model exempts (norms, biases) get no
    /// weight decay. Waits for a GPU only if something is updated on the host.
    pub fn step(&self, hyper: &AdamW, scaler: &GradScaler) -> Result<()> {
        let (on_host, on_device): (Vec<_>, Vec<_>) = self.trainables().partition(|flat| flat.home == Home::Host);
        on_device.into_iter().try_for_each(|flat| flat.step(hyper, scaler))?;
        step_on_host(&on_host, hyper, scaler)
    }

    /// Returns the number of parameters, and how many of them are trained.
    pub fn counts(&self) -> (usize, usize) {
        let slots = || self.units.iter().flat_map(|store| store.slots.values());
        let trained = slots().filter(|slot| slot.is_trainable).map(|slot| slot.range.len()).sum::<usize>();
        (slots().map(|slot| slot.range.len()).sum(), trained)
    }

    fn trainables(&self) -> impl Iterator<Item = &Trainable> {
        self.units.iter().filter_map(|store| store.trainable.as_ref())
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Copy {
    Master,
    Compute,
}

impl UnitStore {
    fn new(unit: &Unit, formats: Formats, mode: Mode, device: &Device, home: Home) -> Result<Self> {
        let is_trainable = |spec: &ParamSpec| mode == Mode::Train && spec.trainable;
        let mut slots = BTreeMap::new();
        let mut place = |kind: &dyn Fn(&ParamSpec) -> bool, start: usize| {
            let mut end = start;
            for spec in unit.params.iter().filter(|spec| kind(spec)) {
                let range = end..end + spec.numel();
                end = range.end.next_multiple_of(ALIGNMENT);
                slots.insert(
                    spec.name.clone(),
                    Slot { shape: spec.shape.clone(), range, is_trainable: is_trainable(spec), sink: None },
                );
            }
            end
        };
        let n_frozen = place(&|spec| !is_trainable(spec), 0);
        let n_decayed = place(&|spec| is_trainable(spec) && spec.decay, 0);
        let n_trainable = place(&|spec| is_trainable(spec) && !spec.decay, n_decayed);
        let trainable = match n_trainable {
            0 => None,
            n => Some(Trainable::new(n, n_decayed, formats, device, home)?),
        };
        if let Some(flat) = &trainable {
            for slot in slots.values_mut().filter(|slot| slot.is_trainable) {
                slot.sink = Some(GradSink::new(slot.view(&flat.grad)?)?);
            }
        }
        Ok(Self {
            unit: unit.clone(),
            slots,
            frozen: Tensor::zeros(n_frozen.max(1), formats.compute, device)?,
            trainable,
        })
    }

    fn value(&self, slot: &Slot, copy: Copy) -> Result<Tensor> {
        match (&self.trainable, slot.is_trainable, copy) {
            (Some(flat), true, Copy::Master) => slot.view(&flat.master),
            (Some(flat), true, Copy::Compute) => slot.view(&flat.compute),
            _ => slot.view(&self.frozen),
        }
    }

    fn weight(&self, slot: &Slot) -> Result<Weight> {
        let value = self.value(slot, Copy::Compute)?;
        Ok(match &slot.sink {
            Some(sink) => Weight::trainable(value, sink.clone()),
            None => Weight::frozen(value),
        })
    }

    fn refresh(&self, slot: &Slot) -> Result<()> {
        match &self.trainable {
            Some(flat) => flat.refresh(&slot.range),
            None => Ok(()),
        }
    }
}

impl Slot {
    fn view(&self, flat: &Tensor) -> Result<Tensor> {
        flat.narrow(0, self.range.start, self.range.len())?.reshape(self.shape.as_slice())
    }
}
