//! A decoder-only model: parameter names, shapes and forward functions. The weights are passed in.
//!
//! Dimensions: t tokens (packed), d hidden size, v vocabulary size, k head size

use candle_core::{DType, Device, Result, Tensor};
use candlewick_ops::{self as ops, Fp8Module, Weight, WeightStorage};

use crate::{
    AdapterSpec, Config, ExpertMatrixSpec, ForwardContext, FsdpUnit, LayerSpec, LengthClass, LoraConfig, ModelError,
    ParamSpec, TokenParallel, UnitWeights, rope::Rope, unit,
};

/// A decoder-only model with an optional LoRA adapter.
#[derive(Clone, Debug)]
pub struct Model {
    config: Config,
    lora: Option<LoraConfig>,
    units: Vec<FsdpUnit>,
    rope: Rope,
    /// True if the residual stream is f32 in every compute dtype.
    has_f32_residual: bool,
}

impl Model {
    /// Builds the FSDP units of a model. With LoRA the base weights are frozen.
    pub fn new(config: Config, adapter: Option<LoraConfig>) -> std::result::Result<Model, ModelError> {
        let units = unit::units(&config, adapter.as_ref())?;
        let rope = Rope::new(&config);
        Ok(Model { config, lora: adapter, units, rope, has_f32_residual: false })
    }

    /// Builds a model whose decoder layers have these specifications, those of MTP layers last. The other units are the config's.
    pub fn with_layers(config: Config, layers: Vec<LayerSpec>) -> Model {
        let units = unit::units_of(&config, layers);
        let rope = Rope::new(&config);
        Model { config, lora: None, units, rope, has_f32_residual: false }
    }

    /// Sets the storage (dense or quantized) of all frozen linear weights. Embedding and output layer stay dense.
    pub fn with_frozen_storage(mut self, storage: WeightStorage) -> Model {
        self.units.iter_mut().for_each(|unit| unit.store_frozen(storage));
        self
    }

    /// Keeps the residual stream in f32 while the layers compute in another dtype, as Megatron-LM's
    /// `fp32_residual_connection`.
    pub fn with_f32_residual(self) -> Model {
        Model { has_f32_residual: true, ..self }
    }

    /// Returns the dtype of the residual stream: of the inputs and outputs of layers, which compute in `compute`.
    pub fn residual_dtype(&self, compute: DType) -> DType {
        if self.has_f32_residual { DType::F32 } else { compute }
    }

    /// Makes the linear layers and the routed experts with these names multiply in FP8 during training.
    pub fn with_fp8(mut self, modules: &[String]) -> Model {
        for unit in &mut self.units {
            unit.linears_mut().for_each(|linear| linear.fp8 = modules.contains(&linear.module));
            unit.expert_matrices_mut().for_each(|matrix| matrix.fp8 = modules.contains(&matrix.name));
        }
        self
    }

    /// Returns the linear layers and the routed experts that multiply in FP8.
    pub fn fp8_modules(&self) -> Vec<Fp8Module> {
        let of_layer = |layer: &LayerSpec| {
            let linears = layer.linears().filter(|linear| linear.fp8).map(|linear| Fp8Module::linear(&linear.module));
            let experts = layer.expert_matrices().filter(|matrix| matrix.fp8);
            let experts = experts.map(|matrix| Fp8Module { name: matrix.name.clone(), n_matrices: matrix.n_experts });
            linears.chain(experts).collect::<Vec<_>>()
        };
        self.layers().flat_map(of_layer).collect()
    }

    /// Returns the model's config.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the LoRA configuration, if the model has an adapter.
    pub fn lora(&self) -> Option<&LoraConfig> {
        self.lora.as_ref()
    }

    /// Returns the FSDP units: embedding, layers, MTP layers, head. Unit i + 1 has layer i.
    pub fn units(&self) -> &[FsdpUnit] {
        &self.units
    }

    /// Returns all LoRA adapters in layer order.
    pub fn adapters(&self) -> impl Iterator<Item = &AdapterSpec> {
        self.units.iter().flat_map(FsdpUnit::adapters)
    }

    /// Returns true if LoRA trains the routers.
    pub fn adapts_routers(&self) -> bool {
        let is_adapted = |layer: &LayerSpec| layer.router().is_some_and(|router| router.adapter.is_some());
        self.layers().any(is_adapted)
    }

    /// Returns true if LoRA trains the routed experts.
    pub fn adapts_experts(&self) -> bool {
        self.layers().any(|layer| layer.expert_adapters().next().is_some())
    }

    /// Returns a warning if an adapter folder names modules that routed experts have, but has no tensors of single experts. PEFT
    /// writes such folders: its names mean shared experts and dense layers alone.
    pub fn unadapted_experts_warning(&self) -> Option<String> {
        let with_experts = Self::new(self.config().clone(), Some(self.lora()?.with_expert_modules()?)).ok()?;
        (with_experts.adapts_experts() && !self.adapts_experts()).then(|| {
            let names = "adapter_config.json names modules that routed experts have";
            format!("{names}, but the adapter has no tensors of experts: they compute as in the base model")
        })
    }

