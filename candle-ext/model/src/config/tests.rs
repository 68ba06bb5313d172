#![allow(clippy::unwrap_used)]

use candlewick_ops::{ScoreFunction, TopKOrder};
use serde_json::json;

use super::*;

fn tiny() -> Value {
    json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
        "rope_theta": 5e5, "a_key_of_tomorrow": {"kept": [1, 2.5, null]}, "torch_dtype": "bfloat16",
    })
}

fn with(changes: Value) -> Result<Config, ModelError> {
    let mut value = tiny();
    value.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    Config::from_json(value)
}

#[track_caller]
fn refused(changes: Value, parts: &[&str]) {
    let message = with(changes).unwrap_err().to_string();
    for part in parts {
        assert!(message.contains(part), "`{message}` lacks `{part}`");
    }
}

#[test]
fn a_config_survives_a_round_trip_with_unknown_keys() {
    let config = Config::from_json(tiny()).unwrap();
    assert_eq!(config.to_json().to_string(), tiny().to_string());
    assert_eq!((config.n_layers(), config.head_dim(), config.dtype()), (2, 8, Some(DType::BF16)));
    assert_eq!(config.typed.rope_theta, 5e5);
    assert_eq!(config.to_json_as(DType::F16)["torch_dtype"], "float16");
}

#[test]
fn a_recipe_config_gets_the_names_transformers_looks_for() {
    let config = Config::from_json(json!({"model_type": "qwen3", "num_hidden_layers": 1})).unwrap();
    assert_eq!(config.to_json()["architectures"][0], "Qwen3ForCausalLM");
    assert_eq!((config.head_dim(), config.n_kv_heads()), (128, 32));
}

#[test]
fn an_export_lists_the_mtp_layers_that_it_has() {
    let config = with(json!({"num_nextn_predict_layers": 3})).unwrap();
    assert_eq!(config.to_json_as(DType::F32)["num_nextn_predict_layers"], 0);
    // A checkpoint compares the config of the source.
    assert_eq!(config.to_json()["num_nextn_predict_layers"], 3);
    assert_eq!(config.with_mtp_layers(2).to_json_as(DType::F32)["num_nextn_predict_layers"], 2);
}

#[test]
fn rotary_keys_are_read_in_both_spellings() {
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 7e5});
    let old = with(json!({"rope_scaling": llama3})).unwrap();
    let new = with(json!({"rope_parameters": llama3, "rope_theta": null})).unwrap();
    assert_eq!(old.typed.rope, new.typed.rope);
    assert_eq!((old.typed.rope_theta, new.typed.rope_theta), (7e5, 7e5));
    let linear = with(json!({"rope_scaling": {"type": "linear", "factor": 2}})).unwrap();
    assert_eq!(linear.typed.rope, RopeKind::Linear { factor: 2.0 });
    let none = with(json!({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})).unwrap();
    assert_eq!((none.typed.rope, none.typed.rope_theta), (RopeKind::Default, 1e4));
}

