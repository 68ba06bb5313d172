//! Keys of config.json of mixture-of-experts models that a recipe sets or a loaded model has.

use std::path::Path;

use candlewick_model::Config;
use serde_json::{Value, json};
use trainer::plan::Plan;
use trainer::recipe::Loaded;
use trainer::resolve::{BuildFeatures, Environment};

use super::known;

/// Resolves a recipe with more keys of the section `model`, and arguments, for a model with these keys.
fn resolve(model: &str, argument: &str, keys: Value, environment: Environment) -> Result<Plan, String> {
    let text = format!("model:\n  name_or_path: org/model\n{model}data: {{sources: [a.jsonl]}}\n");
    let loaded = Loaded::parse(Path::new("recipes/r.yaml"), text, &[argument.to_owned()]).unwrap();
    let mut config = json!({
        "model_type": "qwen3_moe", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 40,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": true
    });
    config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    let config = Some(Config::from_json(config).unwrap());
    Plan::resolve(&loaded, &Environment { config, ..environment }).map_err(|error| error.to_string())
}

#[track_caller]
fn has(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no {part:?} in:\n{text}");
    }
}

#[test]
fn an_override_without_an_effect_is_refused_at_its_line() {
    let overrides = "  hf_config_kwargs:\n    num_experts_per_tok: 4\n    n_group: 4\n";
    let error = resolve(overrides, "seed=1", json!({}), known()).unwrap_err();
    has(&error, &["recipes/r.yaml:5", "`n_group`: has no effect on a qwen3_moe model", "use moe_router_num_groups"]);
}

#[test]
fn a_model_whose_routers_learn_nothing_is_noted_if_they_are_trained() {
    let notes = |argument: &str, keys| resolve("", argument, keys, known()).unwrap().notes.join("\n");
    let top_1 = || json!({"num_experts_per_tok": 1});
    has(&notes("seed=1", top_1()), &["with num_experts_per_tok 1 each weight is 1", "set norm_topk_prob: false"]);
    let adapter = "model.peft_config={peft_type: LORA, r: 4, target_modules: [q_proj]}";
    for (argument, keys) in [
        (adapter, top_1()),
        ("seed=1", json!({"num_experts_per_tok": 2})),
        ("seed=1", json!({"num_experts_per_tok": 1, "norm_topk_prob": false})),
    ] {
        assert!(!notes(argument, keys).contains("each weight is 1"), "{argument}");
    }
    let overrides = "  hf_config_kwargs:\n    num_experts_per_tok: 1\n";
    let error = resolve(overrides, "seed=1", json!({}), known()).unwrap_err();
    has(&error, &["recipes/r.yaml:4", "each weight is 1", "set norm_topk_prob: false"]);
}

#[test]
fn a_gpu_selects_at_most_32_experts_for_a_token() {
    let cuda = || Environment { features: BuildFeatures { mpi: false, nccl: true }, ..known() };
    let without_gpu = || Environment { missing_gpu: Some("there is no driver".to_owned()), ..cuda() };
    let top = |top_k: usize| json!({"num_experts_per_tok": top_k});
    for (device, environment) in [("device=cuda", known()), ("device=cuda:1", known()), ("device=auto", cuda())] {
        resolve("", device, top(32), environment.clone()).unwrap();
        let error = resolve("", device, top(33), environment.clone()).unwrap_err();
        has(&error, &["recipes/r.yaml:2", "num_experts_per_tok: a GPU selects at most 32 experts", "device: cpu"]);
        let overrides = "  hf_config_kwargs:\n    num_experts_per_tok: 33\n";
        has(
            &resolve(overrides, device, json!({}), environment).unwrap_err(),
            &["recipes/r.yaml:4", "at most 32 experts"],
        );
    }
    for (device, environment) in [("device=cpu", cuda()), ("device=auto", known()), ("device=auto", without_gpu())] {
        resolve("", device, top(33), environment).unwrap();
    }
}

#[test]
fn a_run_looks_for_a_gpu_if_it_selects_more_experts_than_one_can_or_trains_experts_in_fp8() {
    let looks = |model: &str, precision: &str, top_k: usize| {
        let text =
            format!("model: {{name_or_path: a, {model}}}\ndata: {{sources: [a.jsonl]}}\nprecision: {{{precision}}}\n");
        let loaded = Loaded::parse(Path::new("recipes/r.yaml"), text, &[]).unwrap();
        let config = json!({"model_type": "qwen3_moe", "num_experts": 64, "num_experts_per_tok": top_k});
        let config = Some(Config::from_json(config).unwrap());
        Environment { config, ..known() }.of_run_here(&loaded).missing_gpu.is_some()
    };
    // Tests run without a GPU, or with one that is found.
    let no_gpu = candlewick_ops::gpu_unavailable_reason().is_some();
    assert_eq!(looks("dtype: f32", "", 40), no_gpu);
    assert_eq!(looks("hf_config_kwargs: {num_experts_per_tok: 33}", "", 2), no_gpu);
    assert_eq!(looks("dtype: f32", "recipe: current", 32), no_gpu);
    assert!(!looks("dtype: f32", "", 32));
}

#[test]
fn a_dense_model_that_transformers_cannot_load_is_noted() {
    let mixtral = json!({"model_type": "mixtral", "num_experts": null, "num_local_experts": 8, "norm_topk_prob": null});
    let plan = resolve("  hf_config_kwargs: {num_experts: 0}\n", "seed=1", mixtral, known()).unwrap();
    assert!(plan.moe.is_none());
    has(&plan.notes.join("\n"), &["transformers cannot load a mixtral model without experts"]);
}
