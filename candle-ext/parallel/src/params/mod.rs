//! The parameters and their training state: where each of them is, and how it gets where it is wanted.
//!
//! A unit's parameters lie in flat runs: frozen ones in the compute format; trainable ones as masters with their gradients
//! and AdamW's moments, and a compute copy when that format is another. What an op gets is a zero-copy view. Ranks that see
//! different data may keep a share of a run each: [`Sharing`] says of what. Masters and moments may lie on the host.

mod flat;
mod reduction;
mod sharing;
mod trainable;
mod unit;

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Result, Tensor};
use candlewick_comm::Reduce;
use candlewick_model::{Model, ParamSpec, Unit, Weights};
use candlewick_ops::{AdamW, GradScaler, sum_of_squares};

pub use sharing::{Sharded, Sharing};

use reduction::Reductions;
use trainable::{Trainable, step_on_host};
use unit::UnitStore;

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

/// Where masters and moments are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Home {
    /// On the device that computes.
    WithTheWeights,
    /// In the host's memory.
    Host,
}

/// All parameters of a model, as far as this rank keeps them.
///
/// Where a method says so, all ranks of a [`Sharing`] must call it alike.
pub struct ParamStore {
    units: Vec<UnitStore>,
    sharing: Sharing,
    device: Device,
    reductions: Mutex<Reductions>,
}

/// This rank's part of one trainable parameter with its state: flat views of the part, written in place.
pub struct ParamState {
    /// The parameter's Hugging Face name.
    pub name: String,
    /// The shape of all of it.
    pub shape: Vec<usize>,
    /// Which of its elements these are, in the order of the rows.
    pub range: Range<usize>,
    /// The weights that the optimizer updates, in [`Formats::masters`].
    pub master: Tensor,
    /// The gradient summed since [`ParamStore::zero_grads`], over the ranks once [`ParamStore::settle`] has been called.
    pub grad: Tensor,
    /// Adam's running mean of the gradient, in [`Formats::moments`].
    pub exp_avg: Tensor,
    /// Adam's running mean of the squared gradient, likewise.
    pub exp_avg_sq: Tensor,
}

impl ParamStore {
    /// Allocates the buffers of `model`'s parameters, all zero. [`ParamStore::fill`] sets the weights.
    pub fn new(model: &Model, formats: Formats, mode: Mode, device: &Device, sharing: Sharing) -> Result<Self> {
        let home = |_: &Unit| Home::WithTheWeights;
        Self::of_units(model, formats, mode, device, sharing, home)
    }

    /// The same for training, with masters and moments of about this share of the parameters in the host's memory, whole
    /// units at a time: there AdamW updates them.
    pub fn with_optimizer_on_host(
        model: &Model,
        formats: Formats,
        share: f64,
        device: &Device,
        sharing: Sharing,
    ) -> Result<Self> {
        let n_trained =
            |unit: &Unit| unit.params.iter().filter(|spec| spec.trainable).map(ParamSpec::numel).sum::<usize>() as f64;
        let wanted = share * model.units().iter().map(n_trained).sum::<f64>();
        let mut n_seen = 0.0;
        let home = |unit: &Unit| {
            // A unit goes where most of it belongs.
            let home = if n_seen + n_trained(unit) / 2.0 <= wanted { Home::Host } else { Home::WithTheWeights };
            n_seen += n_trained(unit);
            home
        };
        Self::of_units(model, formats, Mode::Train, device, sharing, home)
    }

    fn of_units(
        model: &Model,
        formats: Formats,
        mode: Mode,
        device: &Device,
        sharing: Sharing,
        mut home: impl FnMut(&Unit) -> Home,
    ) -> Result<Self> {
        let units = model.units().iter();
        let units = units.map(|unit| UnitStore::new(unit, formats, mode, (device, home(unit)), &sharing));
        Ok(Self { units: units.collect::<Result<_>>()?, sharing, device: device.clone(), reductions: Mutex::default() })
    }

    /// Sets every parameter from `source`, which may give any float dtype. All ranks call it.
    pub fn fill<E: From<candle_core::Error>>(
        &self,
        mut source: impl FnMut(&ParamSpec) -> std::result::Result<Tensor, E>,
    ) -> std::result::Result<(), E> {
        for store in &self.units {
            for spec in &store.unit.params {
                store.set(spec, &source(spec)?, &self.sharing)?;
            }
        }
        Ok(self.refresh()?)
    }

    /// Returns the weights of one unit, the trainable ones with their sinks, and sees to it that they are at hand. All ranks
    /// call it.
    pub fn fetch(&self, unit_idx: usize) -> Result<Weights> {
        for store in self.with_owners(unit_idx) {
            store.runs().try_for_each(|run| run.fetch(&self.sharing))?;
        }
        let store = &self.units[unit_idx];
        let shared = store.unit.shared.iter();
        let shared = shared.map(|shared| (shared.name.clone(), self.units[shared.unit].weight(&shared.name)));
        Weights::new(&store.unit, store.weights().chain(shared))
    }

    /// Begins to fetch the weights of one unit. All ranks call it.
    pub fn prefetch(&self, unit_idx: usize) -> Result<()> {
        let mut runs = self.with_owners(unit_idx).flat_map(UnitStore::runs);
        runs.try_for_each(|run| run.prefetch(&self.sharing))
    }

