//! Tiny model with random weights, in a Hugging Face folder.
#![allow(dead_code, clippy::unwrap_used, missing_docs, unreachable_pub)]

pub mod scripted;
pub mod workspace;

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use candlewick_model::checkpoint::{AuxiliaryFiles, CheckpointExport, DEFAULT_SHARD_BYTES, ExpertTensors};
use candlewick_model::{Config, Model, ParamSpec};
use serde_json::{Value, json};

/// Context length in tokens.
pub const CONTEXT: usize = 64;

/// Writes a model with weights from `seed`, and returns its folder.
pub fn export(folder: &Path, seed: u64) -> PathBuf {
    export_with(folder, seed, json!({"model_type": "llama"}))
}

/// Writes a model with four experts per layer, of which a token selects two.
pub fn export_experts(folder: &Path, seed: u64) -> PathBuf {
    let keys = json!({
        "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 4,
        "norm_topk_prob": true
    });
    export_with(folder, seed, keys)
}

/// Writes a model with LongRoPE, whose original context is `original` tokens.
pub fn export_long_rope(folder: &Path, seed: u64, original: usize) -> PathBuf {
    let scaling = json!({
        "rope_type": "longrope", "original_max_position_embeddings": original,
        "short_factor": [1.0, 1.1], "long_factor": [2.0, 7.0],
    });
    export_with(folder, seed, json!({"model_type": "llama", "rope_scaling": scaling}))
}

fn export_with(folder: &Path, seed: u64, keys: Value) -> PathBuf {
    let random = |spec: &ParamSpec| {
        let mut values = vec![0.0; spec.numel()];
        spec.initialise(seed, &mut values);
        values
    };
    export_values(folder, keys, random)
}

fn export_values(folder: &Path, keys: Value, values: impl Fn(&ParamSpec) -> Vec<f32>) -> PathBuf {
    let folder = folder.join("model");
    let mut config = json!({
        "vocab_size": 600, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "initializer_range": 0.3,
    });
    config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    let model = Model::new(Config::from_json(config).unwrap(), None).unwrap();
    let tokenizer = root().join("recipes/quickstart/tokenizer");
    let auxiliary_files = AuxiliaryFiles { folders: &[&tokenizer], chat_template: None, files: &[] };
    let (config, dtype, shard_bytes) = (model.config(), DType::F32, DEFAULT_SHARD_BYTES);
    let export = CheckpointExport {
        folder: &folder,
        config,
        auxiliary_files,
        dtype,
        shard_bytes,
        expert_tensors: ExpertTensors::Separate,
    };
    let tensor = |spec: &ParamSpec| Tensor::from_vec(values(spec), spec.shape.as_slice(), &Device::Cpu);
    export.save(model.base_params(), tensor).unwrap();
    folder
}

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}
