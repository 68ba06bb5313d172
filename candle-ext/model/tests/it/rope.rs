//! Scalings of RoPE compared with transformers. tests/reference/rope.py writes the fixtures.

use candle_core::{Device, Tensor};
use candlewick_model::{Config, LengthClass, Model, checkpoint::Checkpoint};
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

fn cosines(model: &Model, positions: &[u32], classes: &[LengthClass]) -> Vec<Vec<f32>> {
    model.rope(positions, classes, &Device::Cpu).unwrap().0.to_vec2().unwrap()
}

/// Context parallel ranks have a part of a sequence each, and the length of the whole.
#[test]
fn a_part_of_a_row_rotates_as_in_the_whole_row() {
    let positions: Vec<u32> = (0..40).chain(0..12).collect();
    for overrides in overrides().values() {
        let model = tiny(overrides).model;
        let classes = model.length_classes(&positions);
        let whole = cosines(&model, &positions, &classes);
        assert_eq!(cosines(&model, &positions[5..45], &classes[5..45]), whole[5..45]);
    }
}

#[test]
fn the_length_of_a_sequence_chooses_the_frequencies_of_longrope_and_dynamic() {
    for (name, overrides) in &overrides() {
        let model = tiny(overrides).model;
        let [short, long, longer] = [16, 17, 64].map(|n_tokens| model.length_class(n_tokens));
        let is_equal = [short == long, long == longer];
        let want = match &**name {
            "longrope" => [false, true],
            "dynamic" => [false, false],
            _ => [true, true],
        };
        assert_eq!(is_equal, want, "{name}");
        let rows = cosines(&model, &[3, 3], &[short, long]);
        assert_eq!(rows[0] == rows[1], want[0], "{name}");
    }
    let model = tiny(&overrides()["longrope"]).model;
    assert!(model.rope(&[0, 1], &[LengthClass::Short], &Device::Cpu).is_err());
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
