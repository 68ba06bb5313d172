//! config.json of a Hugging Face model. Unknown keys are preserved for export.

mod build;
pub(crate) mod json;
mod layer_freq;
mod list_expression;
mod moe;
mod moe_keys;
mod overrides;
mod rope;
mod router;
mod text_part;
mod typed;

use std::path::Path;

use candle_core::DType;
use candlewick_ops::{AttentionHeads, ModelAttention};
use serde_json::{Map, Value};

use crate::{Family, ModelError, QkNorm, family::MoeLayers};
pub(crate) use layer_freq::LAYER_FREQ;
pub use layer_freq::MoeLayerFreq;
pub use moe::{ExpertWeighting, MoeConfig, SharedExpertConfig};
pub(crate) use moe::{MAX_EXPERTS, ON_INPUT};
pub(crate) use rope::{LongRope, RopeKind, Yarn};
pub(crate) use router::{EXPERT_BIAS, ROUTER_KEYS, SCORE_FUNCTION, score_name};
use text_part::MultimodalConfig;
pub(crate) use typed::Typed;

/// Key of config.json with the number of MTP layers, as in DeepSeek-V3 and GLM-4.5.
const N_MTP_LAYERS: &str = "num_nextn_predict_layers";

/// Config of a model, from config.json. Unknown keys are preserved.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Keys of config.json; of a multimodal model those of its text.
    raw: Map<String, Value>,
    /// The whole file of a multimodal model, if the keys of its text are in an object of their own.
    multimodal: Option<MultimodalConfig>,
    pub(crate) typed: Typed,
    n_mtp_layers: usize,
}

