//! config.json of a Hugging Face model: typed, checked, and kept whole so that it can be written back.

mod build;
pub(crate) mod json;
mod overrides;
mod rope;
mod typed;

use std::path::Path;

use candle_core::DType;
use candlewick_ops::AttentionHeads;
use serde_json::{Map, Value};

use crate::{Family, ModelError};
pub(crate) use rope::RopeKind;
use typed::Typed;

/// A model's config.json. Values are read through the accessors; keys this crate does not know are kept as they are.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    raw: Map<String, Value>,
    pub(crate) typed: Typed,
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
    /// Returns the number of rows of the embedding.
    vocab_size: usize,
    /// Returns the model width.
    hidden_size: usize,
    /// Returns the width of the MLP.
    intermediate_size: usize,
    /// Returns the number of blocks.
    n_layers: usize,
    /// Returns the number of query heads.
    n_heads: usize,
    /// Returns the number of key and value heads.
    n_kv_heads: usize,
    /// Returns the width of one head; it need not be hidden_size / n_heads.
    head_dim: usize,
    /// Returns the longest sequence the model was made for (`max_position_embeddings`).
    max_positions: usize,
    /// Returns the epsilon of every RMS norm.
    rms_norm_eps: f64,
    /// Returns whether the output layer is the embedding.
    tied: bool,
    /// Returns whether every head's query and key are normalised.
    qk_norm: bool,
    /// Returns the token that begins a sequence, if config.json names one.
    bos_id: Option<u32>,
    /// Returns the padding token, if config.json names one.
    pad_id: Option<u32>,
    /// Returns the number format of the checkpoint (`dtype` or `torch_dtype`), if config.json names one.
    dtype: Option<DType>,
}

impl Config {
    /// Reads `config.json` in a model folder.
    pub fn read(folder: &Path) -> Result<Self, ModelError> {
        let path = folder.join("config.json");
        let raw = json::read_object(&path)?;
        Self::from_map(raw).map_err(|e| e.in_file(&path))
    }

    /// Checks a config given as a JSON value, from a file or from a recipe.
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
        let typed = build::typed(&raw)?;
        Ok(Self { raw, typed })
    }

    /// Returns the config as config.json has it: every key that came in, in the same order, plus the two names by which
    /// transformers finds the class, if they were missing.
    pub fn to_json(&self) -> Value {
        let mut raw = self.raw.clone();
        let family = self.typed.family;
        raw.entry("architectures").or_insert_with(|| Value::from(vec![family.architecture()]));
        raw.entry("model_type").or_insert_with(|| Value::from(family.model_type()));
        Value::Object(raw)
    }

    /// Returns [`Config::to_json`] for weights written in `dtype`.
    pub fn to_json_as(&self, dtype: DType) -> Value {
        let mut value = self.to_json();
        if let (Some(name), Some(raw)) = (build::dtype_name(dtype), value.as_object_mut()) {
            let key = if raw.contains_key("dtype") { "dtype" } else { "torch_dtype" };
            raw.insert(key.to_string(), Value::from(name));
        }
        value
    }

    /// Returns the tokens that end a sequence; empty if config.json names none.
    pub fn eos_ids(&self) -> &[u32] {
        &self.typed.eos_ids
    }

    /// Returns the heads of attention.
    pub fn attention_heads(&self) -> AttentionHeads {
        AttentionHeads { n_query: self.n_heads(), n_kv: self.n_kv_heads(), dim: self.head_dim() }
    }

    /// Returns the sliding window of a block, if it has one: key j is visible to query i while i - j < window.
    pub fn window(&self, block_idx: usize) -> Option<usize> {
        self.typed.windows.get(block_idx).copied().flatten()
    }
}

#[cfg(test)]
mod tests;
