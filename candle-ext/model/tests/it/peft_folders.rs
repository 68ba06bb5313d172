//! Adapter folders of PEFT with tensors besides LoRA factors, compared with PEFT (tests/reference/peft_folders.py).

use candle_core::DType;
use candlewick_model::{AdapterFolder, Model};

use crate::merging::merge;
use crate::tiny::{Reference, Tiny, assert_close, fixture, read, relative_error};

/// Loads base and adapter as the programs do.
fn load(base: &str, adapter: &AdapterFolder) -> Tiny {
    let (config, weights) = adapter.open_base(&fixture(base)).unwrap();
    let model = Model::new(config, Some(adapter.config.clone())).unwrap();
    model.check_adapter(&adapter.weights).unwrap();
    assert!(weights.check(model.base_params()).unwrap().is_empty());
    let factors: Vec<String> = model.adapter_params().map(|param| param.name.clone()).collect();
    Tiny::with_weights(model, |param| match factors.contains(&param.name) {
        true => read(&adapter.weights, param),
        false => read(&weights, param),
    })
}

/// Compares the logits of base and adapter, and those after a merge, with PEFT's. The tolerance is that of `assert_close`.
#[track_caller]
fn check(base: &str, name: &str, n_replacements: usize) {
    let name = format!("peft/{name}");
    let (folder, reference) = (fixture(&name), Reference::load(&name));
    let adapter = AdapterFolder::open(&folder).unwrap();
    assert_eq!(adapter.replacements().len(), n_replacements, "{name}");
    let logits = load(base, &adapter).logits(&reference.ids, &reference.lengths);
    assert_close(&name, &logits, reference.get("logits"));
    let output = tempfile::tempdir().unwrap();
    let merged = output.path().join("merged");
    merge(&merged, &fixture(base), &folder, Some(DType::F32)).unwrap();
    let merged_logits = crate::adapters::load(&merged).logits(&reference.ids, &reference.lengths);
    assert_close(&name, &merged_logits, reference.get("merged_logits"));
    if logits.dims()[1] == Tiny::load(base).model.config().vocab_size() {
        let plain = Tiny::load(base).logits(&reference.ids, &reference.lengths);
        assert!(relative_error(&plain, &logits) > 1e-2, "{name} changes the model");
    }
    let error = adapter.check_trainable().unwrap_err().to_string();
    assert!(error.contains("training from it would lose them"), "{error}");
}

#[test]
fn saved_modules_biases_and_embeddings_give_the_logits_of_peft() {
    check("qwen2", "tied-embedding", 2);
    check("qwen2", "tied-more-rows", 2);
    check("llama", "more-rows", 2);
    check("llama", "fewer-rows", 2);
    check("llama", "lm-head", 1);
    check("llama", "both-embeddings", 2);
    check("llama", "norms-and-o-proj", 9);
    check("llama", "bias-lora-only", 2);
    check("llama", "bias-all", 14);
}

#[track_caller]
fn refused(base: &str, name: &str, parts: &[&str]) {
    let output = tempfile::tempdir().unwrap();
    let folder = fixture(&format!("peft/{name}"));
    let error = merge(&output.path().join("merged"), &fixture(base), &folder, None).unwrap_err().to_string();
    for part in parts {
        assert!(error.contains(part), "`{error}` lacks `{part}`");
    }
}

#[test]
fn adapters_that_compute_another_function_are_refused() {
    refused("qwen2", "untied-in-training", &["`lm_head.weight` differs from `model.embed_tokens.weight`"]);
    refused("llama", "token-rows", &["trainable_token_indices", "[3,7] is not supported", "merge_and_unload"]);
    refused("llama", "lora-bias", &["lora_bias", "true is not supported", "merge_and_unload"]);
    refused("llama", "lora-on-lm-head", &["lm_head"]);
}
