//! A decoder layer, and its specification, from which it is built and memory and FLOPs are estimated.
//!
//! Dimensions: t tokens (packed), d hidden size

use candle_core::{Result, Tensor};
use candlewick_ops as ops;

use crate::linear_spec::layer_name;
use crate::lora::{AdapterNames, LoraTargets};
use crate::{
    AdapterSpec, Config, Dim, DimSize, ExpertAdapterSpec, ExpertMatrixSpec, ForwardContext, LinearSpec, Mixer,
    MixerSpec, MixerSplit, Mlp, MlpSpec, ModelError, NormPlacement, ParamScope, ParamSpec, WeightLookup, norm::Norm,
    norm_placement::SublayerNorms,
};

/// One decoder layer: x + s mixer(norm(x)), then x + s mlp(norm(x)), with norms as [`NormPlacement`] says.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    /// Index of the layer.
    pub layer_idx: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Epsilon of every RMS norm.
    pub norm_eps: f64,
    /// Positions of the norms.
    pub norms: NormPlacement,
    /// Factor s of both sublayers' outputs, as Granite's `residual_multiplier`; 1 for none.
    pub residual_scale: f64,
    /// Token-mixing sublayer (attention).
    pub mixer: Box<dyn MixerSpec>,
    /// MLP sublayer.
    pub mlp: Box<dyn MlpSpec>,
}

/// A decoder layer, as its [`LayerSpec`] says.
pub struct Layer {
    mixer_norms: SublayerNorms<Norm>,
    mixer: Box<dyn Mixer>,
    mlp_norms: SublayerNorms<Norm>,
    mlp: Box<dyn Mlp>,
    residual_scale: f64,
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
            norms: NormPlacement::Pre,
            residual_scale: 1.0,
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
        let norm = |name: Option<String>| name.map(|name| ParamSpec::norm(name, embed, ParamScope::ResidualStream));
        let (of_mixer, of_mlp) = (self.norms.of_mixer(self.layer_idx), self.norms.of_mlp(self.layer_idx));
        let mut params = Vec::from_iter(norm(of_mixer.before));
        params.extend(self.linears().flat_map(|linear| linear.params(std)));
        params.extend(self.mixer.own_params(std));
        params.extend(norm(of_mixer.after).into_iter().chain(norm(of_mlp.before)));
        params.extend(self.mlp.own_params(std));
        params.extend(norm(of_mlp.after));
        params
    }
}

impl Layer {
    /// Builds the layer from the parameters that `get` returns by name.
    pub(crate) fn build(spec: &LayerSpec, get: &mut WeightLookup) -> Result<Self> {
        let layer_idx = spec.layer_idx;
        let mut norms = |names: SublayerNorms<String>| {
            names.try_map(|name| Ok::<_, candle_core::Error>(Norm { weight: get(&name)?, eps: spec.norm_eps }))
        };
        Ok(Self {
            mixer_norms: norms(spec.norms.of_mixer(layer_idx))?,
            mlp_norms: norms(spec.norms.of_mlp(layer_idx))?,
            mixer: spec.mixer.build(layer_idx, get)?,
            mlp: spec.mlp.build(layer_idx, get)?,
            residual_scale: spec.residual_scale,
        })
    }

    /// Computes [t, d] -> [t, d].
    pub(crate) fn forward(&self, x_td: &Tensor, context: &ForwardContext) -> Result<Tensor> {
        let mixed_td = self.output(self.mixed(x_td, context)?, &self.mixer_norms)?;
        let Some(norm) = &self.mlp_norms.before else {
            let x_td = ops::add(x_td, &mixed_td)?;
            let y_td = self.mlp.forward(&input_without_norm(&x_td, &self.mlp_norms)?, context)?;
            return ops::add(&x_td, &self.output(y_td, &self.mlp_norms)?);
        };
        if let Some([x_td, y_td]) = self.mlp.forward_of_norm(norm.of(x_td, Some(&mixed_td)), context)? {
            return ops::add(&x_td, &self.output(y_td, &self.mlp_norms)?);
        }
        let (x_td, normed_td) = ops::add_rms_norm(x_td, &mixed_td, &norm.weight, norm.eps)?;
        ops::add(&x_td, &self.output(self.mlp.forward(&normed_td, context)?, &self.mlp_norms)?)
    }

    /// Computes the mixer with the norm before it.
    fn mixed(&self, x_td: &Tensor, context: &ForwardContext) -> Result<Tensor> {
        let Some(norm) = &self.mixer_norms.before else {
            return self.mixer.forward(input_without_norm(x_td, &self.mixer_norms)?, context);
        };
        match self.mixer.forward_of_norm(norm.of(x_td, None), context)? {
            Some(mixed_td) => Ok(mixed_td),
            None => self.mixer.forward(norm.forward(x_td)?, context),
        }
    }

    /// Applies the norm after a sublayer, and the residual scale, to the sublayer's output.
    fn output(&self, y_td: Tensor, norms: &SublayerNorms<Norm>) -> Result<Tensor> {
        let y_td = match &norms.after {
            Some(norm) => norm.forward(&y_td)?,
            None => y_td,
        };
        if self.residual_scale == 1.0 { Ok(y_td) } else { ops::scale(&y_td, self.residual_scale, y_td.dtype()) }
    }
}

/// Returns the input of a sublayer without a norm before it, in the dtype of the sublayer's weights. A residual stream in f32 is
/// rounded, as a norm would do.
fn input_without_norm(x_td: &Tensor, norms: &SublayerNorms<Norm>) -> Result<Tensor> {
    match norms.after.as_ref().map(|norm| norm.weight.dtype()) {
        Some(dtype) if dtype != x_td.dtype() => ops::scale(x_td, 1.0, dtype),
        _ => Ok(x_td.clone()),
    }
}
