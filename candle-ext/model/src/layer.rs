//! A decoder layer, and its specification, from which it is built and memory and FLOPs are estimated.
//!
//! Dimensions: t tokens (packed), d hidden size

use candle_core::{Result, Tensor};
use candlewick_ops as ops;

use crate::linear_spec::layer_name;
use crate::lora::{AdapterNames, LoraTargets};
use crate::{
    AdapterSpec, Config, Dim, DimSize, ExpertAdapterSpec, ExpertMatrixSpec, ForwardContext, LinearSpec, Mixer,
    MixerSpec, MixerSplit, Mlp, MlpSpec, ModelError, ParamScope, ParamSpec, WeightLookup, norm::Norm,
};

/// One decoder layer: x + mixer(norm(x)), then x + mlp(norm(x)).
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    /// Index of the layer.
    pub layer_idx: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Epsilon of every RMS norm.
    pub norm_eps: f64,
    /// Token-mixing sublayer (attention).
    pub mixer: Box<dyn MixerSpec>,
    /// MLP sublayer.
    pub mlp: Box<dyn MlpSpec>,
}

/// A decoder layer: x + mixer(norm(x)), then x + mlp(norm(x)).
pub struct Layer {
    input_norm: Norm,
    mixer: Box<dyn Mixer>,
    mlp_norm: Norm,
    mlp: Box<dyn Mlp>,
}

impl Config {
    /// Returns the specification of layer `layer_idx` without LoRA. Later layers have the shape of the
    /// last.
    pub fn layer(&self, layer_idx: usize) -> LayerSpec {
        let like = layer_idx.min(self.n_layers().saturating_sub(1));
        LayerSpec {
            layer_idx,
            hidden_size: self.typed.hidden_size,
            norm_eps: self.typed.rms_norm_eps,
            mixer: self.mixer(layer_idx, like),
            mlp: self.mlp(layer_idx, like),
        }
    }
}

impl LayerSpec {
    /// Returns the Hugging Face module name, such as `model.layers.0`.
    pub fn name(&self) -> String {
        layer_name(self.layer_idx)
    }

    /// Returns the number of routed experts; `None` for a dense MLP.
    pub fn n_experts(&self) -> Option<usize> {
        self.expert_matrices().next().map(|matrix| matrix.n_experts)
    }

    /// Returns the name of the router's expert bias; `None` without one.
    pub fn expert_bias_name(&self) -> Option<String> {
        self.mlp.expert_bias_name()
    }

    /// Returns the linear layers in forward order.
    pub fn linears(&self) -> impl Iterator<Item = &LinearSpec> {
        self.mixer.linears().into_iter().chain(self.mlp.linears())
    }

    /// Returns the linear layers in forward order.
    pub fn linears_mut(&mut self) -> impl Iterator<Item = &mut LinearSpec> {
        self.mixer.linears_mut().into_iter().chain(self.mlp.linears_mut())
    }

    /// Returns the LoRA adapters of both sublayers.
    pub fn adapters(&self) -> impl Iterator<Item = &AdapterSpec> {
        self.mixer.adapters().into_iter().chain(self.mlp.adapters())
    }

    /// Returns the router; `None` for a dense layer.
    pub fn router(&self) -> Option<&LinearSpec> {
        self.mlp.router()
    }

    /// Returns the LoRA adapters of the routed experts.
    pub fn expert_adapters(&self) -> impl Iterator<Item = &ExpertAdapterSpec> {
        self.expert_matrices().flat_map(|matrix| &matrix.adapters)
    }

    /// Returns the matrices of the routed experts; none for a dense layer.
    pub fn expert_matrices(&self) -> impl Iterator<Item = &ExpertMatrixSpec> {
        self.mlp.expert_matrices().into_iter()
    }

    /// Returns an error message if `n_ranks` ranks cannot split the layer's mixer so.
    pub fn refusal(&self, split: MixerSplit, n_ranks: usize) -> Option<String> {
        let reason = self.mixer.refusal(split).filter(|_| n_ranks > 1)?;
        let (kind, layer_idx) = (self.mixer.kind(), self.layer_idx);
        let ranks = match split {
            MixerSplit::Tensor => "tensor parallel",
            MixerSplit::Context => "context parallel",
            MixerSplit::Ulysses => "Ulysses",
        };
        Some(format!("the {kind} of layer {layer_idx} cannot be split over {n_ranks} {ranks} ranks: {reason}"))
    }

    /// Adds the adapters that `targets` select. Returns their factors.
    pub(crate) fn attach(&mut self, targets: &LoraTargets) -> std::result::Result<Vec<ParamSpec>, ModelError> {
        let mut params = self.mixer.attach(targets, self.layer_idx)?;
        params.extend(self.mlp.attach(targets, self.layer_idx)?);
        Ok(params)
    }

    /// Returns the names that adapters may target.
    pub(crate) fn adapter_names(&self) -> AdapterNames {
        AdapterNames::of_linears(&self.mixer.linears()).and(self.mlp.adapter_names())
    }

    /// Returns the parameters. Matrices are initialized with standard deviation `std`.
    pub(crate) fn params(&self, std: f64) -> Vec<ParamSpec> {
        let embed = DimSize { dim: Dim::Embed, len: self.hidden_size };
        let mut params = vec![ParamSpec::norm(self.input_norm(), embed, ParamScope::ResidualStream)];
        params.extend(self.linears().flat_map(|linear| linear.params(std)));
        params.extend(self.mixer.own_params(std));
        params.push(ParamSpec::norm(self.mlp_norm(), embed, ParamScope::ResidualStream));
        params.extend(self.mlp.own_params(std));
        params
    }

    /// Returns the name of the norm before the mixer.
    fn input_norm(&self) -> String {
        format!("{}.input_layernorm.weight", self.name())
    }

    /// Returns the name of the norm before the MLP.
    fn mlp_norm(&self) -> String {
        format!("{}.post_attention_layernorm.weight", self.name())
    }
}

impl Layer {
    /// Builds the layer from the parameters that `get` returns by name.
    pub(crate) fn build(spec: &LayerSpec, get: &mut WeightLookup) -> Result<Self> {
        Ok(Self {
            input_norm: Norm { weight: get(&spec.input_norm())?, eps: spec.norm_eps },
            mixer: spec.mixer.build(spec.layer_idx, get)?,
            mlp_norm: Norm { weight: get(&spec.mlp_norm())?, eps: spec.norm_eps },
            mlp: spec.mlp.build(spec.layer_idx, get)?,
        })
    }

    /// Computes [t, d] -> [t, d].
    pub(crate) fn forward(&self, x_td: &Tensor, context: &ForwardContext) -> Result<Tensor> {
        let mixed_td = match self.mixer.forward_of_norm(self.input_norm.of(x_td, None), context)? {
            Some(mixed_td) => mixed_td,
            None => self.mixer.forward(self.input_norm.forward(x_td)?, context)?,
        };
        if let Some([x_td, y_td]) = self.mlp.forward_of_norm(self.mlp_norm.of(x_td, Some(&mixed_td)), context)? {
            return ops::add(&x_td, &y_td);
        }
        let Norm { weight, eps } = &self.mlp_norm;
        let (x_td, normed_td) = ops::add_rms_norm(x_td, &mixed_td, weight, *eps)?;
        ops::add(&x_td, &self.mlp.forward(&normed_td, context)?)
    }
}
