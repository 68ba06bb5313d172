//! A decoder-only model: parameter names, shapes and forward functions. The weights are passed in.
//!
//! Dimensions: t tokens (packed), d hidden size, v vocabulary size, k head size

use candle_core::{Device, Result, Tensor};
use candlewick_ops::{Weight, WeightStorage};

use crate::{
    AdapterSpec, Config, ForwardContext, FsdpUnit, LayerSpec, LoraConfig, ModelError, ParallelOps, ParamSpec,
    UnitWeights, rope::Rope, unit,
};

/// A decoder-only model with an optional LoRA adapter.
#[derive(Clone, Debug)]
pub struct Model {
    config: Config,
    lora: Option<LoraConfig>,
    units: Vec<FsdpUnit>,
    rope: Rope,
}

impl Model {
    /// Builds the FSDP units of a model. With LoRA the base weights are frozen.
    pub fn new(config: Config, adapter: Option<LoraConfig>) -> std::result::Result<Model, ModelError> {
        let units = unit::units(&config, adapter.as_ref())?;
        let rope = Rope::new(&config);
        Ok(Model { config, lora: adapter, units, rope })
    }

    /// Sets the storage (dense or quantized) of all frozen linear weights. Embedding and output layer stay dense.
    pub fn with_frozen_storage(mut self, storage: WeightStorage) -> Model {
        self.units.iter_mut().for_each(|unit| unit.store_frozen(storage));
        self
    }

    /// Returns the model's config.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the LoRA configuration, if the model has an adapter.
    pub fn lora(&self) -> Option<&LoraConfig> {
        self.lora.as_ref()
    }

    /// Returns the FSDP units: embedding, layers, head.
    pub fn units(&self) -> &[FsdpUnit] {
        &self.units
    }

    /// Returns all LoRA adapters in layer order.
    pub fn adapters(&self) -> impl Iterator<Item = &AdapterSpec> {
        self.units.iter().flat_map(FsdpUnit::adapters)
    }

    /// Returns the base model's parameters, as in a Hugging Face checkpoint.
    pub fn base_params(&self) -> impl Iterator<Item = &ParamSpec> {
        self.units.iter().flat_map(|unit| &unit.params).filter(|param| !AdapterSpec::owns(&param.name))
    }

    /// Returns the LoRA factors, as in a PEFT adapter checkpoint.
    pub fn adapter_params(&self) -> impl Iterator<Item = &ParamSpec> {
        self.units.iter().flat_map(|unit| &unit.params).filter(|param| AdapterSpec::owns(&param.name))
    }

    /// Returns base parameter `name` with LoRA merged: W + scaling B A for adapted layers, W otherwise.
    ///
    /// `read` returns the value of a parameter by its name.
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

    /// Returns the RoPE cosines and sines at `positions`, f32 [t, r/2] each for r rotated elements of a head.
    pub fn rope(&self, positions: &[u32], device: &Device) -> Result<(Tensor, Tensor)> {
        self.rope.at(positions, device)
    }

    /// Looks up embeddings: u32 token ids [t] -> [t, d]. The padding token's row gets no gradient.
    pub fn embed(&self, w: &UnitWeights, ids: &Tensor, parallel_ops: &dyn ParallelOps) -> Result<Tensor> {
        parallel_ops.embedding(ids, &w.embedding()?.table, self.config.pad_id())
    }

    /// Returns the number of decoder layers.
    pub fn n_blocks(&self) -> usize {
        self.config.n_layers()
    }

    /// Returns the specifications of the decoder layers, in order.
    pub fn layers(&self) -> impl Iterator<Item = &LayerSpec> {
        self.units.iter().filter_map(FsdpUnit::layer)
    }

    /// Computes one decoder layer: [t, d] -> [t, d].
    pub fn block(&self, w: &UnitWeights, x: &Tensor, context: &ForwardContext) -> Result<Tensor> {
        w.layer()?.forward(x, context)
    }

    /// Applies the final norm: [t, d] -> [t, d].
    pub fn final_norm(&self, w: &UnitWeights, x: &Tensor) -> Result<Tensor> {
        w.head()?.norm(x)
    }

    /// Computes logits: hidden states after the final norm [t, d] -> f32 [t, v]. Under tensor parallelism v counts this
    /// rank's shard.
    pub fn logits(&self, w: &UnitWeights, normed: &Tensor) -> Result<Tensor> {
        w.head()?.logits(normed)
    }

    /// Returns the output layer's weight [v, d]; with tied embeddings, the embedding.
    pub fn lm_head(&self, w: &UnitWeights) -> Result<Weight> {
        Ok(w.head()?.lm_head().clone())
    }
}