    /// Lets go of what other ranks keep of a unit's weights. They must be fetched before they are used again.
    pub fn release(&self, unit_idx: usize) {
        self.with_owners(unit_idx).flat_map(UnitStore::runs).for_each(flat::Weights::release);
    }

    /// Makes room for what the backward of a unit adds to gradients.
    pub fn open_grads(&self, unit_idx: usize) -> Result<()> {
        self.with_owners(unit_idx).filter_map(|store| store.trainable.as_ref()).try_for_each(|flat| flat.grads.open())
    }

    /// Says that the backward of a unit is through with the gradients that it owns, and with `is_last` that no other
    /// micro-batch follows in this step. What can be summed over the ranks now is begun to be. All ranks call it.
    pub fn close_grads(&self, unit_idx: usize, is_last: bool) -> Result<()> {
        match &self.units[unit_idx].trainable {
            Some(flat) if is_last || !flat.grads.stay() => {
                self.reductions().begin(unit_idx, &flat.grads.close()?, self)
            }
            _ => Ok(()),
        }
    }

    /// Waits until the gradients of this step are summed over the ranks. All ranks call it.
    pub fn settle(&self) -> Result<()> {
        self.reductions().finish(self)
    }

    /// Returns every parameter as it is computed with, in model order. All ranks call it, and go through all of them.
    pub fn values(&self) -> impl Iterator<Item = Result<(&ParamSpec, Tensor)>> {
        self.of_each_unit(|store| {
            store.runs().try_for_each(|run| run.fetch(&self.sharing))?;
            let values = store.values(None);
            store.runs().for_each(flat::Weights::release);
            values
        })
    }

    /// Returns every parameter as exactly as it is known (its master where there is one), in model order. All ranks call it,
    /// and go through all of them.
    pub fn masters(&self) -> impl Iterator<Item = Result<(&ParamSpec, Tensor)>> {
        self.of_each_unit(|store| {
            store.runs().try_for_each(|run| run.fetch(&self.sharing))?;
            let whole = store.trainable.as_ref().map(|flat| flat.whole_master(&self.sharing)).transpose()?;
            let values = store.values(whole.as_ref());
            store.runs().for_each(flat::Weights::release);
            values
        })
    }

    fn of_each_unit<'a>(
        &'a self,
        values: impl Fn(&'a UnitStore) -> Result<Vec<(&'a ParamSpec, Tensor)>>,
    ) -> impl Iterator<Item = Result<(&'a ParamSpec, Tensor)>> {
        self.units.iter().flat_map(move |store| match values(store) {
            Ok(values) => values.into_iter().map(Ok).collect(),
            Err(error) => vec![Err(error)],
        })
    }

    /// Returns this rank's part of the trainable parameters with their gradients and optimizer state, in model order.
    pub fn states(&self) -> Result<Vec<ParamState>> {
        let states: Vec<_> = self.units.iter().map(UnitStore::states).collect::<Result<_>>()?;
        Ok(states.into_iter().flatten().collect())
    }

    /// Rewrites what the ops read after the masters were set from outside. All ranks call it.
    pub fn refresh(&self) -> Result<()> {
        self.trainables().try_for_each(|flat| flat.refresh(&self.sharing))
    }

    /// Sets all gradients to zero.
    pub fn zero_grads(&self) -> Result<()> {
        self.trainables().try_for_each(|flat| flat.grads.clear())
    }

    /// Returns the sums of the squares of all gradients, f64 `[n]` on their device, one for each unit that is trained. All
    /// ranks call it.
    pub fn grad_squares(&self) -> Result<Tensor> {
        let squares = self.trainables().map(|flat| sum_of_squares(&flat.grads.sums()?)).collect::<Result<Vec<_>>>()?;
        let squares = match squares.is_empty() {
            true => Tensor::zeros(1, DType::F64, &self.device)?,
            false => Tensor::stack(&squares, 0)?,
        };
        Ok(self.sharing.shards.all_reduce(&squares, Reduce::Sum)?)
    }

    /// Takes the AdamW step that `scaler` has decided upon. Parameters that the model exempts (norms, biases) get no
    /// weight decay. Waits for a GPU only if something is updated on the host. All ranks call it.
    pub fn step(&self, hyper: &AdamW, scaler: &GradScaler) -> Result<()> {
        let (on_host, on_device): (Vec<_>, Vec<_>) = self.trainables().partition(|flat| flat.home == Home::Host);
        on_device.into_iter().try_for_each(|flat| flat.step(hyper, scaler))?;
        step_on_host(&on_host, hyper, scaler)?;
        self.trainables().try_for_each(|flat| flat.weights.publish(&self.sharing))
    }

    /// Returns the number of parameters, and how many of them are trained.
    pub fn counts(&self) -> (usize, usize) {
        let counts = self.units.iter().map(UnitStore::counts);
        counts.fold((0, 0), |(all, trained), (n, n_trained)| (all + n, trained + n_trained))
    }

    /// A unit, and those whose parameters it borrows.
    fn with_owners(&self, unit_idx: usize) -> impl Iterator<Item = &UnitStore> {
        let store = &self.units[unit_idx];
        std::iter::once(store).chain(store.unit.shared.iter().map(|shared| &self.units[shared.unit]))
    }

    fn trainables(&self) -> impl Iterator<Item = &Trainable> {
        self.units.iter().filter_map(|store| store.trainable.as_ref())
    }

    fn reductions(&self) -> std::sync::MutexGuard<'_, Reductions> {
        self.reductions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
