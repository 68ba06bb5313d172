//! The parameters and their training state: where each of them is, and how it gets where it is wanted.
//!
//! A unit's parameters lie in flat runs: frozen ones in the compute format; trainable ones as masters with their gradients
//! and AdamW's moments, and a compute copy when that format is another. What an op gets is a zero-copy view. Ranks that see
//! different data may keep a share of a run each: [`Sharing`] says of what. Masters and moments may lie on the host.

mod bytes;
mod flat;
mod reduction;
mod sharing;
mod trainable;
mod unit;

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Result, Tensor, bail};
use candlewick_comm::Reduce;
use candlewick_model::{Model, ParamSpec, Unit, Weights};
use candlewick_ops::{AdamW, GradScaler, copy_into};

pub use bytes::StoreBytes;
pub use sharing::{Sharded, Sharing, Stages};

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

/// What is in the memory of a GPU's host.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OnHost {
    /// The share of the parameters whose masters and moments are there: the first units. There AdamW updates them.
    pub optimizer: f64,
    /// Whether all weights are there, frozen ones too: a unit's come when it is wanted. Needs all of the optimizer there.
    pub weights: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Home {
    /// On the device that computes.
    OnDevice,
    /// In the host's memory.
    Host,
}

/// Where the parameters of a unit are.
#[derive(Clone, Copy, Debug)]
struct Homes {
    weights: Home,
    /// Masters and moments.
    optimizer: Home,
}

impl Home {
    fn memory(self, device: &Device) -> &Device {
        match self {
            Self::OnDevice => device,
            Self::Host => &Device::Cpu,
        }
    }
}

