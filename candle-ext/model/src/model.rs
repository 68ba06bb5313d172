//! A decoder-only model: names and shapes, and the functions between activations. It holds no weights.
//!
//! t tokens (packed), d model, v vocabulary, k head dim

use candle_core::{Device, Result, Tensor};
use candlewick_ops::{Weight, WeightStorage};

use crate::{
    AdapterSpec, Config, ForwardContext, FsdpUnit, LayerSpec, LoraConfig, ModelError, ParallelOps, ParamSpec,
    UnitWeights, rope::Rope, unit,
};

/// A model of one of the families, perhaps with an adapter on it.
#[derive(Clone, Debug)]
pub struct Model {
    config: Config,
    lora: Option<LoraConfig>,
    units: Vec<FsdpUnit>,
    rope: Rope,
}

impl Model {
    /// Lays out the units of a model. With an adapter the base is frozen and only the factors are trained.
    pub fn new(config: Config, adapter: Option<LoraConfig>) -> std::result::Result<Model, ModelError> {
        let units = unit::units(&config, adapter.as_ref())?;
        let rope = Rope::new(&config);
        Ok(Model { config, lora: adapter, units, rope })
    }

    /// Stores the frozen matrices of all linear layers in `storage`. The embedding and the output layer stay dense.
    pub fn with_frozen_storage(mut self, storage: WeightStorage) -> Model {
        self.units.iter_mut().for_each(|unit| unit.store_frozen(storage));
        self
    }

    /// Returns the config.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the adapter's configuration, if there is an adapter.
    pub fn lora(&self) -> Option<&LoraConfig> {
        self.lora.as_ref()
    }

    /// Returns the units: [embed, block 0.., head].
    pub fn units(&self) -> &[FsdpUnit] {
        &self.units
    }

    /// Returns all adapters in the order of the blocks.
    pub fn adapters(&self) -> impl Iterator<Item = &AdapterSpec> {
        self.units.iter().flat_map(FsdpUnit::adapters)
    }

    /// Returns the parameters of the model proper: those of a Hugging Face folder.
    pub fn base_params(&self) -> impl Iterator<Item = &ParamSpec> {
        self.units.iter().flat_map(|unit| &unit.params).filter(|param| !AdapterSpec::owns(&param.name))
    }

    /// Returns the adapter's factors: those of an adapter folder.
    pub fn adapter_params(&self) -> impl Iterator<Item = &ParamSpec> {
        self.units.iter().flat_map(|unit| &unit.params).filter(|param| AdapterSpec::owns(&param.name))
    }

    /// Returns a base parameter as an export without the adapter has it: `read`, and W + scaling B A where an adapter
    /// sits on it. `read` gives a parameter's value by its name.
    pub fn merged(&self, name: &str, read: impl Fn(&str) -> Result<Tensor>) -> Result<Tensor> {
        let base = read(name)?;
        let module = name.strip_suffix(".weight");
        match self.adapters().find(|adapter| Some(adapter.module.as_str()) == module) {
            Some(adapter) => {
                crate::merge_lora(&base, &read(&adapter.a_name())?, &read(&adapter.b_name())?, adapter.scaling)
            }
            None => Ok(base),
        }
    }

    /// Returns the cosines and sines of the rotary angles at `positions`, f32 [t, k/2].
    pub fn rope(&self, positions: &[u32], device: &Device) -> Result<(Tensor, Tensor)> {
        self.rope.at(positions, device)
    }

    /// Looks tokens up: u32 [t] -> [t, d]. The padding token's row gets no gradient from here.
    pub fn embed(&self, w: &UnitWeights, ids: &Tensor, parallel_ops: &dyn ParallelOps) -> Result<Tensor> {
        parallel_ops.embedding(ids, &w.embedding()?.table, self.config.pad_id())
    }

    /// Returns the number of blocks.
    pub fn n_blocks(&self) -> usize {
        self.config.n_layers()
    }

    /// Returns the decoder layers as data, in their order.
    pub fn layers(&self) -> impl Iterator<Item = &LayerSpec> {
        self.units.iter().filter_map(FsdpUnit::layer)
    }

    /// Computes one decoder layer: [t, d] -> [t, d].
    pub fn block(&self, w: &UnitWeights, x: &Tensor, context: &ForwardContext) -> Result<Tensor> {
        w.layer()?.forward(x, context)
    }

    /// Computes the norm after the last block: [t, d] -> [t, d].
    pub fn norm(&self, w: &UnitWeights, x: &Tensor) -> Result<Tensor> {
        w.head()?.norm(x)
    }

    /// Computes the scores of every token that the output layer's weight has a row for: normed [t, d] -> f32 [t, v].
    pub fn logits(&self, w: &UnitWeights, normed: &Tensor) -> Result<Tensor> {
        w.head()?.logits(normed)
    }

    /// Returns the output layer's weight [v, d]: the embedding, if tied.
    pub fn lm_head(&self, w: &UnitWeights) -> Result<Weight> {
        Ok(w.head()?.lm_head().clone())
    }
}
