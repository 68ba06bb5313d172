//! `hf_config_kwargs`: overrides of config.json in a recipe.

use candlewick_text::suggestion::did_you_mean;
use serde_json::{Map, Value};

use super::{Config, ROUTER_KEYS, Typed, rope};
use crate::{
    ModelError,
    family::{Bias, Window},
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
    "embd_pdrop",
    "hidden_dropout",
    "is_llama_config",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "output_attentions",
    "output_hidden_states",
    "pretraining_tp",
    "quantization_config",
    "resid_pdrop",
    "rope_interleaved",
    "tokenizer_class",
    "transformers.js_config",
    "transformers_version",
    "use_cache",
];

impl Config {
    /// Parses a config written by hand, as [`Config::from_json`], and rejects unknown keys.
    pub fn from_handwritten(map: &Map<String, Value>) -> Result<Self, ModelError> {
        // A misspelled key is reported before errors that follow from it.
        map.keys().try_for_each(|key| refuse_unknown(key, "model"))?;
        let config = Self::from_json(Value::Object(map.clone()))?;
        map.iter().try_for_each(|(key, value)| config.refuse_unread(key, value))?;
        Ok(config)
    }

    /// Overrides keys of config.json and validates the result.
    ///
    /// Returns the overridden keys that change parameter names or shapes. If there are any, the checkpoint's weights no
    /// longer fit.
    pub fn apply_overrides(&mut self, overrides: &Map<String, Value>) -> Result<Vec<String>, ModelError> {
        let mut raw = self.raw.clone();
        for (key, value) in overrides {
            // Keys of the file are exported even if nothing reads them.
            if !self.raw.contains_key(key) {
                refuse_unknown(key, self.typed.family.model_type())?;
            }
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
        let changed = Self::from_map(raw)?;
        overrides.iter().try_for_each(|(key, value)| changed.refuse_unread(key, value))?;
        let reshaped = reshaped(&self.typed, &changed.typed);
        *self = changed;
        Ok(reshaped)
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
            key if MOE_KEYS.contains(&key) || ROUTER_KEYS.contains(&key) => family_spec.moe.is_some(),
            "attention_bias" | "qkv_bias" => has_bias(&[family_spec.qkv_bias, family_spec.o_bias]),
            "use_qk_norm" => family_spec.qk_norm_key.is_some(),
            "mlp_bias" => has_bias(&[family_spec.mlp_bias]),
            _ => true,
        };
        if is_read || value.is_null() || *value == Value::Bool(false) {
            return Ok(());
        }
        let family = self.typed.family.model_type();
        Err(ModelError::key(key, format!("has no effect on a {family} model; remove the key")))
    }
}

fn refuse_unknown(key: &str, family: &str) -> Result<(), ModelError> {
    if [KNOWN, MOE_KEYS, &ROUTER_KEYS, INERT].iter().any(|keys| keys.contains(&key)) {
        return Ok(());
    }
    let hint = did_you_mean(key, KNOWN.iter().chain(MOE_KEYS).chain(&ROUTER_KEYS).copied());
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

/// Keys of mixture-of-experts models.
const MOE_KEYS: &[&str] = &[
    "decoder_sparse_step",
    "first_k_dense_replace",
    "mlp_only_layers",
    "moe_apply_probs_on_input",
    "moe_intermediate_size",
    "moe_layer_freq",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts",
    "num_experts_per_tok",
    "num_local_experts",
    "routed_scaling_factor",
    "router_aux_loss_coef",
    "shared_expert_intermediate_size",
    "topk_group",
];

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
