//! Initialization of model parameters: from a checkpoint, at random, or LoRA factors on a base.

use candle_core::{DType, Device, Tensor};
use candlewick_model::checkpoint::Checkpoint;
use candlewick_model::{AdapterSpec, ModelError, ParamSpec};
use candlewick_parallel::Engine;

/// Source of parameters.
#[derive(Clone, Copy, Debug)]
pub enum WeightSource<'a> {
    /// A checkpoint.
    Checkpoint(&'a Checkpoint),
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
    let mut notes = base.check(model.base_params())?;
    if model.lora().is_some() {
        notes.extend(adapter.check(model.adapter_params())?);
    }
    engine.store().fill(|spec| if AdapterSpec::owns(&spec.name) { adapter.read(spec) } else { base.read(spec) })?;
    Ok(notes)
}

impl WeightSource<'_> {
    fn check<'p>(&self, params: impl Iterator<Item = &'p ParamSpec>) -> Result<Vec<String>, ModelError> {
        match self {
            WeightSource::Checkpoint(checkpoint) => checkpoint.check(params),
            WeightSource::Random { .. } => Ok(Vec::new()),
        }
    }

    fn read(&self, spec: &ParamSpec) -> Result<Tensor, ModelError> {
        match self {
            WeightSource::Checkpoint(checkpoint) => checkpoint.param(spec, DType::F32, &Device::Cpu),
            WeightSource::Random { seed } => {
                let mut values = vec![0.0; spec.numel()];
                spec.initialise(*seed, &mut values);
                Ok(Tensor::from_vec(values, spec.shape.as_slice(), &Device::Cpu)?)
            }
        }
    }
}