/// All parameters of a model, as far as this rank keeps them.
///
/// Where a method says so, all ranks of a [`Sharing`] must call it alike.
pub struct ParamStore {
    /// Of the whole model.
    specs: Vec<Unit>,
    /// Those that this stage has.
    units: Vec<Option<UnitStore>>,
    /// The layers over their buffers, which need not hold elements.
    layers: Vec<Option<Weights>>,
    formats: Formats,
    mode: Mode,
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
    /// Which of its columns (the elements of a vector) these are of.
    pub columns: Range<usize>,
    /// Which elements of these columns, in the order of the rows.
    pub range: Range<usize>,
    /// Whether this rank writes it: of those that have the same elements and are no replicas, one does.
    pub is_only: bool,
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
        Self::with_host(model, formats, mode, OnHost::default(), device, sharing)
    }

    /// Returns the bytes that the parameters take on the device now, by class.
    pub fn device_bytes(&self) -> StoreBytes {
        let units = self.units.iter().flatten();
        units.map(|unit| unit.device_bytes(&self.device)).fold(StoreBytes::default(), StoreBytes::plus)
    }

    /// The same with some of them in the host's memory.
    pub fn with_host(
        model: &Model,
        formats: Formats,
        mode: Mode,
        on_host: OnHost,
        device: &Device,
        sharing: Sharing,
    ) -> Result<Self> {
        if on_host.weights && mode == Mode::Train && on_host.optimizer < 1.0 {
            bail!("weights in the host's memory while AdamW updates them elsewhere")
        }
        let n_trained =
            |unit: &Unit| unit.params.iter().filter(|spec| spec.trainable).map(ParamSpec::numel).sum::<usize>() as f64;
        let wanted = on_host.optimizer * model.units().iter().map(n_trained).sum::<f64>();
        let mut n_seen = 0.0;
        let mut homes = |unit: &Unit| {
            // A unit goes where most of it belongs.
            let is_there = on_host.optimizer > 0.0 && n_seen + n_trained(unit) / 2.0 <= wanted;
            n_seen += n_trained(unit);
            let home = |is_there| if is_there { Home::Host } else { Home::OnDevice };
            Homes { weights: home(on_host.weights), optimizer: home(is_there || on_host.weights) }
        };
        let specs = model.units().to_vec();
        let stages = &sharing.stages;
        let is_last = stages.owns(specs.len() - 1);
        let is_borrowed = |unit_idx| specs[specs.len() - 1].shared.iter().any(|shared| shared.unit == unit_idx);
        let store = |(unit_idx, unit): (usize, &Unit)| {
            let homes = homes(unit);
            let is_here = stages.owns(unit_idx) || (is_last && is_borrowed(unit_idx));
            is_here.then(|| UnitStore::new(unit, formats, mode, (device, homes), &sharing)).transpose()
        };
        let units = specs.iter().enumerate().map(store).collect::<Result<Vec<_>>>()?;
        let layers = units.iter().map(|store| store.as_ref().map(|store| layer(store, &units)).transpose());
        let layers = layers.collect::<Result<_>>()?;
        Ok(Self { specs, units, layers, formats, mode, sharing, device: device.clone(), reductions: Mutex::default() })
    }

    /// Returns the dtype of the weights that ops read.
    pub(crate) fn compute_dtype(&self) -> DType {
        self.formats.compute
    }

    /// Sets every parameter that this stage has from `source`, which gives all of it in any float dtype. All ranks call it.
    pub fn fill<E: From<candle_core::Error>>(
        &self,
        mut source: impl FnMut(&ParamSpec) -> std::result::Result<Tensor, E>,
    ) -> std::result::Result<(), E> {
        for store in self.units.iter().flatten() {
            for spec in &store.unit.params {
                store.set(spec, &source(spec)?, &self.sharing)?;
            }
        }
        Ok(self.refresh()?)
    }

    /// Returns the weights of one unit, the trainable ones with their sinks, and sees to it that they are at hand. All ranks
    /// call it.
    pub fn fetch(&self, unit_idx: usize) -> Result<&Weights> {
        for store in self.with_owners(unit_idx) {
            store.runs().try_for_each(|run| run.fetch(&self.sharing))?;
        }
        match &self.layers[unit_idx] {
            Some(layer) => Ok(layer),
            None => bail!("{} is with another stage", self.specs[unit_idx].name),
        }
    }

    /// Begins to fetch the weights of one unit; does nothing if another stage has it. All ranks call it.
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

    /// Says that the backward of a unit is through with the gradients that it owns, and with those that it borrows from another
    /// stage; with `is_last` that no other micro-batch follows in this step. What can be summed over the ranks now is begun to
    /// be. All ranks call it.
    pub fn close_grads(&self, unit_idx: usize, is_last: bool) -> Result<()> {
        let borrowed = self.specs[unit_idx].shared.iter().map(|shared| shared.unit);
        for unit_idx in std::iter::once(unit_idx).chain(borrowed.filter(|unit| !self.sharing.stages.owns(*unit))) {
            match self.units[unit_idx].as_ref().and_then(|store| store.trainable.as_ref()) {
                Some(flat) if is_last || !flat.grads.stay() => {
                    self.reductions().begin(unit_idx, &flat.grads.close()?, self)?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Waits until the gradients of this step are summed over the ranks. All ranks call it.
    pub fn settle(&self) -> Result<()> {
        self.reductions().finish(self)?;
        self.settle_parts()?;
        self.settle_ties()
    }

    /// Sums the gradients of which each tensor parallel rank has computed a part, all at once: they are small.
    fn settle_parts(&self) -> Result<()> {
        if !self.trainables().any(|flat| !flat.summed.is_empty()) {
            return Ok(());
        }
        let views = self.trainables().map(Trainable::parts_of_sums).collect::<Result<Vec<_>>>()?;
        let mut views: Vec<Tensor> = views.into_iter().flatten().collect();
        if views.is_empty() {
            // Other shares have some: ranks that share matrices meet, whatever their shares.
            views.push(Tensor::zeros(1, self.formats.masters, &self.device)?);
        }
        let own = Tensor::cat(&views, 0)?;
        let sum = self.sharing.tensor.ranks.all_reduce(&own, Reduce::Sum)?;
        if sum.id() == own.id() {
            return Ok(());
        }
        let mut start = 0;
        for view in views {
            let n = view.elem_count();
            copy_into(&view, &sum.narrow(0, start, n)?)?;
            start += n;
        }
        Ok(())
    }

    /// Sums the gradients of parameters that two stages have.
    fn settle_ties(&self) -> Result<()> {
        let ties = &self.sharing.stages.ties;
        let borrowed: BTreeSet<usize> =
            self.specs.iter().flat_map(|unit| &unit.shared).map(|shared| shared.unit).collect();
        for unit_idx in borrowed {
            if let Some(flat) = self.units[unit_idx].as_ref().and_then(|store| store.trainable.as_ref()) {
                let grad = flat.grads.sums()?;
                replace(&grad, &ties.all_reduce(&grad, Reduce::Sum)?)?;
            }
        }
        Ok(())
    }

    /// Returns every parameter as it is computed with, in model order. All ranks call it, and go through all of them.
    pub fn values(&self) -> impl Iterator<Item = Result<(&ParamSpec, Tensor)>> {
        self.of_each_unit(Of::Compute)
    }

    /// Returns every parameter as exactly as it is known (its master where there is one), in model order. All ranks call it,
    /// and go through all of them.
    pub fn masters(&self) -> impl Iterator<Item = Result<(&ParamSpec, Tensor)>> {
        self.of_each_unit(Of::Masters)
    }

    fn of_each_unit(&self, of: Of) -> impl Iterator<Item = Result<(&ParamSpec, Tensor)>> {
        let specs = self.specs.iter().enumerate();
        specs.flat_map(move |(unit_idx, unit)| match self.whole(unit_idx, of) {
            Ok(values) => unit.params.iter().zip(values).map(Ok).collect(),
            Err(error) => vec![Err(error)],
        })
    }

    /// All parameters of a unit, put together from what the ranks have of it. All ranks call it.
    fn whole(&self, unit_idx: usize, of: Of) -> Result<Vec<Tensor>> {
        let Stages { ranks, .. } = &self.sharing.stages;
        let owner = self.sharing.stages.owner(unit_idx);
        let own = match &self.units[unit_idx] {
            Some(store) if ranks.rank() == owner => {
                store.runs().try_for_each(|run| run.fetch(&self.sharing))?;
                let masters = store.trainable.as_ref().filter(|_| of == Of::Masters);
                let masters = masters.map(|flat| flat.whole_master(&self.sharing)).transpose()?;
                let values = store.values(masters.as_ref(), &self.sharing);
                store.runs().for_each(flat::Weights::release);
                values?
            }
            _ => {
                let dtype = |spec: &ParamSpec| match (of, self.mode) {
                    (Of::Masters, Mode::Train) if spec.trainable => self.formats.masters,
                    _ => self.formats.compute,
                };
                let room = |spec: &ParamSpec| Tensor::zeros(spec.shape.as_slice(), dtype(spec), &self.device);
                self.specs[unit_idx].params.iter().map(room).collect::<Result<_>>()?
            }
        };
        own.iter().map(|value| Ok(ranks.broadcast(value, owner)?)).collect()
    }

    /// Returns this rank's part of the trainable parameters with their gradients and optimizer state, in model order.
    pub fn states(&self) -> Result<Vec<ParamState>> {
        let here = self.units.iter().enumerate().filter_map(|(unit_idx, store)| Some((unit_idx, store.as_ref()?)));
        let states = here.map(|(unit_idx, store)| store.states(self.sharing.stages.owns(unit_idx), &self.sharing));
        Ok(states.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
    }

    /// Rewrites what the ops read after the masters were set from outside. All ranks call it.
    pub fn refresh(&self) -> Result<()> {
        self.trainables().try_for_each(|flat| flat.refresh(&self.sharing))
    }

    /// Discards all gradients: those of the next step's first micro-batch take their place.
    pub fn zero_grads(&self) -> Result<()> {
        self.trainables().try_for_each(|flat| flat.grads.clear())
    }

    /// Returns the sums of the squares of all gradients, f64 `[n]` on their device, one for each unit. All ranks call it.
    pub fn grad_squares(&self) -> Result<Tensor> {
        let is_first = self.sharing.tensor.ranks.rank() == 0;
        let of_unit = |(unit_idx, store): (usize, &Option<UnitStore>)| {
            let flat = store.as_ref().and_then(|store| store.trainable.as_ref());
            match flat.filter(|_| self.sharing.stages.owns(unit_idx)) {
                Some(flat) => flat.squares(is_first),
                None => Tensor::zeros((), DType::F64, &self.device),
            }
        };
        let squares = self.units.iter().enumerate().map(of_unit).collect::<Result<Vec<_>>>()?;
        Ok(self.sharing.all.all_reduce(&Tensor::stack(&squares, 0)?, Reduce::Sum)?)
    }

    /// Takes the AdamW step that `scaler` has decided upon. Parameters that the model exempts (norms, biases) get no
    /// weight decay. Waits for a GPU only if something is updated on the host. All ranks call it.
    pub fn step(&self, hyper: &AdamW, scaler: &GradScaler) -> Result<()> {
        let (on_host, on_device): (Vec<_>, Vec<_>) =
            self.trainables().partition(|flat| flat.homes.optimizer == Home::Host);
        on_device.into_iter().try_for_each(|flat| flat.step(hyper, scaler))?;
        step_on_host(&on_host, hyper, scaler)?;
        self.trainables().try_for_each(|flat| flat.weights.publish(&self.sharing))
    }

    /// Returns the number of parameters, and how many of them are trained.
    pub fn counts(&self) -> (usize, usize) {
        let params = || self.specs.iter().flat_map(|unit| &unit.params);
        let trained = params().filter(|spec| spec.trainable && self.mode == Mode::Train);
        (params().map(ParamSpec::numel).sum(), trained.map(ParamSpec::numel).sum())
    }

    /// A unit, and those whose parameters it borrows, as far as this stage has them.
    fn with_owners(&self, unit_idx: usize) -> impl Iterator<Item = &UnitStore> {
        let store = self.units.get(unit_idx).and_then(Option::as_ref);
        let borrowed = store.into_iter().flat_map(|store| &store.unit.shared);
        store.into_iter().chain(borrowed.filter_map(|shared| self.units[shared.unit].as_ref()))
    }

    fn trainables(&self) -> impl Iterator<Item = &Trainable> {
        self.units.iter().flatten().filter_map(|store| store.trainable.as_ref())
    }

    fn reductions(&self) -> std::sync::MutexGuard<'_, Reductions> {
        self.reductions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Which format of the weights is wanted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    Compute,
    Masters,
}

/// Writes a sum over ranks where it came from. Alone, a rank gets back what it gave.
fn replace(grad: &Tensor, sum: &Tensor) -> Result<()> {
    if sum.id() == grad.id() { Ok(()) } else { copy_into(grad, sum) }
}

/// Builds the layer of a unit over its own buffers and those of the units that it shares parameters with.
fn layer(store: &UnitStore, units: &[Option<UnitStore>]) -> Result<Weights> {
    let shared = store.unit.shared.iter().filter_map(|shared| {
        let owner = units[shared.unit].as_ref()?;
        Some((shared.name.clone(), owner.weight(&shared.name)))
    });
    Weights::new(&store.used, store.weights().chain(shared))
}
