//! A model's parameters from their origin: a checkpoint, a seed, or a base of one and an adapter of the other.

use candle_core::{DType, Device, Tensor};
use candlewick_model::checkpoint::Checkpoint;
use candlewick_model::{AdapterSpec, ModelError, ParamSpec};
use candlewick_parallel::Engine;

/// Where parameters come from.
#[derive(Clone, Copy, Debug)]
pub enum WeightSource<'a> {
    /// Safetensors files.
    Checkpoint(&'a Checkpoint),
    /// The model's own initialisation.
    Random {
        /// Seeds it.
        seed: u64,
    },
}

/// Sets all parameters of `engine`: the model's own from `base`, an adapter's factors from `adapter`.
///
/// Returns what the user should know, such as tensors that are there but not used.
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
            WeightSource::Checkpoint(checkpoint) => {
                checkpoint.tensor(&spec.name, &spec.shape, DType::F32, &Device::Cpu)
            }
            WeightSource::Random { seed } => {
                let mut values = vec![0.0; spec.numel()];
                spec.initialise(*seed, &mut values);
                Ok(Tensor::from_vec(values, spec.shape.as_slice(), &Device::Cpu)?)
            }
        }
    }
}
