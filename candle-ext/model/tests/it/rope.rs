//! Scalings of RoPE compared with transformers. tests/reference/rope.py writes the fixtures.

use candle_core::{Device, Tensor};
use candlewick_model::{Config, Model, RopeLengths, checkpoint::Checkpoint, sequence_lengths};
use serde_json::{Map, Value, json};

use crate::tiny::{Reference, Tiny, assert_close, fixture, relative_error};

fn config(overrides: &Map<String, Value>) -> Config {
    let mut config = Config::read(&fixture("llama3")).unwrap();
    config.apply_overrides(overrides).unwrap();
    config
}

fn overrides() -> Map<String, Value> {
    let recorded: Value = serde_json::from_slice(&std::fs::read(fixture("rope.json")).unwrap()).unwrap();
    recorded["overrides"].as_object().unwrap().clone()
}

fn tiny(overrides: &Value) -> Tiny {
    let checkpoint = Checkpoint::open(&fixture("llama3")).unwrap();
    let model = Model::new(config(overrides.as_object().unwrap()), None).unwrap();
    Tiny::with_weights(model, |param| checkpoint.param(param, candle_core::DType::F32, &Device::Cpu).unwrap())
}

/// Two packed sequences, of which one is longer than the original context, against each alone in transformers.
#[test]
fn packed_sequences_have_the_logits_and_gradients_of_transformers_with_every_scaling() {
    let reference = Reference::open("rope.safetensors");
    for (name, overrides) in &overrides() {
        let tiny = tiny(overrides);
        let logits = tiny.logits(&reference.ids, &reference.lengths);
        assert_close(name, &logits, reference.get(&format!("{name}.logits")));
        tiny.loss_and_grads(&reference);
        let grads = ["q_proj", "k_proj"].map(|name| tiny.grad(&format!("model.layers.0.self_attn.{name}.weight")));
        assert_close(name, &Tensor::cat(&grads, 0).unwrap(), reference.get(&format!("{name}.grad")));
    }
    let unscaled = tiny(&json!({"rope_scaling": {"rope_type": "default"}})).logits(&reference.ids, &reference.lengths);
    for name in overrides().keys() {
        let error = relative_error(&unscaled, reference.get(&format!("{name}.logits")));
        assert!(error > 1e-3, "{name} has no effect: {error:.2e}");
    }
}

fn cosines(model: &Model, positions: &[u32], lengths: RopeLengths<'_>) -> candle_core::Result<Vec<Vec<f32>>> {
    model.rope(positions, lengths, &Device::Cpu)?.0.to_vec2()
}

/// Context parallel ranks have a part of a sequence each, and the length of the whole.
#[test]
fn a_part_of_a_row_rotates_as_in_the_whole_row() {
    let positions: Vec<u32> = (0..40).chain(0..12).collect();
    let lengths = sequence_lengths(&positions);
    for overrides in overrides().values() {
        let model = tiny(overrides).model;
        let whole = cosines(&model, &positions, RopeLengths::OfSequences(&lengths)).unwrap();
        let part = cosines(&model, &positions[5..45], RopeLengths::OfSequences(&lengths[5..45])).unwrap();
        assert_eq!(part, whole[5..45]);
    }
}

#[test]
fn a_kv_cache_has_the_frequencies_of_the_models_context() {
    let overrides = overrides();
    let of = |name: &str, positions: &[u32], lengths| cosines(&tiny(&overrides[name]).model, positions, lengths);
    let long = of("longrope", &[0, 3], RopeLengths::OfSequences(&[17, 17])).unwrap();
    assert_eq!(of("longrope", &[0, 3], RopeLengths::OfContext).unwrap(), long);
    assert_ne!(of("longrope", &[0, 3], RopeLengths::OfSequences(&[16, 16])).unwrap(), long);
    assert!(of("dynamic", &[0, 15], RopeLengths::OfContext).is_ok());
    let message = of("dynamic", &[16], RopeLengths::OfContext).unwrap_err().to_string();
    assert!(message.contains("position 16") && message.contains("yarn"), "{message}");
}

#[test]
fn an_override_of_the_scaling_keeps_the_base_frequency() {
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16});
    let newer = json!({"model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 7e5}});
    let older = json!({"model_type": "qwen3", "rope_scaling": null, "rope_theta": 7e5});
    for (file, spelling) in [(&newer, "rope_parameters"), (&older, "rope_scaling")] {
        for key in ["rope_scaling", "rope_parameters"] {
            let mut config = Config::from_json(file.clone()).unwrap();
            config.apply_overrides(json!({key: yarn}).as_object().unwrap()).unwrap();
            let exported = config.to_json();
            assert_eq!(exported[spelling]["rope_type"], "yarn", "{exported}");
            let theta = exported[spelling].get("rope_theta").unwrap_or(&exported["rope_theta"]);
            assert_eq!(*theta, json!(7e5), "{exported}");
            let other = if spelling == "rope_scaling" { "rope_parameters" } else { "rope_scaling" };
            assert_eq!(exported.get(other), None);
            config.apply_overrides(json!({key: null}).as_object().unwrap()).unwrap();
            assert_ne!(config.to_json()[spelling]["rope_type"], "yarn");
        }
    }
}

#[track_caller]
fn refused(overrides: Value, parts: &[&str]) {
    let mut config = Config::read(&fixture("llama3")).unwrap();
    let message = config.apply_overrides(overrides.as_object().unwrap()).unwrap_err().to_string();
    assert!(parts.iter().all(|part| message.contains(part)), "{message}");
}

#[test]
fn a_wrong_scaling_is_refused_with_its_key() {
    let yarn = |key: &str, value: Value| {
        let mut scaling = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16});
        scaling[key] = value;
        json!({"rope_scaling": scaling})
    };
    refused(yarn("bata_fast", json!(3)), &["rope_scaling.bata_fast", "did you mean `beta_fast`?"]);
    refused(yarn("short_factor", json!([1.0])), &["rope_scaling.short_factor", "not a key of rope_type yarn"]);
    refused(yarn("factor", json!(-1)), &["rope_scaling.factor", "above 0"]);
    refused(yarn("beta_fast", json!(0.5)), &["rope_scaling.beta_fast", "beta_slow"]);
    refused(yarn("original_max_position_embeddings", json!(1)), &["original_max_position_embeddings", "at least 2"]);
    let no_original = json!({"rope_type": "yarn", "factor": 4.0});
    refused(
        json!({"rope_scaling": no_original, "max_position_embeddings": 512}),
        &["rope_scaling.original_max_position_embeddings", "missing"],
    );
    refused(json!({"rope_scaling": {"rope_type": "yarn"}}), &["rope_scaling.factor", "missing"]);
    let factors = |short: Value| json!({"rope_scaling": {"rope_type": "longrope", "short_factor": short, "long_factor": [1, 1, 1, 1], "factor": 4}});
    refused(factors(json!([1, 1, 1])), &["rope_scaling.short_factor", "expected 4 factors", "found 3"]);
    refused(factors(json!([1, 1, 1, 0])), &["rope_scaling.short_factor", "above 0"]);
    refused(json!({"rope_scaling": {"rope_type": "ntk"}}), &["rope_scaling.rope_type", "`ntk`", "yarn", "longrope"]);
}