    /// Returns the base model's parameters, as in a Hugging Face checkpoint.
    pub fn base_params(&self) -> impl Iterator<Item = &ParamSpec> {
        self.units.iter().flat_map(|unit| &unit.params).filter(|param| !AdapterSpec::owns(&param.name))
    }

    /// Returns the number of elements of an exported model, with the copies of embedding and output layer in MTP layers.
    pub fn n_exported_elements(&self) -> usize {
        self.base_params()
            .map(|param| param.numel() * (1 + crate::unit::copies_in_mtp_layers(&self.config, &param.name).len()))
            .sum()
    }

    /// Returns the LoRA factors, as in a PEFT adapter checkpoint.
    pub fn adapter_params(&self) -> impl Iterator<Item = &ParamSpec> {
        self.units.iter().flat_map(|unit| &unit.params).filter(|param| AdapterSpec::owns(&param.name))
    }

    /// Returns base parameter `name` with LoRA merged: W + scaling B A for adapted matrices, W otherwise.
    ///
    /// `read` returns the value of a parameter by its name.
    pub fn merged(&self, name: &str, read: impl Fn(&str) -> Result<Tensor>) -> Result<Tensor> {
        let base = read(name)?;
        if let Some(matrix) = self.layers().flat_map(LayerSpec::expert_matrices).find(|matrix| matrix.name == name) {
            return if matrix.adapters.is_empty() { Ok(base) } else { matrix.merged(&base, read) };
        }
        match self.adapters_on(name).next() {
            Some(adapter) => {
                crate::merge_lora(&base, &read(&adapter.a_name())?, &read(&adapter.b_name())?, adapter.scaling)
            }
            None => Ok(base),
        }
    }

    /// Returns the adapters that change base parameter `name`.
    pub(crate) fn adapters_on<'m>(&'m self, name: &'m str) -> impl Iterator<Item = &'m AdapterSpec> {
        let is_here = move |matrix: &&ExpertMatrixSpec| matrix.name == name;
        let of_experts = self.layers().flat_map(LayerSpec::expert_matrices).filter(is_here);
        let module = name.strip_suffix(".weight");
        let of_linears = self.adapters().filter(move |adapter| Some(adapter.module.as_str()) == module);
        of_linears.chain(of_experts.flat_map(|matrix| &matrix.adapters).map(|adapter| &adapter.adapter))
    }

    /// Returns the RoPE cosines and sines at `positions`, f32 [t, r/2] each for r rotated elements of a head. `classes` are those
    /// of the tokens' sequences.
    pub fn rope(&self, positions: &[u32], classes: &[LengthClass], device: &Device) -> Result<(Tensor, Tensor)> {
        self.rope.at(positions, classes, device)
    }

    /// Returns what [`Self::rope`] does for few positions far apart, without tables of all positions up to the last.
    pub fn rope_of_sparse_positions(
        &self,
        positions: &[u32],
        classes: &[LengthClass],
        device: &Device,
    ) -> Result<(Tensor, Tensor)> {
        self.rope.computed_at(positions, classes, device)
    }

    /// Returns the RoPE frequencies of a sequence of `n_tokens`. They depend on the length with `dynamic` and `longrope` only.
    pub fn length_class(&self, n_tokens: usize) -> LengthClass {
        self.rope.class(n_tokens.try_into().unwrap_or(u32::MAX))
    }

    /// Returns the RoPE frequencies of each token of packed sequences, whose positions begin at 0.
    pub fn length_classes(&self, positions: &[u32]) -> Vec<LengthClass> {
        self.rope.classes(positions)
    }

    /// Looks up embeddings: u32 token ids [t] -> [t, d], in the dtype of the residual stream. The padding token's row gets no
    /// gradient. `w` are the weights of the embedding.
    ///
    /// Layers add to what they get in its dtype, and norms return the dtype of their weights. So the embedding alone decides
    /// the dtype of the residual stream.
    pub fn embed(&self, w: &UnitWeights, ids: &Tensor, tokens: &dyn TokenParallel) -> Result<Tensor> {
        let x_td = tokens.embedding(ids, &w.embedding()?.table, self.config.pad_id())?;
        match self.residual_dtype(x_td.dtype()) {
            dtype if dtype == x_td.dtype() => Ok(x_td),
            dtype => ops::scale(&x_td, 1.0, dtype),
        }
    }

    /// Returns the number of decoder layers without those of MTP layers.
    pub fn n_blocks(&self) -> usize {
        self.config.n_layers()
    }

    /// Returns the specifications of the decoder layers in order, those of MTP layers last.
    pub fn layers(&self) -> impl Iterator<Item = &LayerSpec> {
        self.units.iter().filter_map(FsdpUnit::layer)
    }

    /// Computes one decoder layer: [t, d] -> [t, d].
    pub fn block(&self, w: &UnitWeights, x: &Tensor, context: &ForwardContext) -> Result<Tensor> {
        w.layer()?.forward(x, context)
    }

    /// Computes an MTP layer with its norm: hidden states of the layer before, after its norm, and embeddings of the next
    /// tokens, [t, d] each -> [t, d].
    pub fn mtp_layer(
        &self,
        w: &UnitWeights,
        hidden: &Tensor,
        embedded: &Tensor,
        context: &ForwardContext,
    ) -> Result<Tensor> {
        w.mtp_layer()?.forward(hidden, embedded, context)
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
