//! Logits of every family compared with candle-transformers, which shares no code with ours above candle-core.
//!
//! The tolerance is that of the fixtures, 1e-5 of the norm: both sides compute in f32 and add at most some tens of terms, in
//! different orders. candle-transformers returns the logits of the last token, so that each prefix is computed anew. Its sliding
//! windows are one token longer than transformers', and its llama has no biases: neither is compared.

use std::collections::HashMap;

use ::candle_transformers::models::{llama, mistral, qwen2, qwen3};
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candlewick_model::{Config, Model};
use serde_json::{Value, json};

use crate::tiny::{Tiny, assert_close};

const N_TOKENS: usize = 9;

/// Returns the logits of the last token.
type Forward = Box<dyn FnMut(&Tensor) -> Tensor>;

fn keys(architecture: &str, model_type: &str) -> Value {
    json!({
        "architectures": [architecture], "model_type": model_type, "hidden_act": "silu", "hidden_size": 32,
        "intermediate_size": 44, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "vocab_size": 50, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "initializer_range": 0.2, "tie_word_embeddings": false, "attention_bias": false, "sliding_window": null,
    })
}

/// Returns random weights other than zero and one.
fn weights(model: &Model) -> HashMap<String, Tensor> {
    let params = model.units().iter().flat_map(|unit| &unit.params);
    params
        .map(|param| {
            let mut values = vec![0f32; param.numel()];
            param.initialise(7, &mut values);
            values.iter_mut().enumerate().for_each(|(i, x)| *x += 0.1 * (0.7 * i as f32).sin());
            (param.name.clone(), Tensor::from_vec(values, param.shape.as_slice(), &Device::Cpu).unwrap())
        })
        .collect()
}

#[track_caller]
fn check(config: Value, reference: impl Fn(VarBuilder<'static>) -> Forward) {
    let model = Model::new(Config::from_json(config).unwrap(), None).unwrap();
    let weights = weights(&model);
    let vb = VarBuilder::from_tensors(weights.clone(), DType::F32, &Device::Cpu);
    let ids: Vec<u32> = (0..N_TOKENS as u32).map(|i| (i * i * 7 + 3) % 50).collect();
    let ids = Tensor::new(ids, &Device::Cpu).unwrap();
    let ours = Tiny::with_weights(model, |param| weights[&param.name].clone()).logits(&ids, &[N_TOKENS]);
    for n in 1..=N_TOKENS {
        let prefix = ids.narrow(0, 0, n).unwrap().unsqueeze(0).unwrap();
        let theirs = reference(vb.clone())(&prefix).flatten_all().unwrap();
        assert_close(&format!("token {n}"), &ours.get(n - 1).unwrap(), &theirs);
    }
}

fn llama_of(config: &Value) -> impl Fn(VarBuilder<'static>) -> Forward {
    let config: llama::LlamaConfig = serde_json::from_value(config.clone()).unwrap();
    let config = config.into_config(false);
    move |vb| {
        let model = llama::Llama::load(vb, &config).unwrap();
        let mut cache = llama::Cache::new(false, DType::F32, &config, &Device::Cpu).unwrap();
        Box::new(move |ids| model.forward(ids, 0, &mut cache).unwrap())
    }
}

#[test]
fn llama_is_candle_transformers() {
    let config = keys("LlamaForCausalLM", "llama");
    check(config.clone(), llama_of(&config));
}

#[test]
fn llama3_with_scaled_rotation_and_tied_embeddings_is_candle_transformers() {
    let mut config = keys("LlamaForCausalLM", "llama");
    config["tie_word_embeddings"] = json!(true);
    config["rope_scaling"] = json!({
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32
    });
    check(config.clone(), llama_of(&config));
}

#[test]
fn mistral_is_candle_transformers() {
    let config = keys("MistralForCausalLM", "mistral");
    let theirs: mistral::Config = {
        let mut config = config.clone();
        config["use_flash_attn"] = json!(false);
        serde_json::from_value(config).unwrap()
    };
    check(config, |vb| {
        let mut model = mistral::Model::new(&theirs, vb).unwrap();
        Box::new(move |ids| model.forward(ids, 0).unwrap())
    });
}

#[test]
fn qwen2_is_candle_transformers() {
    let mut config = keys("Qwen2ForCausalLM", "qwen2");
    config["sliding_window"] = json!(64);
    config["max_window_layers"] = json!(3);
    config["use_sliding_window"] = json!(false);
    let theirs: qwen2::Config = serde_json::from_value(config.clone()).unwrap();
    check(config, |vb| {
        let mut model = qwen2::ModelForCausalLM::new(&theirs, vb).unwrap();
        Box::new(move |ids| model.forward(ids, 0).unwrap())
    });
}

#[test]
fn qwen3_with_wide_heads_is_candle_transformers() {
    let mut config = keys("Qwen3ForCausalLM", "qwen3");
    config["head_dim"] = json!(12);
    config["max_window_layers"] = json!(3);
    config["use_sliding_window"] = json!(false);
    let theirs: qwen3::Config = serde_json::from_value(config.clone()).unwrap();
    check(config, |vb| {
        let mut model = qwen3::ModelForCausalLM::new(&theirs, vb).unwrap();
        Box::new(move |ids| model.forward(ids, 0).unwrap())
    });
}
