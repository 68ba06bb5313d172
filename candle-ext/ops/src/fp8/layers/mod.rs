//! FP8 state of a model's linear layers: the amax histories and scales of delayed scaling, or fixed scales, and quantized
//! inputs in use.

mod linear;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Result, Tensor, TensorId, bail};

use crate::fp8::delayed::{DelayedState, SLOTS};
use crate::fp8::operands::Fp8Operands;
use crate::fp8::recipe::{DelayedScaling, Fp8Config, Fp8Formats, Fp8Operand, Fp8Recipe, ScaleRule};
use crate::fp8::rounding::Fp8Rounding;
use crate::fp8::stats::{Fp8StepStats, N_SUMS};
use crate::transfer::to_host;

/// Linear layers that multiply in FP8, with the state of their scales.
///
/// They multiply in FP8 while an [`Fp8Guard`] lives, and in the compute dtype otherwise.
pub struct Fp8Layers {
    formats: Fp8Formats,
    gradient_rounding: Fp8Rounding,
    /// True if linear layers multiply values of codes in the dtype of their input.
    fake_quantize: bool,
    modules: Vec<Fp8Module>,
    scaling: Scaling,
    /// Statistics of a step: requested, or collected.
    stats: Mutex<StepStats>,
    /// True for each slot of delayed scaling that had no scale when a step last read them; `None`: the next step reads them.
    unscaled: Mutex<Option<Arc<[bool]>>>,
    active: Mutex<Option<Active>>,
    device: Device,
}

/// A module whose weights multiply in FP8.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fp8Module {
    /// Module name of a linear layer, or name of the routed experts' parameter.
    pub name: String,
    /// Number of matrices, each with its own scales: 1, or the number of experts.
    pub n_matrices: usize,
}

impl Fp8Module {
    /// Creates the module of a linear layer.
    pub fn linear(name: impl Into<String>) -> Self {
        Self { name: name.into(), n_matrices: 1 }
    }
}

/// Source of the scales.
enum Scaling {
    /// Amaxes of earlier steps.
    Delayed(DelayedScaling, DelayedState),
    /// The amax of the tensor.
    Current(ScaleRule),
    /// The amaxes of blocks.
    Blockwise(ScaleRule),
    /// Scales that never change, f32 [slots].
    Fixed(Tensor),
}

/// Scales of a linear layer, or of an expert's matrix, in inference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fp8LinearScales {
    /// Scale of the input.
    pub input: f32,
    /// Scale of the weight.
    pub weight: f32,
}

impl Fp8LinearScales {
    /// Returns the scales of a module's matrices from those of its slots, such as [`Fp8LayerState::scales`]. A slot without a scale
    /// yet, such as the input of an expert without tokens, has 1.
    pub fn of_slots(slots: &[f32]) -> Vec<Self> {
        let or_one = |scale: f32| if scale == 0.0 { 1.0 } else { scale };
        let of_matrix = |slots: &[f32; SLOTS]| {
            let of = |operand: Fp8Operand| or_one(slots[operand as usize]);
            Self { input: of(Fp8Operand::Input), weight: of(Fp8Operand::Weight) }
        };
        slots.as_chunks().0.iter().map(of_matrix).collect()
    }
}

/// Statistics of one step.
#[derive(Default)]
enum StepStats {
    /// Not collected.
    #[default]
    Off,
    /// Collected in the next step, of each module's operands for which it is true.
    Requested(Arc<[bool]>),
    /// Collected.
    Collected(Fp8StepStats),
}

/// State that layers share while they multiply in FP8.
struct Active {
    /// True for each slot of delayed scaling that has no scale yet: its scale follows from the tensor itself.
    unscaled: Arc<[bool]>,
    /// True once such a slot was used, so that the next step must read which are left.
    used_unscaled: bool,
    /// The input that was quantized last: several layers read the same.
    input: Option<QuantizedInput>,
    /// Seed of stochastic rounding in this step.
    key: u64,
    /// Number of gradients that each module has quantized in this step.
    n_gradients: Vec<u64>,
    /// Statistics of the step, if they are collected, and true for each module's operands that have some.
    stats: Option<(Fp8StepStats, Arc<[bool]>)>,
}

