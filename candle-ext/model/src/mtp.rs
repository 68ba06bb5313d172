//! Multi-token prediction (MTP): layers after the last one that predict later tokens, as in DeepSeek-V3
//! ([arXiv:2412.19437](https://arxiv.org/abs/2412.19437), section 2.2) and Megatron-LM.
//!
//! Dimensions: t tokens (packed), d hidden size

use candle_core::{DType, Result, Tensor};
use candlewick_ops::{self as ops, OutputDtype, Weight};

use crate::layer::Layer;
use crate::norm::Norm;
use crate::{Config, Dim, DimSize, ForwardContext, Init, LayerSpec, ParamScope, ParamSpec, WeightLookup};

/// An MTP layer: norm(layer(projection([norm(embedding), norm(hidden)]))).
///
/// The embedding is that of a later token. Embedding and output layer are the model's.
pub struct MtpLayer {
    embedding_norm: Norm,
    hidden_norm: Norm,
    /// [d, 2 d].
    projection: Weight,
    layer: Layer,
    norm: Norm,
}

/// Names of an MTP layer's own parameters, as in Hub checkpoints of DeepSeek-V3 and GLM-4.5.
struct Names {
    embedding_norm: String,
    hidden_norm: String,
    projection: String,
    norm: String,
}

impl Names {
    fn of(layer: &LayerSpec) -> Self {
        let name = |module: &str| format!("{}.{module}.weight", layer.name());
        Self {
            embedding_norm: name("enorm"),
            hidden_norm: name("hnorm"),
            projection: name("eh_proj"),
            norm: name("shared_head.norm"),
        }
    }
}

/// Returns the parameters of an MTP layer with this decoder layer.
pub(crate) fn params(config: &Config, layer: &LayerSpec) -> Vec<ParamSpec> {
    let (names, std) = (Names::of(layer), config.typed.initializer_range);
    let norm = |name| ParamSpec::norm(name, config.embed(), ParamScope::ResidualStream);
    let both = DimSize { dim: Dim::Embed, len: 2 * config.hidden_size() };
    let init = Init::Normal { std, zero_row: None };
    let projection = ParamSpec::matrix(names.projection, [config.embed(), both], ParamScope::ResidualStream, init);
    let mut params = vec![norm(names.embedding_norm), norm(names.hidden_norm), projection];
    params.extend(layer.params(std));
    params.push(norm(names.norm));
    params
}

impl MtpLayer {
    /// Builds the layer from the parameters that `get` returns by name.
    pub(crate) fn build(spec: &LayerSpec, get: &mut WeightLookup) -> Result<Self> {
        let names = Names::of(spec);
        let mut norm = |name: &str| Ok::<_, candle_core::Error>(Norm { weight: get(name)?, eps: spec.norm_eps });
        let (embedding_norm, hidden_norm) = (norm(&names.embedding_norm)?, norm(&names.hidden_norm)?);
        let norm = norm(&names.norm)?;
        Ok(Self {
            embedding_norm,
            hidden_norm,
            projection: get(&names.projection)?,
            layer: Layer::build(spec, get)?,
            norm,
        })
    }

    /// Computes hidden states after the norm: of the layer before, and embeddings of the next tokens, [t, d] each ->
    /// [t, d].
    ///
    /// The residual stream of the layer has the dtype of the embeddings.
    pub(crate) fn forward(&self, hidden_td: &Tensor, embedded_td: &Tensor, context: &ForwardContext) -> Result<Tensor> {
        let residual = if embedded_td.dtype() == DType::F32 { OutputDtype::F32 } else { OutputDtype::SameAsInput };
        let (embedded_td, hidden_td) =
            (self.embedding_norm.forward(embedded_td)?, self.hidden_norm.forward(hidden_td)?);
        let both = ops::concat(&embedded_td, &hidden_td)?;
        let x_td = ops::linear(&both, &self.projection, None, residual)?;
        self.norm.forward(&self.layer.forward(&x_td, context)?)
    }
}
