//! `hf_config_kwargs`: overrides of config.json in a recipe.

use candlewick_text::suggestion::did_you_mean;
use serde_json::{Map, Value};

use super::json::Keys;
use super::moe_keys::{self, MOE_KEYS, OF_MEGATRON, UnreadKey};
use super::{Config, ROUTER_KEYS, Typed, rope};
use crate::{
    Family, ModelError,
    family::{Bias, MoeFamily, Window},
};

/// Keys that an override may set even if config.json lacks them.
const KNOWN: &[&str] = &[
    "architectures",
    "attention_bias",
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "pad_token_id",
    "partial_rotary_factor",
    "qkv_bias",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "torch_dtype",
    "use_qk_norm",
    "use_sliding_window",
    "vocab_size",
];

/// Keys of transformers without effect here.
const INERT: &[&str] = &[
    "_attn_implementation",
    "_name_or_path",
    "auto_map",
    "chunk_size_feed_forward",
    "embd_pdrop",
    "hidden_dropout",
    "id2label",
    "is_encoder_decoder",
    "is_llama_config",
    "label2id",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "output_attentions",
    "output_hidden_states",
    "pretraining_tp",
    "problem_type",
    "quantization_config",
    "resid_pdrop",
    "return_dict",
    "rope_interleaved",
    "tokenizer_class",
    "transformers.js_config",
    "transformers_version",
    "use_cache",
];

impl Config {
    /// Parses a config written by hand, as [`Config::from_json`], and rejects unknown keys and keys of other families.
    pub fn from_handwritten(map: &Map<String, Value>) -> Result<Self, ModelError> {
        // A misspelled key is reported before errors that follow from it.
        map.keys().try_for_each(|key| refuse_unknown(key, "model"))?;
        let mut raw = map.clone();
        if let Some(moe) = family_of(map).and_then(|family| family.spec().moe) {
            moe_keys::rename_expert_count(&mut raw, moe)?;
        }
        let config = Self::from_map(raw)?;
        config.refuse_without_effect(map)?;
        Ok(config)
    }

    /// Overrides keys of config.json and validates the result.
    ///
    /// Returns the overridden keys that change parameter names or shapes. If there are any, the checkpoint's weights no
    /// longer fit.
    pub fn apply_overrides(&mut self, overrides: &Map<String, Value>) -> Result<Vec<String>, ModelError> {
        // Keys of the file are exported even if nothing reads them.
        let mut new_keys = overrides.keys().filter(|key| !self.raw.contains_key(*key));
        new_keys.try_for_each(|key| refuse_unknown(key, self.typed.family.model_type()))?;
        let renamed = self.with_expert_count_of_family(overrides)?;
        let mut raw = self.raw.clone();
        moe_keys::remove_replaced_counts(&mut raw, &renamed);
        for (key, value) in &renamed {
            match rope::SPELLINGS.contains(&key.as_str()) {
                true => rope::replace_scaling(&mut raw, key, value),
                false => _ = raw.insert(key.clone(), value.clone()),
            }
            set_theta_where_it_is_read(&mut raw, key, value);
        }
        if overrides.contains_key("max_position_embeddings") {
            rope::SPELLINGS.iter().try_for_each(|name| rope::require_original(&raw, name, overrides))?;
        }
        if !overrides.contains_key("layer_types") {
            shorten_layer_types(&mut raw);
        }
        let changed = Self::from_text(raw)?;
        let multimodal = self.multimodal.clone().filter(|_| changed.typed.family == self.typed.family);
        let changed = Self { multimodal, ..changed };
        changed.refuse_without_effect(overrides)?;
        let reshaped = reshaped(&self.typed, &changed.typed);
        *self = changed;
        Ok(reshaped)
    }

    /// Returns overrides with the family's name of the number of experts.
    fn with_expert_count_of_family(&self, overrides: &Map<String, Value>) -> Result<Map<String, Value>, ModelError> {
        let (mut renamed, mut merged) = (overrides.clone(), self.raw.clone());
        merged.extend(overrides.clone());
        if let Some(moe) = family_of(&merged).and_then(|family| family.spec().moe) {
            moe_keys::rename_expert_count(&mut renamed, moe)?;
        }
        Ok(renamed)
    }

    /// Rejects keys of a recipe without an effect, and those that keep the routers from learning.
    fn refuse_without_effect(&self, written: &Map<String, Value>) -> Result<(), ModelError> {
        written.iter().try_for_each(|(key, value)| self.refuse_unread(key, value))?;
        let key = moe_keys::WEIGHT_KEYS.iter().find(|key| written.contains_key(**key));
        match (self.constant_weights(), key) {
            (Some(problem), Some(key)) => Err(ModelError::key(key, problem)),
            _ => Ok(()),
        }
    }