/// An input that was quantized last.
#[derive(Clone)]
struct QuantizedInput {
    id: TensorId,
    operands: Fp8Operands,
    amax: Option<Tensor>,
}

/// One module of [`Fp8Layers`].
#[derive(Clone)]
pub struct Fp8Linear {
    layers: Arc<Fp8Layers>,
    module_idx: usize,
    /// Matrices of the module that this rank holds.
    matrices: Range<usize>,
}

/// Turns FP8 on for its lifetime.
pub struct Fp8Guard<'a>(&'a Fp8Layers);

/// The state of one module's delayed scaling, as views that a checkpoint reads and writes. Each matrix has three slots:
/// input, weight and gradient.
pub struct Fp8LayerState {
    /// Name of the module.
    pub module: String,
    /// Amaxes of the slots in the last steps, the newest first, f32 [3 * matrices, amax_history_len].
    pub amax_history: Tensor,
    /// Scales of the slots, f32 [3 * matrices]. 0: no step has given the slot an amax yet.
    pub scales: Tensor,
}

impl Fp8Layers {
    /// Creates the state of these modules.
    ///
    /// In the first step of delayed scaling the scales follow from the tensors themselves, as powers of two. So does the scale
    /// of each slot that has had no amax yet, such as that of an expert without tokens. TransformerEngine starts with scales of
    /// 1, at which small gradients become zero.
    pub fn new(config: Fp8Config, modules: Vec<Fp8Module>, device: &Device) -> Result<Self> {
        let Fp8Config { recipe, formats, gradient_rounding, fake_quantize } = config;
        let n_matrices = modules.iter().map(|module| module.n_matrices).sum();
        let scaling = match recipe {
            Fp8Recipe::Delayed(scaling) => Scaling::Delayed(scaling, DelayedState::new(n_matrices, scaling, device)?),
            Fp8Recipe::Current(rule) => Scaling::Current(rule),
            Fp8Recipe::Blockwise(rule) => Scaling::Blockwise(rule),
        };
        Ok(Self { fake_quantize, ..Self::of_scaling(scaling, (formats, gradient_rounding), modules, device) })
    }

    /// Creates layers for inference, which multiply in E4M3 with the same scales in every forward. So the output of a row does
    /// not depend on the others. A module has scales for each of its matrices.
    pub fn with_fixed_scales(scales: &BTreeMap<String, Vec<Fp8LinearScales>>, device: &Device) -> Result<Self> {
        // Gradients have no scale.
        let slots: Vec<f32> = scales.values().flatten().flat_map(|matrix| [matrix.input, matrix.weight, 1.0]).collect();
        if slots.iter().any(|scale| !(scale.is_finite() && *scale > 0.0)) {
            bail!("fixed FP8 scales must be positive and finite")
        }
        let n_slots = slots.len();
        let scaling = Scaling::Fixed(Tensor::from_vec(slots, n_slots, device)?);
        let module = |(name, of_matrices): (&String, &Vec<Fp8LinearScales>)| Fp8Module {
            name: name.clone(),
            n_matrices: of_matrices.len(),
        };
        let modules = scales.iter().map(module).collect();
        Ok(Self::of_scaling(scaling, (Fp8Formats::E4m3, Fp8Rounding::Nearest), modules, device))
    }

    fn of_scaling(
        scaling: Scaling,
        (formats, gradient_rounding): (Fp8Formats, Fp8Rounding),
        modules: Vec<Fp8Module>,
        device: &Device,
    ) -> Self {
        Self {
            formats,
            gradient_rounding,
            fake_quantize: false,
            modules,
            scaling,
            stats: Mutex::default(),
            unscaled: Mutex::default(),
            active: Mutex::default(),
            device: device.clone(),
        }
    }