#[test]
fn a_part_of_each_head_is_rotated_if_the_family_has_the_factor() {
    let glm = |extra: Value| {
        let mut value = json!({"model_type": "glm4_moe", "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4,
            "num_key_value_heads": 2, "num_hidden_layers": 3, "intermediate_size": 32, "vocab_size": 64});
        value.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        Config::from_json(value)
    };
    let rotary_dim = |extra: Value| glm(extra).unwrap().typed.rotary_dim;
    assert_eq!(rotary_dim(json!({})), 8);
    assert_eq!(rotary_dim(json!({"partial_rotary_factor": 0.25})), 4);
    let nested = json!({"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0});
    assert_eq!(rotary_dim(json!({"rope_parameters": nested, "partial_rotary_factor": 0.25})), 16);
    for factor in [0.0, 0.2, 1.5] {
        let message = glm(json!({"partial_rotary_factor": factor})).unwrap_err().to_string();
        assert!(message.contains("partial_rotary_factor") && message.contains("of 16 elements"), "{message}");
    }
    refused(json!({"partial_rotary_factor": 0.5}), &["partial_rotary_factor", "only 1.0"]);
    let nested = json!({"rope_type": "default", "partial_rotary_factor": 0.5});
    refused(json!({"rope_parameters": nested}), &["rope_parameters.partial_rotary_factor", "only 1.0"]);
    assert_eq!(glm(json!({})).unwrap().qk_norm(), QkNorm::None);
    assert_eq!(glm(json!({"use_qk_norm": true})).unwrap().qk_norm(), QkNorm::PerHead);
    let moe = glm(json!({})).unwrap().typed.moe.unwrap();
    assert_eq!(moe.layers, [false, true, true]);
    assert!(moe.router.normalize && moe.expert_bias, "the router is DeepSeek-V3's");
    assert_eq!((moe.n_experts, moe.router.top_k, moe.router.scaling), (128, 8, 1.0));
    assert_eq!(moe.shared_expert.map(|shared| shared.intermediate_size), Some(1408));
}

#[test]
fn absurd_numbers_of_experts_are_explained() {
    let problem = |changes: Value| {
        let mut value = json!({"model_type": "dots1", "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
            "topk_group": 1, "moe_intermediate_size": 64});
        value.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        Config::from_json(value).unwrap_err().to_string()
    };
    for (changes, words) in [
        (json!({"num_experts_per_tok": 5}), "num_experts_per_tok`: 5 is more than the 4 experts of a layer"),
        (json!({"num_experts_per_tok": null}), "the family's default, is more than the 4 experts of a layer"),
        (json!({"num_experts_per_tok": 0}), "num_experts_per_tok`: expected at least 1, found 0"),
        (json!({"topk_group": 3}), "topk_group`: 3 is more than the 2 groups (n_group)"),
        (json!({"n_shared_experts": 1u64 << 60}), "n_shared_experts`: 1152921504606846976 experts of 64 are absurd"),
    ] {
        let found = problem(changes);
        assert!(found.contains(words), "{found}");
    }
}

#[test]
fn weights_on_inputs_need_one_expert_per_token() {
    let read = |top_k: usize| {
        let value = json!({"model_type": "mixtral", "num_experts_per_tok": top_k, "moe_apply_probs_on_input": true});
        let config = Config::from_json(value).map_err(|error| error.to_string())?;
        Ok::<_, String>(config.moe().unwrap().weighting)
    };
    assert_eq!(read(1).unwrap(), crate::ExpertWeighting::Input);
    assert!(read(2).unwrap_err().contains("it needs num_experts_per_tok 1"));
}

/// Routers and expert biases of Megatron-LM's settings are those of `tests/reference/moe_router.py`, whose weights and gradients
/// the tests of candlewick-ops compare.
#[test]
fn router_keys_have_the_meaning_of_megatron() {
    let fixture: Value = serde_json::from_str(include_str!("../../../ops/tests/fixtures/moe_router.json")).unwrap();
    let cases = fixture["cases"].as_array().unwrap().iter().filter(|case| !case["config"].is_null());
    let mut n_cases = 0;
    for case in cases {
        let mut keys = case["config"].clone();
        keys["model_type"] = "qwen3_moe".into();
        let moe = Config::from_json(keys).unwrap().typed.moe.unwrap();
        let (settings, spec) = (&case["settings"], moe.router);
        let score = ["softmax", "sigmoid", "sqrt_softplus"].iter().position(|name| settings["score"] == *name).unwrap();
        assert_eq!(spec.score, [ScoreFunction::Softmax, ScoreFunction::Sigmoid, ScoreFunction::SqrtSoftplus][score]);
        let order = if settings["order"] == "score_first" { TopKOrder::ScoreFirst } else { TopKOrder::TopKFirst };
        assert_eq!((spec.top_k as u64, spec.order), (settings["top_k"].as_u64().unwrap(), order), "{}", case["name"]);
        assert_eq!(Some(spec.normalize), settings["normalize"].as_bool(), "{}", case["name"]);
        assert_eq!(Some(spec.scaling), settings["scaling"].as_f64());
        assert_eq!(Some(moe.expert_bias), settings["bias"].as_bool());
        let groups = spec.groups.map(|groups| [groups.n_groups, groups.n_selected, groups.n_scores_per_group]);
        let want = ["n_groups", "n_selected", "n_scores_per_group"].map(|key| settings["groups"][key].as_u64());
        assert_eq!(groups.map(|groups| groups.map(|n| Some(n as u64))).unwrap_or_default(), want, "{}", case["name"]);
        n_cases += 1;
    }
    assert_eq!(n_cases, 10);
}

#[test]
fn router_keys_that_a_family_cannot_follow_are_refused() {
    let read = |model_type: &str, keys: Value| {
        let mut config = json!({"model_type": model_type, "head_dim": 128});
        config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        Config::from_json(config).map_err(|error| error.to_string())
    };
    for (model_type, keys, parts) in [
        ("mixtral", json!({"moe_router_score_function": "sigmoyd"}), ["moe_router_score_function", "sigmoid"]),
        ("mixtral", json!({"moe_router_enable_expert_bias": true}), ["moe_router_enable_expert_bias", "sqrtsoftplus"]),
        ("mixtral", json!({"moe_router_num_groups": 4}), ["moe_router_num_groups", "moe_router_group_topk"]),
        ("mixtral", json!({"moe_router_group_topk": 1}), ["moe_router_group_topk", "moe_router_num_groups"]),
        (
            "mixtral",
            json!({"moe_router_num_groups": 8, "moe_router_group_topk": 4}),
            ["moe_router_group_topk", "more than num_experts_per_tok 2"],
        ),
        ("mixtral", json!({"moe_router_topk_scaling_factor": 0.0}), ["moe_router_topk_scaling_factor", "above 0"]),
        (
            "mixtral",
            json!({"moe_router_pre_softmax": false, "num_experts_per_tok": 1}),
            ["moe_router_pre_softmax", "set it to true"],
        ),
        (
            "mixtral",
            json!({"moe_router_pre_softmax": true, "moe_router_score_function": "sigmoid"}),
            ["moe_router_pre_softmax", "needs softmax"],
        ),
        (
            "qwen3_moe",
            json!({"moe_router_pre_softmax": false}),
            ["moe_router_pre_softmax", "set norm_topk_prob to true"],
        ),
        ("dots1", json!({"moe_router_num_groups": 2}), ["moe_router_num_groups", "n_group"]),
        ("dots1", json!({"moe_router_topk_scaling_factor": 2.0}), ["_topk_scaling_factor", "routed_scaling_factor"]),
        ("dots1", json!({"moe_router_score_function": "softmax"}), ["moe_router_enable_expert_bias", "to false"]),
    ] {
        let message = read(model_type, keys).unwrap_err();
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
    let dense = json!({"model_type": "llama", "moe_router_score_function": "sigmoid"});
    let message = Config::from_handwritten(dense.as_object().unwrap()).unwrap_err().to_string();
    assert!(message.contains("has no effect on a llama model"), "{message}");
}

/// transformers computes Mixtral's weights by softmax before the selection and divides them by their sum.
#[test]
fn keys_that_transformers_does_not_need_give_no_warning() {
    let warning = |keys: Value| {
        let mut config = json!({"model_type": "mixtral"});
        config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        Config::from_json(config).unwrap().transformers_warning()
    };
    assert_eq!(warning(json!({"moe_router_pre_softmax": false})), None);
    assert_eq!(warning(json!({"moe_router_score_function": "softmax"})), None);
    for (key, value) in [
        ("moe_router_pre_softmax", json!(true)),
        ("moe_router_score_function", json!("sqrtsoftplus")),
        ("moe_router_topk_scaling_factor", json!(2.0)),
        ("moe_apply_probs_on_input", json!(true)),
    ] {
        let top_k = if key == "moe_apply_probs_on_input" { 1 } else { 2 };
        let warning = warning(json!({key: value, "num_experts_per_tok": top_k})).unwrap();
        assert!(warning.contains(key), "{warning}");
    }
}

#[test]
fn absent_keys_have_the_defaults_of_transformers() {
    let values = |family: &str| {
        let config = Config::from_json(json!({"model_type": family, "head_dim": 128})).unwrap();
        (config.typed.rope_theta, config.rms_norm_eps())
    };
    for family in ["llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "dots1"] {
        assert_eq!(values(family), (1e4, 1e-6), "{family}");
    }
    assert_eq!(values("mixtral"), (1e6, 1e-5));
    assert_eq!(values("olmoe"), (1e4, 1e-5));
    assert_eq!(values("glm4_moe"), (1e4, 1e-5));
}

#[test]
fn windows_follow_the_family() {
    let mistral =
        |w: Value| with(json!({"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": w}));
    assert_eq!(mistral(json!(7)).unwrap().window(1), Some(7));
    assert_eq!(mistral(Value::Null).unwrap().window(1), None);
    let qwen = |extra: Value| {
        let mut value = json!({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "sliding_window": 5});
        value.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        with(value).map(|c| c.typed.windows)
    };
    assert_eq!(qwen(json!({})).unwrap(), [None, None]);
    assert_eq!(qwen(json!({"use_sliding_window": true, "max_window_layers": 1})).unwrap(), [None, Some(5)]);
    let types = json!({"use_sliding_window": true, "layer_types": ["sliding_attention", "full_attention"]});
    assert_eq!(qwen(types).unwrap(), [Some(5), None]);
    assert!(qwen(json!({"layer_types": ["sliding_attention", "full_attention"]})).is_err());
    assert!(qwen(json!({"layer_types": ["full_attention"]})).is_err());
    assert_eq!(with(json!({"sliding_window": 5})).unwrap().typed.windows, [None, None]);
}

#[test]
fn a_negative_padding_token_counts_from_the_end() {
    assert_eq!(with(json!({"pad_token_id": -1})).unwrap().pad_id(), Some(63));
    refused(json!({"pad_token_id": 64}), &["pad_token_id", "64"]);
}

#[test]
fn a_smaller_vocabulary_keeps_the_padding_token_only_if_it_has_it() {
    for (id, n_rows, want) in [(61, 62, Some(61)), (62, 62, None), (-1, 62, None)] {
        let config = with(json!({"pad_token_id": id})).unwrap().with_vocab_size(n_rows);
        assert_eq!(config.pad_id(), want, "{id}");
        assert_eq!(Config::from_json(config.to_json()).unwrap().pad_id(), want, "{id}");
    }
}

#[test]
fn impossible_numbers_are_refused_with_their_key() {
    refused(json!({"hidden_size": 30}), &["hidden_size", "30", "num_attention_heads (4)"]);
    refused(json!({"num_key_value_heads": 3}), &["num_key_value_heads", "multiple of 3"]);
    refused(json!({"num_hidden_layers": 1_000_000_000_000_u64}), &["num_hidden_layers", "absurd"]);
    refused(json!({"vocab_size": 1 << 28, "hidden_size": 1 << 26}), &["hidden_size", "2^46"]);
    refused(json!({"vocab_size": -1}), &["vocab_size", "whole number", "-1"]);
    refused(json!({"vocab_size": "64"}), &["vocab_size", "\"64\""]);
    refused(json!({"head_dim": 7}), &["head_dim", "odd"]);
    refused(json!({"rms_norm_eps": 0}), &["rms_norm_eps"]);
}

#[test]
fn unsupported_settings_are_refused_by_name() {
    refused(json!({"hidden_act": "gelu"}), &["hidden_act", "gelu", "silu"]);
    refused(json!({"rope_scaling": {"rope_type": "mrope"}}), &["rope_scaling.rope_type", "mrope", "llama3"]);
    let by_layer = json!({"full_attention": {"rope_type": "default"}});
    refused(json!({"rope_parameters": by_layer}), &["rope_parameters.full_attention", "layer type"]);
    refused(json!({"attention_dropout": 0.1}), &["attention_dropout"]);
    refused(json!({"quantization_config": {"bits": 4}}), &["quantization_config"]);
    refused(json!({"torch_dtype": "float8_e4m3fn"}), &["torch_dtype", "float8_e4m3fn"]);
}

#[test]
fn overrides_say_whether_the_weights_still_fit() {
    let mut config = Config::from_json(tiny()).unwrap();
    let set = |config: &mut Config, value: Value| config.apply_overrides(value.as_object().unwrap());
    assert!(set(&mut config, json!({"rope_theta": 1e4, "a_key_of_tomorrow": 1})).unwrap().is_empty());
    assert_eq!(config.typed.rope_theta, 1e4);
    assert_eq!(set(&mut config, json!({"num_hidden_layers": 1})).unwrap(), ["num_hidden_layers"]);
    let message = set(&mut config, json!({"num_hiden_layers": 1})).unwrap_err().to_string();
    assert!(message.contains("did you mean `num_hidden_layers`?"), "{message}");
    assert!(set(&mut config, json!({"num_attention_heads": 5})).is_err());
    assert_eq!((config.n_layers(), config.n_heads()), (1, 4), "a refused override changes nothing");
}

#[test]
fn a_key_that_nothing_reads_is_refused_where_a_person_wrote_it() {
    let with = |key: &str, value: Value| {
        let mut map = tiny().as_object().unwrap().clone();
        map.remove("a_key_of_tomorrow");
        map.insert(key.to_string(), value.clone());
        let by_hand = Config::from_handwritten(&map).map(drop);
        let overrides = [(key.to_string(), value)].into_iter().collect();
        let overridden = Config::from_json(tiny()).unwrap().apply_overrides(&overrides).map(drop);
        assert_eq!(by_hand.is_ok(), overridden.is_ok(), "{key}: {by_hand:?} {overridden:?}");
        by_hand.map_err(|error| error.to_string())
    };
    for (key, value) in [("num_experts", json!(8)), ("sliding_window", json!(128)), ("use_sliding_window", json!(true))]
    {
        assert!(with(key, value).unwrap_err().contains(key));
    }
    assert!(with("num_key_value_headz", json!(2)).unwrap_err().contains("did you mean `num_key_value_heads`?"));
    for (key, value) in [("use_cache", json!(false)), ("sliding_window", Value::Null), ("mlp_bias", json!(false))] {
        assert_eq!(with(key, value), Ok(()), "{key}");
    }
}

#[test]
fn an_override_of_theta_reaches_the_newer_spelling() {
    let mut config = with(json!({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})).unwrap();
    config.apply_overrides(json!({"rope_theta": 2e4}).as_object().unwrap()).unwrap();
    assert_eq!(config.typed.rope_theta, 2e4);
}

#[test]
fn a_broken_file_is_reported_with_its_line() {
    let folder = tempfile::tempdir().unwrap();
    let check = |bytes: &[u8], parts: &[&str]| {
        std::fs::write(folder.path().join("config.json"), bytes).unwrap();
        let message = Config::read(folder.path()).unwrap_err().to_string();
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    };
    check(b"{\n \"hidden_size\": 1,\n oops}", &["config.json", "line 3"]);
    check(b"{\n \"model_type\": \"\xff\"}", &["config.json", "line 2", "UTF-8"]);
    check(b"[1]", &["config.json", "JSON object", "[1]"]);
    check(b"{\"model_type\": \"gpt2\"}", &["config.json", "gpt2"]);
    check(b"{\"model_type\": \"llama\", \"vocab_size\": true}", &["config.json", "vocab_size", "true"]);
}