    /// Rejects a key that this family does not use, unless its value has no effect.
    fn refuse_unread(&self, key: &str, value: &Value) -> Result<(), ModelError> {
        if rope::SPELLINGS.contains(&key) {
            rope::refuse_unread(key, value)?;
        }
        let family_spec = self.typed.family.spec();
        let has_some = matches!(family_spec.window, Window::Some { .. });
        let has_bias = |bias: &[Bias]| {
            bias.iter().any(|bias| matches!(bias, Bias::Key(name) | Bias::KeyOrTrue(name) if *name == key))
        };
        let is_read = match key {
            "sliding_window" => !matches!(family_spec.window, Window::None),
            "use_sliding_window" | "max_window_layers" | "layer_types" => has_some,
            key if MOE_KEYS.contains(&key) || ROUTER_KEYS.contains(&key) => match family_spec.moe {
                Some(moe) => return self.refuse_key_of_another_family(moe, key, value),
                None => false,
            },
            "attention_bias" | "qkv_bias" => has_bias(&[family_spec.qkv_bias, family_spec.o_bias]),
            "use_qk_norm" => family_spec.qk_norm_key.is_some(),
            "mlp_bias" => has_bias(&[family_spec.mlp_bias]),
            _ => true,
        };
        if is_read || value.is_null() || *value == Value::Bool(false) {
            return Ok(());
        }
        Err(self.no_effect(key, "remove the key"))
    }

    /// Rejects a key of a mixture of experts that this family does not read, and names its key with that meaning.
    fn refuse_key_of_another_family(&self, family: &MoeFamily, key: &str, value: &Value) -> Result<(), ModelError> {
        match moe_keys::unread_key(family, key, value) {
            None => Ok(()),
            Some(UnreadKey { instead: Some(instead) }) => Err(self.no_effect(key, &format!("use {instead} instead"))),
            Some(UnreadKey { instead: None }) => Err(self.no_effect(key, "remove the key")),
        }
    }

    fn no_effect(&self, key: &str, remedy: &str) -> ModelError {
        let family = self.typed.family.model_type();
        ModelError::key(key, format!("has no effect on a {family} model; {remedy}"))
    }
}

/// Returns the family that a config names, if it is supported.
fn family_of(raw: &Map<String, Value>) -> Option<Family> {
    let keys = Keys::new(raw);
    Family::find(&keys.texts("architectures").ok()?.unwrap_or_default(), keys.text("model_type").ok()?).ok()
}

fn refuse_unknown(key: &str, family: &str) -> Result<(), ModelError> {
    if [KNOWN, MOE_KEYS, &ROUTER_KEYS, INERT].iter().any(|keys| keys.contains(&key)) {
        return Ok(());
    }
    let of_megatron = OF_MEGATRON.iter().find(|(name, _)| *name == key);
    let hint = match of_megatron {
        Some((_, name)) => format!("; use {name}"),
        None => did_you_mean(key, KNOWN.iter().chain(MOE_KEYS).chain(&ROUTER_KEYS).copied()),
    };
    Err(ModelError::key(key, format!("not a key of a {family} config that is read here{hint}")))
}

/// Sets `rope_theta` inside `rope_parameters` if it is there: the inner key takes precedence.
fn set_theta_where_it_is_read(raw: &mut Map<String, Value>, key: &str, value: &Value) {
    if key != "rope_theta" {
        return;
    }
    for name in rope::SPELLINGS {
        if let Some(nested) = raw.get_mut(name).and_then(Value::as_object_mut)
            && nested.contains_key("rope_theta")
        {
            nested.insert(key.to_string(), value.clone());
        }
    }
}

/// Truncates `layer_types` to the number of layers.
fn shorten_layer_types(raw: &mut Map<String, Value>) {
    let n_layers = raw.get("num_hidden_layers").and_then(Value::as_u64);
    let types = raw.get_mut("layer_types").and_then(Value::as_array_mut);
    if let (Some(n_layers), Some(types)) = (n_layers.and_then(|n| usize::try_from(n).ok()), types) {
        types.truncate(n_layers);
    }
}

fn reshaped(before: &Typed, after: &Typed) -> Vec<String> {
    let same = [
        ("model_type", before.family == after.family),
        ("vocab_size", before.vocab_size == after.vocab_size),
        ("hidden_size", before.hidden_size == after.hidden_size),
        ("intermediate_size", before.intermediate_size == after.intermediate_size),
        ("num_hidden_layers", before.n_layers == after.n_layers),
        ("num_attention_heads", before.n_heads == after.n_heads),
        ("num_key_value_heads", before.n_kv_heads == after.n_kv_heads),
        ("head_dim", before.head_dim == after.head_dim),
        ("attention_bias", before.qkv_bias == after.qkv_bias && before.o_bias == after.o_bias),
        ("mlp_bias", before.mlp_bias == after.mlp_bias),
        ("num_experts", same_experts(before, after)),
        ("moe_router_enable_expert_bias", has_bias(before) == has_bias(after)),
        ("tie_word_embeddings", before.tied == after.tied),
    ];
    same.into_iter().filter(|(_, same)| !same).map(|(key, _)| key.to_string()).collect()
}

/// Returns true if both configs have the same expert tensors.
fn same_experts(before: &Typed, after: &Typed) -> bool {
    let shapes = |typed: &Typed| {
        let moe = typed.moe.as_ref()?;
        Some((moe.n_experts, moe.expert_size, moe.shared_expert, moe.layers.clone()))
    };
    shapes(before) == shapes(after)
}

fn has_bias(typed: &Typed) -> bool {
    typed.moe.as_ref().is_some_and(|moe| moe.expert_bias)
}