    /// Returns true if the layers are for inference, with fixed scales.
    pub fn has_fixed_scales(&self) -> bool {
        matches!(self.scaling, Scaling::Fixed(_))
    }

    fn delayed(&self) -> Option<(&DelayedScaling, &DelayedState)> {
        match &self.scaling {
            Scaling::Delayed(scaling, state) => Some((scaling, state)),
            Scaling::Current(_) | Scaling::Blockwise(_) | Scaling::Fixed(_) => None,
        }
    }

    /// Returns the modules.
    pub fn modules(&self) -> &[Fp8Module] {
        &self.modules
    }

    /// Returns the module with a name.
    pub fn layer(self: &Arc<Self>, name: &str) -> Option<Fp8Linear> {
        let module_idx = self.modules.iter().position(|module| module.name == name)?;
        let matrices = 0..self.modules[module_idx].n_matrices;
        Some(Fp8Linear { layers: Arc::clone(self), module_idx, matrices })
    }

    /// Returns the slots of a module's matrices.
    fn slots(&self, module_idx: usize) -> Range<usize> {
        let slots = |modules: &[Fp8Module]| SLOTS * modules.iter().map(|module| module.n_matrices).sum::<usize>();
        slots(&self.modules[..module_idx])..slots(&self.modules[..=module_idx])
    }

