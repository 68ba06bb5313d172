//! Initialization of model parameters: from a checkpoint, at random, or LoRA factors on a base.

use std::collections::BTreeSet;

use candle_core::{DType, Device, Tensor};
use candlewick_model::checkpoint::Checkpoint;
use candlewick_model::{AdapterSpec, FsdpUnit, FsdpUnitKind, Model, ModelError, ParamSpec};
use candlewick_parallel::Engine;
use candlewick_runtime::progress::{ProgressUnit, WorkProgress};

/// Source of parameters.
#[derive(Clone, Copy, Debug)]
pub enum WeightSource<'a> {
    /// A checkpoint.
    Checkpoint(&'a Checkpoint),
    /// A checkpoint that may lack MTP layers, which are then initialized randomly.
    CheckpointOrRandomMtp {
        /// Checkpoint.
        checkpoint: &'a Checkpoint,
        /// Random seed.
        seed: u64,
    },
    /// Random initialization.
    Random {
        /// Random seed.
        seed: u64,
    },
}

/// Initializes all parameters of `engine`: base weights from `base`, LoRA factors from `adapter`.
///
/// Returns warnings, such as unused tensors.
pub fn load_weights(engine: &Engine, base: WeightSource, adapter: WeightSource) -> Result<Vec<String>, ModelError> {
    let model = engine.model();
    let notes = check_weights(model, base, adapter)?;
    let n_params = model.units().iter().map(|unit| unit.params.len()).sum();
    let what = if base.checkpoint().is_some() { "load weights" } else { "initialize weights" };
    let progress = WorkProgress::start(what, ProgressUnit::Count("tensors"), n_params);
    engine.store().fill(|spec| {
        progress.add(1);
        if AdapterSpec::owns(&spec.name) { adapter.read(spec) } else { base.read(spec) }
    })?;
    Ok(notes)
}

/// Checks that `base` has all base weights of `model`, and `adapter` its LoRA factors, with their shapes and dtypes. Reads no
/// values but those of tied embeddings that are stored twice.
///
/// Returns warnings, such as unused tensors.
pub fn check_weights(model: &Model, base: WeightSource, adapter: WeightSource) -> Result<Vec<String>, ModelError> {
    let (random, mut notes) = base.missing_mtp_layers(model);
    notes.extend(base.check(model.base_params().filter(|spec| !random.contains(spec.name.as_str())))?);
    if model.lora().is_some() {
        adapter.checkpoint().map_or(Ok(()), |weights| model.check_adapter(weights))?;
        notes.extend(model.unadapted_experts_warning());
    }
    Ok(notes)
}

impl<'a> WeightSource<'a> {
    fn checkpoint(&self) -> Option<&'a Checkpoint> {
        match self {
            Self::Checkpoint(checkpoint) | Self::CheckpointOrRandomMtp { checkpoint, .. } => Some(checkpoint),
            Self::Random { .. } => None,
        }
    }

    fn check<'p>(&self, params: impl Iterator<Item = &'p ParamSpec>) -> Result<Vec<String>, ModelError> {
        self.checkpoint().map_or(Ok(Vec::new()), |checkpoint| checkpoint.check(params))
    }

    /// Returns the names of the parameters of MTP layers of which the checkpoint has no tensor, with a note for each layer.
    fn missing_mtp_layers<'m>(&self, model: &'m Model) -> (BTreeSet<&'m str>, Vec<String>) {
        let Self::CheckpointOrRandomMtp { checkpoint, .. } = self else { return Default::default() };
        let is_missing = |unit: &&FsdpUnit| {
            matches!(unit.kind, FsdpUnitKind::Mtp(_)) && !unit.params.iter().any(|spec| checkpoint.has(spec))
        };
        let missing = || model.units().iter().filter(is_missing);
        let note = |unit: &FsdpUnit| format!("{} is initialized randomly: the checkpoint does not have it", unit.name);
        (
            missing().flat_map(|unit| &unit.params).map(|spec| spec.name.as_str()).collect(),
            missing().map(note).collect(),
        )
    }

    /// Reads or initializes a parameter. The source must have passed [`WeightSource::check`].
    fn read(&self, spec: &ParamSpec) -> Result<Tensor, ModelError> {
        match self {
            Self::CheckpointOrRandomMtp { checkpoint, seed } if !checkpoint.has(spec) => initial_value(spec, *seed),
            Self::Checkpoint(checkpoint) | Self::CheckpointOrRandomMtp { checkpoint, .. } => {
                checkpoint.param(spec, DType::F32, &Device::Cpu)
            }
            Self::Random { seed } => initial_value(spec, *seed),
        }
    }
}

fn initial_value(spec: &ParamSpec, seed: u64) -> Result<Tensor, ModelError> {
    let mut values = vec![0.0; spec.numel()];
    spec.initialise(seed, &mut values);
    Ok(Tensor::from_vec(values, spec.shape.as_slice(), &Device::Cpu)?)
}