macro_rules! accessors {
    ($($(#[$doc:meta])* $name:ident: $type:ty,)*) => {
        impl Config {
            $($(#[$doc])* pub fn $name(&self) -> $type { self.typed.$name })*
        }
    };
}

accessors! {
    /// Returns the model family.
    family: Family,
    /// Returns the vocabulary size.
    vocab_size: usize,
    /// Returns the hidden size.
    hidden_size: usize,
    /// Returns the MLP intermediate size.
    intermediate_size: usize,
    /// Returns the number of decoder layers.
    n_layers: usize,
    /// Returns the number of query heads.
    n_heads: usize,
    /// Returns the number of KV heads.
    n_kv_heads: usize,
    /// Returns the head size, which may differ from hidden_size / n_heads.
    head_dim: usize,
    /// Returns the model's context length (`max_position_embeddings`), in tokens.
    max_positions: usize,
    /// Returns the epsilon of every RMS norm.
    rms_norm_eps: f64,
    /// Returns true if input and output embeddings are tied.
    tied: bool,
    /// Returns the RMS norms of queries and keys (QK norm).
    qk_norm: QkNorm,
    /// Returns the BOS token id, if config.json has one.
    bos_id: Option<u32>,
    /// Returns the padding token id, if config.json has one.
    pad_id: Option<u32>,
    /// Returns the checkpoint's dtype (`dtype` or `torch_dtype`), if config.json has one.
    dtype: Option<DType>,
}

impl Config {
    /// Reads `config.json` from a model folder.
    pub fn read(folder: &Path) -> Result<Self, ModelError> {
        let path = folder.join("config.json");
        let raw = json::read_object(&path)?;
        Self::from_map(raw).map_err(|e| e.in_file(&path))
    }

    /// Parses and validates a config from a JSON value.
    pub fn from_json(value: Value) -> Result<Self, ModelError> {
        match value {
            Value::Object(raw) => Self::from_map(raw),
            other => Err(ModelError::Unsupported(format!(
                "expected config.json to be an object, found {}",
                json::shorten(&other)
            ))),
        }
    }

    fn from_map(raw: Map<String, Value>) -> Result<Self, ModelError> {
        let (text, multimodal) = text_part::split(raw)?;
        Ok(Self { multimodal, ..Self::from_text(text)? })
    }

    /// Creates the config of a text model, or of the text of a multimodal model, from its keys.
    fn from_text(mut raw: Map<String, Value>) -> Result<Self, ModelError> {
        let typed = build::typed(&raw)?;
        match (&typed.moe, typed.family.spec().moe) {
            (Some(moe), Some(family)) => layer_freq::write_family_keys(&mut raw, &moe.layers, family.layers),
            (None, Some(family)) => moe_keys::write_dense_layers(&mut raw, family, typed.n_layers),
            _ => {}
        }
        Ok(Self { raw, multimodal: None, typed, n_mtp_layers: 0 })
    }

    /// Returns the keys of config.json.
    pub(crate) fn raw(&self) -> &Map<String, Value> {
        &self.raw
    }

    /// Returns the config as JSON: all original keys in order, plus `architectures` and `model_type` if absent.
    pub fn to_json(&self) -> Value {
        self.to_json_with(self.raw.clone())
    }

    /// Returns [`Config::to_json`] with these keys of the text.
    fn to_json_with(&self, mut raw: Map<String, Value>) -> Value {
        let family = self.typed.family;
        raw.entry("architectures").or_insert_with(|| Value::from(vec![family.architecture()]));
        raw.entry("model_type").or_insert_with(|| Value::from(family.model_type()));
        Value::Object(self.multimodal.as_ref().map_or(raw.clone(), |whole| whole.with_text(&raw)))
    }

    /// Returns [`Config::to_json`] of an export, with its dtype and its number of MTP layers.
    pub fn to_json_as(&self, dtype: DType) -> Value {
        let mut raw = self.raw.clone();
        if let Some(name) = build::dtype_name(dtype) {
            let key = if raw.contains_key("dtype") { "dtype" } else { "torch_dtype" };
            raw.insert(key.to_string(), Value::from(name));
        }
        // A model without the MTP layers of its source has no weights of them to save.
        if let Some(n_mtp_layers) = raw.get_mut(N_MTP_LAYERS) {
            *n_mtp_layers = Value::from(self.n_mtp_layers);
        }
        self.to_json_with(raw)
    }

    /// Sets the number of layers for multi-token prediction (MTP), which exports list as `num_nextn_predict_layers`.
    /// Without this call there are none, whatever config.json says, as in transformers.
    pub fn with_mtp_layers(mut self, n_mtp_layers: usize) -> Self {
        if n_mtp_layers > 0 {
            self.raw.insert(N_MTP_LAYERS.to_string(), Value::from(n_mtp_layers));
        }
        Self { n_mtp_layers, ..self }
    }

    /// Sets the vocabulary size: the number of rows of embedding and output layer. A padding token beyond it is removed.
    pub(crate) fn with_vocab_size(mut self, vocab_size: usize) -> Self {
        if self.typed.pad_id.is_some_and(|id| id as usize >= vocab_size) {
            self.raw.remove("pad_token_id");
            self.typed.pad_id = None;
        }
        self.raw.insert("vocab_size".to_owned(), Value::from(vocab_size));
        self.typed.vocab_size = vocab_size;
        self
    }

    /// Returns the number of MTP layers.
    pub fn n_mtp_layers(&self) -> usize {
        self.n_mtp_layers
    }

    /// Returns the EOS token ids; empty if config.json has none.
    pub fn eos_ids(&self) -> &[u32] {
        &self.typed.eos_ids
    }

    /// Returns the mixture of experts; `None` for a dense model.
    pub fn moe(&self) -> Option<&MoeConfig> {
        self.typed.moe.as_ref()
    }

    /// Returns the mixture of experts of layer `layer_idx`; `None` if its MLP is dense.
    pub fn moe_of_layer(&self, layer_idx: usize) -> Option<&MoeConfig> {
        self.moe().filter(|moe| moe.layers.get(layer_idx).copied().unwrap_or(false))
    }

    /// Returns the keys of config.json that make all layers dense, although the model has a number of experts; `None` if a layer
    /// has experts, or the model has none.
    pub fn keys_without_experts(&self) -> Option<&'static str> {
        let (moe, family) = (self.moe()?, self.typed.family.spec().moe?);
        (!moe.layers.contains(&true)).then(|| layer_freq::layers_keys(family.layers))
    }

    /// Returns a warning if transformers computes another function or loads not all weights, because it does not read a key of
    /// config.json, or if it cannot load the model.
    pub fn transformers_warning(&self) -> Option<String> {
        let family = self.typed.family.spec().moe?;
        let Some(moe) = self.moe() else {
            let (key, _) = family.n_experts;
            let name = self.typed.family.model_type();
            let warning = || format!("transformers cannot load a {name} model without experts ({key} 0)");
            return matches!(family.layers, MoeLayers::All).then(warning);
        };
        let key = moe.unlike_family?;
        let consequence = match key {
            LAYER_FREQ => {
                "it expects experts in the dense layers, loads no weights there, and initializes them at random"
            }
            _ => "it computes another function with this model",
        };
        Some(format!("transformers does not read {key} of config.json: {consequence}"))
    }

    /// Returns a warning if the router's weight of each token is always 1, so that the loss of tokens gives routers no
    /// gradient.
    pub fn constant_weights(&self) -> Option<String> {
        let (moe, family) = (self.moe()?, self.typed.family.spec().moe?);
        // A single expert needs no router.
        let is_constant = moe.router.top_k == 1 && moe.router.normalize && moe.n_experts > 1;
        let setting = moe_keys::without_normalization(family);
        is_constant.then(|| {
            format!(
                "with num_experts_per_tok 1 each weight is 1, and routers learn nothing from the loss of tokens; set \
                 {setting}, or select more experts"
            )
        })
    }

    /// Returns the head counts and head size of attention.
    pub fn attention_heads(&self) -> AttentionHeads {
        AttentionHeads { n_query: self.n_heads(), n_kv: self.n_kv_heads(), dim: self.head_dim() }
    }

    /// Returns the attention of this model for sequences of at most `max_tokens`.
    pub fn attention(&self, max_tokens: usize) -> ModelAttention {
        let window = self.typed.windows.iter().copied().flatten().min();
        ModelAttention { heads: self.attention_heads(), window, max_tokens }
    }

    /// Returns the sliding window of layer `block_idx`: query i attends to key j if i - j < window.
    pub fn window(&self, block_idx: usize) -> Option<usize> {
        self.typed.windows.get(block_idx).copied().flatten()
    }
}

#[cfg(test)]
mod tests;