    /// Turns FP8 on for a step, until the guard is dropped. `key` seeds stochastic rounding.
    pub fn enable(&self, key: u64) -> Result<Fp8Guard<'_>> {
        if matches!(*self.lock_stats(), StepStats::Requested(_)) {
            // Kernels of experts find slots without a scale themselves, and statistics on the host.
            *self.lock_unscaled() = None;
        }
        let unscaled = self.unscaled_slots()?;
        let n_modules = self.modules.len();
        let stats = match &*self.lock_stats() {
            StepStats::Requested(selected) => {
                let sums = Tensor::zeros((SLOTS * n_modules, N_SUMS), DType::F64, &self.device)?;
                let amaxes = Tensor::zeros(SLOTS * n_modules, DType::F32, &self.device)?;
                Some((Fp8StepStats { sums, amaxes }, Arc::clone(selected)))
            }
            StepStats::Off | StepStats::Collected(_) => None,
        };
        let n_gradients = vec![0; n_modules];
        *self.lock() = Some(Active { unscaled, used_unscaled: false, input: None, key, n_gradients, stats });
        Ok(Fp8Guard(self))
    }

    /// Collects statistics of all quantized tensors in the next step. They cost several passes over each tensor.
    pub fn request_stats(&self) {
        self.request_stats_of(|_, _| true);
    }

    /// Collects statistics like [`Fp8Layers::request_stats`] of the modules' operands that `is_selected` returns true for.
    pub fn request_stats_of(&self, is_selected: impl Fn(&str, Fp8Operand) -> bool) {
        let of_module = |module: &Fp8Module| Fp8Operand::ALL.map(|operand| is_selected(&module.name, operand));
        *self.lock_stats() = StepStats::Requested(self.modules.iter().flat_map(of_module).collect());
    }

    /// Returns the statistics of the last step, once; `None` if they were not requested.
    pub fn take_stats(&self) -> Option<Fp8StepStats> {
        match std::mem::take(&mut *self.lock_stats()) {
            StepStats::Collected(stats) => Some(stats),
            StepStats::Off | StepStats::Requested(_) => None,
        }
    }

    fn lock_stats(&self) -> MutexGuard<'_, StepStats> {
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true for each slot of delayed scaling without a scale. Waits for the device, unless an earlier step has read all
    /// that can have changed.
    fn unscaled_slots(&self) -> Result<Arc<[bool]>> {
        let Some((_, state)) = self.delayed() else { return Ok(Arc::default()) };
        if let Some(unscaled) = &*self.lock_unscaled() {
            return Ok(Arc::clone(unscaled));
        }
        let scales = to_host(&state.scales)?.to_vec1::<f32>()?;
        let unscaled: Arc<[bool]> = scales.into_iter().map(|scale| scale == 0.0).collect();
        *self.lock_unscaled() = Some(Arc::clone(&unscaled));
        Ok(unscaled)
    }

    fn lock_unscaled(&self) -> MutexGuard<'_, Option<Arc<[bool]>>> {
        self.unscaled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if the scales of weights follow from their amaxes in this step: with current scaling, and with delayed
    /// scaling if a weight has no scale yet. All ranks return the same.
    pub fn weight_scales_need_amaxes(&self) -> bool {
        let has_unscaled = |active: &Active| has_unscaled_weight(&active.unscaled);
        self.delayed().is_none() || self.lock().as_ref().is_some_and(has_unscaled)
    }

    /// Returns true if a slot of delayed scaling has no scale in this step.
    #[cfg(any(feature = "cuda", feature = "emulate"))]
    fn is_unscaled(&self, slot: usize) -> bool {
        self.lock().as_ref().is_some_and(|active| active.is_unscaled(slot))
    }

    /// Returns true if a slot that is used has no scale in this step.
    fn use_unscaled(&self, slot: usize) -> bool {
        let mut active = self.lock();
        let Some(active) = active.as_mut().filter(|active| active.is_unscaled(slot)) else { return false };
        active.used_unscaled = true;
        true
    }

    /// Returns true while FP8 is on.
    pub fn is_enabled(&self) -> bool {
        self.lock().is_some()
    }

    /// Returns the amaxes since the last update, f32 [3 * matrices]; `None` unless scaling is delayed.
    pub fn amaxes(&self) -> Option<&Tensor> {
        self.delayed().map(|(_, state)| &state.amaxes)
    }

    /// Updates delayed scales from the amaxes of the step, f32 [3 * matrices], which must be equal on all ranks.
    ///
    /// As in TransformerEngine, the amax joins the history, and the scale follows from the history. A slot whose amax is 0,
    /// such as that of a skipped layer, or not finite keeps both: TransformerEngine puts infinities into the history, where
    /// they stop updates until they leave. Other recipes have no state.
    pub fn update(&self, amaxes: &Tensor) -> Result<()> {
        let Some((scaling, state)) = self.delayed() else { return Ok(()) };
        state.update(amaxes, *scaling, self.formats)
    }

    /// Returns the state of each module; none unless scaling is delayed.
    pub fn states(&self) -> Result<Vec<Fp8LayerState>> {
        let Some((_, state)) = self.delayed() else { return Ok(Vec::new()) };
        // The views may be written.
        *self.lock_unscaled() = None;
        let of_module = |(module_idx, module): (usize, &Fp8Module)| {
            let slots = self.slots(module_idx);
            Ok(Fp8LayerState {
                module: module.name.clone(),
                amax_history: state.history.narrow(0, slots.start, slots.len())?,
                scales: state.scales.narrow(0, slots.start, slots.len())?,
            })
        };
        self.modules.iter().enumerate().map(of_module).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Active>> {
        self.active.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Active {
    fn is_unscaled(&self, slot: usize) -> bool {
        self.unscaled.get(slot).is_some_and(|is_unscaled| *is_unscaled)
    }
}

impl Drop for Fp8Guard<'_> {
    fn drop(&mut self) {
        let Some(active) = self.0.lock().take() else { return };
        // Ranks may use other slots, but agree on weights.
        if active.used_unscaled || has_unscaled_weight(&active.unscaled) {
            *self.0.lock_unscaled() = None;
        }
        if let Some((stats, _)) = active.stats {
            *self.0.lock_stats() = StepStats::Collected(stats);
        }
    }
}

fn has_unscaled_weight(unscaled: &[bool]) -> bool {
    unscaled.iter().skip(Fp8Operand::Weight as usize).step_by(SLOTS).any(|is_unscaled| *is_unscaled)
}
