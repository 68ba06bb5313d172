//! Metadata of a GGUF file.

use candle_core::quantized::gguf_file::Value;
use candlewick_text::tokenizer::GgufVocabulary;

use super::architecture::Architecture;
use super::file_type::GgufType;
use crate::Config;
use crate::config::RopeKind;

/// Version of the formats of quantized blocks: `GGML_QUANT_VERSION`.
const QUANTIZATION_VERSION: u32 = 2;

/// Keys and values in the order of the file.
#[derive(Default)]
struct Metadata(Vec<(String, Value)>);

impl Metadata {
    fn add(&mut self, key: impl Into<String>, value: Value) {
        self.0.push((key.into(), value));
    }

    fn count(&mut self, key: impl Into<String>, count: usize) {
        // Config rejects sizes of more than 2^28.
        self.add(key, Value::U32(count as u32));
    }

    fn text(&mut self, key: impl Into<String>, text: &str) {
        self.add(key, Value::String(text.to_owned()));
    }
}

/// Returns the keys of the file itself.
pub(super) fn general(name: &str, file_type: GgufType, architecture: Architecture) -> Vec<(String, Value)> {
    let mut metadata = Metadata::default();
    metadata.text("general.architecture", architecture.name());
    metadata.text("general.type", "model");
    metadata.text("general.name", name);
    metadata.add("general.file_type", Value::U32(file_type.number()));
    metadata.add("general.quantization_version", Value::U32(QUANTIZATION_VERSION));
    metadata.0
}

/// Returns the keys of the model.
pub(super) fn model(architecture: Architecture, config: &Config) -> Vec<(String, Value)> {
    let mut metadata = Metadata::default();
    let key = |name: &str| format!("{}.{name}", architecture.name());
    metadata.count(key("block_count"), config.n_layers());
    metadata.count(key("context_length"), config.max_positions());
    metadata.count(key("embedding_length"), config.hidden_size());
    metadata.count(key("feed_forward_length"), config.intermediate_size());
    metadata.count(key("attention.head_count"), config.n_heads());
    metadata.count(key("attention.head_count_kv"), config.n_kv_heads());
    metadata.count(key("attention.key_length"), config.head_dim());
    metadata.count(key("attention.value_length"), config.head_dim());
    metadata.add(key("attention.layer_norm_rms_epsilon"), Value::F32(config.rms_norm_eps() as f32));
    metadata.count(key("vocab_size"), config.vocab_size());
    metadata.count(key("rope.dimension_count"), config.typed.rotary_dim);
    metadata.add(key("rope.freq_base"), Value::F32(config.typed.rope_theta as f32));
    match &config.typed.rope {
        RopeKind::Linear { factor } => {
            metadata.text(key("rope.scaling.type"), "linear");
            metadata.add(key("rope.scaling.factor"), Value::F32(*factor as f32));
        }
        RopeKind::Yarn(yarn) => {
            metadata.text(key("rope.scaling.type"), "yarn");
            metadata.add(key("rope.scaling.factor"), Value::F32(yarn.factor as f32));
            metadata.count(key("rope.scaling.original_context_length"), yarn.original_positions as usize);
        }
        // Llama 3.1's scaling is a tensor. `Architecture` refuses the others.
        RopeKind::Default | RopeKind::Llama3 { .. } | RopeKind::LongRope(_) | RopeKind::Dynamic { .. } => {}
    }
    let Some(moe) = config.moe() else { return metadata.0 };
    metadata.count(key("expert_count"), moe.n_experts);
    metadata.count(key("expert_used_count"), moe.router.top_k);
    if architecture != Architecture::Llama {
        metadata.count(key("expert_feed_forward_length"), moe.expert_size);
    }
    if let Some(shared) = &moe.shared_expert {
        metadata.count(key("expert_shared_feed_forward_length"), shared.intermediate_size);
    }
    metadata.0
}

/// Returns the keys of the tokenizer.
pub(super) fn tokenizer(vocabulary: &GgufVocabulary) -> Vec<(String, Value)> {
    let mut metadata = Metadata::default();
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let texts = |texts: &[String]| Value::Array(texts.iter().cloned().map(Value::String).collect());
    metadata.text(key("model"), vocabulary.model);
    metadata.text(key("pre"), vocabulary.pre);
    metadata.add(key("tokens"), texts(&vocabulary.tokens));
    if let Some(scores) = &vocabulary.scores {
        metadata.add(key("scores"), Value::Array(scores.iter().copied().map(Value::F32).collect()));
    }
    let types = vocabulary.types.iter().map(|kind| Value::I32(*kind as i32));
    metadata.add(key("token_type"), Value::Array(types.collect()));
    if !vocabulary.merges.is_empty() {
        metadata.add(key("merges"), texts(&vocabulary.merges));
    }
    for (role, id) in &vocabulary.special_ids {
        metadata.add(key(&format!("{role}_token_id")), Value::U32(*id));
    }
    metadata.add(key("add_bos_token"), Value::Bool(vocabulary.adds_bos));
    metadata.add(key("add_eos_token"), Value::Bool(vocabulary.adds_eos));
    if let Some(adds_prefix) = vocabulary.adds_space_prefix {
        metadata.add(key("add_space_prefix"), Value::Bool(adds_prefix));
    }
    let is_default = |name: &str| name == "default";
    for (name, template) in &vocabulary.chat_templates {
        match is_default(name) {
            true => metadata.text("tokenizer.chat_template", template),
            false => metadata.text(format!("tokenizer.chat_template.{name}"), template),
        }
    }
    let others: Vec<String> =
        vocabulary.chat_templates.iter().map(|(name, _)| name).filter(|name| !is_default(name)).cloned().collect();
    if !others.is_empty() {
        metadata.add("tokenizer.chat_templates", texts(&others));
    }
    metadata.0
}
