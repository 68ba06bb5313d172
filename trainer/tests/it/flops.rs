//! FLOPs of a step: compared with torch's counts, and as the metrics report them.
//!
//! `tests/reference/flops.py` writes torch's counts to fixtures/flops.json. Both count every matmul and nothing else, so
//! they are equal.

use candlewick_model::{Config, Model};
use serde::Deserialize;
use serde_json::Value;
use trainer::metrics::{AttentionPairs, FlopFactors, LayerShape, ModelShape, flops};

use crate::support::{Run, stderr};

/// torch's counts for a model and sequences of these lengths.
#[derive(Deserialize)]
struct Counted {
    name: String,
    config: Value,
    lengths: Vec<usize>,
    forward: f64,
    train: f64,
    /// Count with frozen weights, if torch counted it.
    frozen: Option<f64>,
    /// Query-key pairs inside each layer's mask.
    visible_pairs: Vec<f64>,
}

#[test]
fn a_forward_has_the_flops_that_torch_counts() {
    check(FlopFactors::FORWARD, |counted| Some(counted.forward));
}

#[test]
fn a_training_step_has_the_flops_that_torch_counts() {
    check(FlopFactors::TRAIN, |counted| Some(counted.train));
}

#[test]
fn a_step_with_frozen_weights_has_the_flops_that_torch_counts() {
    check(FlopFactors::ADAPTER, |counted| counted.frozen);
}

/// torch also computes the masked pairs. Its count minus that of causal attention is the FLOPs of those pairs.
#[test]
fn causal_and_windowed_attention_count_the_pairs_inside_the_mask() {
    for Counted { name, config, lengths, visible_pairs, forward, .. } in counted() {
        let shape = shape_of(&config);
        let all_pairs: usize = lengths.iter().map(|s| s * s).sum();
        let of_a_pair = (4 * shape.layers[0].attention_width) as f64;
        let hidden: f64 = visible_pairs.iter().map(|visible| all_pairs as f64 - visible).sum();
        assert_eq!(
            flops(&shape, FlopFactors::FORWARD, AttentionPairs::Causal, &lengths),
            forward - of_a_pair * hidden,
            "{name}"
        );
    }
}

#[test]
fn the_tflops_of_a_packed_row_are_those_of_its_sequences() {
    let keys = ["data.pack_samples=true", "micro_batch_size=1", "train_iters=3"];
    let run = Run::new();
    run.train_ok(&keys);
    let output = run.command("preprocess", &keys).args(["--steps", "3", "--output-format", "json"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let steps: Vec<Value> =
        output.stdout.split(|&byte| byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect();
    let records: Vec<Value> = run.metrics().into_iter().filter(|record| !record["step_tflops"].is_null()).collect();
    assert_eq!((steps.len(), records.len()), (3, 3));
    for (step, record) in steps.iter().zip(records) {
        let lengths = lengths(step);
        let work = flops(&tiny(), FlopFactors::TRAIN, AttentionPairs::Full, &lengths);
        let number = |name: &str| record[name].as_f64().unwrap();
        let n_micro = step["micro_batches"].as_array().unwrap().len() as f64;
        for reported in
            [number("step_tflops") * number("step_time"), number("iter_tflops") * number("iter_time") * n_micro]
        {
            assert!((1e12 * reported - work).abs() <= 1e-9 * work, "{reported} {work}");
        }
        let unpacked = flops(&tiny(), FlopFactors::TRAIN, AttentionPairs::Full, &[lengths.iter().sum()]);
        assert!(unpacked > 1.01 * work, "the rows are not packed: {lengths:?}");
    }
}

/// Layers 0 and 2 have experts.
#[test]
fn a_layer_frequency_has_the_flops_that_torch_counts_for_these_layers() {
    let Counted { mut config, lengths, forward, .. } =
        counted().into_iter().find(|counted| counted.name == "qwen3_moe, a dense layer").unwrap();
    config.as_object_mut().unwrap().remove("mlp_only_layers");
    let flops = |config: &Value| flops(&shape_of(config), FlopFactors::FORWARD, AttentionPairs::Full, &lengths);
    assert_ne!(flops(&config), forward);
    for freq in [serde_json::json!(2), serde_json::json!([1, 0, 1])] {
        config["moe_layer_freq"] = freq;
        assert_eq!(flops(&config), forward);
    }
}

fn shape_of(config: &Value) -> ModelShape {
    ModelShape::of(&Model::new(Config::from_json(config.clone()).unwrap(), None).unwrap())
}

/// Returns the shape of the model of `support`.
fn tiny() -> ModelShape {
    let (h, i, q, kv) = (32, 64, 4 * 8, 2 * 8);
    let (n_mixer_weights, n_mlp_weights) = (h * (2 * q + 2 * kv), 3 * h * i);
    let layer = LayerShape { n_mixer_weights, n_mlp_weights, attention_width: q, window: None };
    ModelShape { layers: vec![layer; 2], n_weights_outside_layers: 1024 * h }
}

#[track_caller]
fn check(factors: FlopFactors, want: impl Fn(&Counted) -> Option<f64>) {
    let mut n_checked = 0;
    for counted in counted() {
        let shape = shape_of(&counted.config);
        if let Some(want) = want(&counted) {
            assert_eq!(flops(&shape, factors, AttentionPairs::Full, &counted.lengths), want, "{}", counted.name);
            n_checked += 1;
        }
    }
    assert!(n_checked >= 5);
}

fn counted() -> Vec<Counted> {
    serde_json::from_str(include_str!("../fixtures/flops.json")).unwrap()
}

/// Returns the lengths of a step's sequences.
fn lengths(step: &Value) -> Vec<usize> {
    let ends = |micro: &Value| serde_json::from_value::<Vec<usize>>(micro["cu_seqlens"].clone()).unwrap();
    let batches = step["micro_batches"].as_array().unwrap().iter().map(ends);
    batches.flat_map(|ends| ends.windows(2).map(|pair| pair[1] - pair[0]).collect::<Vec<_>>()).collect()
}
