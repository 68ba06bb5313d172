//! Specifications of linear layers.

use candlewick_ops::WeightStorage;

use crate::{AdapterSpec, Config, Dim, DimSize, Init, ParamScope, ParamSpec};

/// A linear layer y = x W^T + b.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearSpec {
    /// Hugging Face module name, such as `model.layers.0.self_attn.q_proj`.
    pub module: String,
    /// Output features.
    pub out: DimSize,
    /// Input features.
    pub input: DimSize,
    /// True if the layer has a bias.
    pub bias: bool,
    /// Storage of the weight: dense or quantized.
    pub storage: WeightStorage,
    /// True if the layer multiplies in FP8 during training.
    pub fp8: bool,
    /// LoRA adapter of the layer.
    pub adapter: Option<AdapterSpec>,
}

impl Config {
    /// Returns the hidden size as a named dimension.
    pub(crate) fn embed(&self) -> DimSize {
        DimSize { dim: Dim::Embed, len: self.typed.hidden_size }
    }
}

impl LinearSpec {
    /// Creates a dense layer without adapter.
    pub fn new(module: String, [out, input]: [DimSize; 2], bias: bool) -> Self {
        Self { module, out, input, bias, storage: WeightStorage::Dense, fp8: false, adapter: None }
    }

    /// Returns the name of W [out, input].
    pub fn weight_name(&self) -> String {
        format!("{}.weight", self.module)
    }

    /// Returns the name of b [out].
    pub fn bias_name(&self) -> String {
        format!("{}.bias", self.module)
    }

    /// Returns the number of elements of W.
    pub fn n_weights(&self) -> usize {
        self.out.len * self.input.len
    }

    /// Returns true if the layer has neither a bias nor an adapter.
    pub fn is_plain(&self) -> bool {
        !self.bias && self.adapter.is_none()
    }

    /// Returns weight and bias, without LoRA factors.
    pub(crate) fn params(&self, std: f64) -> Vec<ParamSpec> {
        let init = Init::Normal { std, zero_row: None };
        let mut params =
            vec![ParamSpec::matrix(self.weight_name(), [self.out, self.input], ParamScope::Sublayer, init)];
        if self.bias {
            params.push(ParamSpec::vector(self.bias_name(), self.out, ParamScope::Sublayer, Init::Zeros));
        }
        params
    }
}

/// Returns the Hugging Face module name of a decoder layer.
pub(crate) fn layer_name(layer_idx: usize) -> String {
    format!("model.layers.{layer_idx}")
}
