//! Models made of others: merged and upcycled ones.

use std::fs;

use candle_core::{DType, Device};
use candlewick_inference::lm::Lm;
use serde_json::{Value, json};

use super::{TrainedRuns, ok, text};

#[test]
fn a_merged_model_scores_as_its_adapter() {
    let runs = TrainedRuns::shared();
    let output = ok(runs.run("trainer", &["merge", "lora", "--output", "merged"], ""));
    let said = text(&output.stdout);
    assert!(said.contains("14 matrices changed"), "{said}");
    assert!(said.contains("read back: largest logit difference 0.00e0"), "{said}");
    let unchecked = ok(runs.run("trainer", &["merge", "lora", "--output", "unchecked", "--skip-check"], ""));
    assert!(text(&unchecked.stdout).contains("logits are not compared"), "{}", text(&unchecked.stdout));
    let lm = |folder: &str, adapter: Option<&str>| {
        let adapter = adapter.map(|adapter| runs.path(adapter));
        Lm::load(&runs.path(folder), adapter.as_deref(), DType::F32, Device::Cpu).unwrap()
    };
    let score = |lm: &Lm| -> Vec<f32> {
        let tokens = lm.score("<|im_start|>user\nWhat comes after 5?<|im_end|>\n").unwrap();
        tokens.iter().filter_map(|token| token.logprob).collect()
    };
    let [merged, adapted, base] = [
        ("merged", None),
        ("full/model/global_step_24", Some("lora/model/global_step_24")),
        ("full/model/global_step_24", None),
    ]
    .map(|(folder, adapter)| score(&lm(folder, adapter)));
    let distance = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(distance(&merged, &adapted) < 1e-5, "{merged:?} {adapted:?}");
    assert!(distance(&base, &adapted) > 1e-2);
    for name in ["tokenizer.json", "tokenizer_config.json", "config.json"] {
        assert!(runs.path("merged").join(name).is_file(), "{name}");
    }
    let again = runs.run("trainer", &["merge", "lora", "--output", "merged"], "");
    runs.refuses(&again, 6, &["is not empty"]);
    fs::write(runs.path("merged.txt"), "notes").unwrap();
    let on_file = runs.run("trainer", &["merge", "lora", "--output", "merged.txt"], "");
    runs.refuses(&on_file, 6, &["merged.txt", "it is a file; name a new folder"]);
    assert_eq!(fs::read_to_string(runs.path("merged.txt")).unwrap(), "notes");
    let wrong = runs.run("trainer", &["merge", "full", "--output", "m2"], "");
    runs.refuses(&wrong, 3, &["it is no adapter"]);
}

/// Returns the loss of one training step on the model in a folder.
fn loss_of_a_step(runs: &TrainedRuns, model: &str) -> f64 {
    let recipe = json!({
        "type": "sft", "output_dir": runs.path(&format!("step-{model}")), "train_iters": 1, "device": "cpu",
        "model": {"dtype": "f32", "name_or_path": runs.path(model)},
        "data": {"sources": [runs.path("train.jsonl")], "max_length": 96, "cache_dir": runs.path("cache")},
        "optimizer": {"learning_rate": 1e-3},
    });
    let name = format!("step-{model}.yaml");
    runs.write(&name, &recipe.to_string());
    ok(runs.run("trainer", &["-q", "train", &name], ""));
    let metrics = fs::read_to_string(runs.path(&format!("step-{model}/metrics.jsonl"))).unwrap();
    let records = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    records.filter_map(|record| record["loss"].as_f64()).next().unwrap()
}

#[test]
fn an_upcycled_model_scores_and_trains_as_its_dense_model() {
    let runs = TrainedRuns::shared();
    let upcycle = |model: &str, output: &str, sizes: [&str; 3]| {
        let [n, k, g] = sizes;
        let sizes = ["--num-experts", n, "--num-experts-per-tok", k, "--granularity", g];
        runs.run("trainer", &[&["upcycle", model, "--output", output], &sizes[..]].concat(), "")
    };
    let output = ok(upcycle("full", "moe", ["8", "4", "2"]));
    let said = text(&output.stdout);
    assert!(said.contains("MixtralForCausalLM with 8 experts of intermediate size 32"), "{said}");
    let loss = |model: &str| runs.perplexity(&["--model", model, "--data", "eval.jsonl"])["loss"].as_f64().unwrap();
    let (moe, dense) = (loss("moe"), loss("full"));
    assert!((moe - dense).abs() < 1e-5, "{moe} {dense}");
    let (moe, dense) = (loss_of_a_step(runs, "moe"), loss_of_a_step(runs, "full"));
    assert!((moe - dense).abs() < 1e-5, "{moe} {dense}");
    let sizes = ["8", "2", "1"];
    runs.refuses(&upcycle("full", "moe", sizes), 6, &["is not empty"]);
    runs.refuses(&upcycle("moe", "moe2", sizes), 2, &["failed to upcycle moe", "is a mixture of experts already"]);
    runs.refuses(&upcycle("lora", "moe2", sizes), 2, &["is an adapter; merge it first"]);
    runs.refuses(&upcycle("full", "moe2", ["8", "9", "1"]), 2, &["num_experts_per_tok 9"]);
    runs.refuses(&upcycle("full", "moe2", ["8", "2", "5"]), 2, &["--granularity 5: the dense MLP's intermediate_size"]);
    let sizes = ["--num-experts", "8", "--num-experts-per-tok", "2", "--moe-layer-freq", "[1,0,1]"];
    let frequency = runs.run("trainer", &[&["upcycle", "full", "--output", "moe2"], &sizes[..]].concat(), "");
    runs.refuses(&frequency, 2, &["failed to upcycle full", "--moe-layer-freq: the list has 3 entries"]);
    let warned = ok(upcycle("full", "top-1", ["4", "1", "1"]));
    let note = text(&warned.stderr);
    assert!(note.contains("with num_experts_per_tok 1 each weight is 1"), "{note}");
}
