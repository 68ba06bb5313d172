//! Runs with layers for multi-token prediction.

use std::fs;

use candlewick_model::checkpoint::Checkpoint;
use serde_json::Value;

use crate::support::{Run, stderr};

fn run() -> Run {
    let run = Run::new();
    run.edit("  dtype: float32\n", "  dtype: float32\n  mtp_num_layers: 2\n");
    run
}

/// Returns the losses of the first MTP layer by step.
fn mtp_losses(run: &Run) -> Vec<f64> {
    let of_step = |record: &Value| record["auxiliary_losses"]["mtp_1 loss"].as_f64();
    run.metrics().iter().filter_map(of_step).collect()
}

/// Replaces the model's config by the latest export.
fn load_export(run: &Run) {
    let path = run.path().join("recipe.yaml");
    let recipe = fs::read_to_string(&path).unwrap();
    let (before, rest) = recipe.split_once("  config:\n").unwrap();
    let (_, after) = rest.split_once("tokenizer:\n").unwrap();
    let model = run.export_folder();
    fs::write(path, format!("{before}  name_or_path: {}\ntokenizer:\n{after}", model.display())).unwrap();
}

#[test]
fn mtp_layers_learn_and_a_resumed_run_has_the_same_losses() {
    let whole = run();
    whole.train_ok(&[]);
    let losses = mtp_losses(&whole);
    assert_eq!(losses.len(), 24);
    assert!(losses[23] < 0.6 * losses[0], "{losses:?}");
    let parts = run();
    parts.train_ok(&["exit_iteration=7"]);
    parts.train_ok(&[]);
    parts.assert_resumed();
    assert_eq!(mtp_losses(&parts), losses);
    assert!(whole.exported() == parts.exported());
}

#[test]
fn a_resume_logs_another_coefficient_and_refuses_another_number_of_layers() {
    let parts = run();
    parts.train_ok(&["exit_iteration=7"]);
    let output = parts.train(&["model.mtp_loss_scaling_factor=0.3", "exit_iteration=8"]);
    let log = stderr(&output);
    assert!(log.contains("mtp.loss_scaling_factor: 0.1 in the checkpoint, 0.3 now"), "{log}");
    let fewer = parts.train(&["model.mtp_num_layers=1"]);
    assert!(stderr(&fewer).contains("num_nextn_predict_layers: 2 in the checkpoint, 1 now"), "{}", stderr(&fewer));
}

#[test]
fn an_export_contains_mtp_layers_and_a_checkpoint_may_lack_them() {
    let first = run();
    first.train_ok(&["train_iters=12"]);
    let folder = first.export_folder();
    let config: Value = serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["num_nextn_predict_layers"], 2);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    for name in ["model.layers.2.eh_proj.weight", "model.layers.3.shared_head.norm.weight"] {
        assert!(checkpoint.names().any(|known| known == name), "{name} is missing");
    }
    let trained = *mtp_losses(&first).last().unwrap();

    load_export(&first);
    let output = first.train(&["train_iters=2", "checkpoint=null", "output_dir=again"]);
    let log = stderr(&output);
    assert!(output.status.success(), "{log}");
    assert!(!log.contains("initialized randomly"), "{log}");
    let metrics = fs::read_to_string(first.path().join("again/metrics.jsonl")).unwrap();
    let records = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let continued = records.filter_map(|record| record["auxiliary_losses"]["mtp_1 loss"].as_f64()).next().unwrap();
    assert!((continued / trained - 1.0).abs() < 0.2, "{continued} after {trained}");

    let output = first.train(&["train_iters=1", "checkpoint=null", "model.mtp_num_layers=3", "output_dir=third"]);
    let log = stderr(&output);
    assert!(output.status.success(), "{log}");
    assert!(log.contains("mtp 3 is initialized randomly"), "{log}");
    assert!(!log.contains("mtp 2 is initialized"), "{log}");
}

/// A model without the setting ignores the layers, in training and in evaluation.
#[test]
fn mtp_layers_of_a_checkpoint_are_optional() {
    let first = run();
    first.train_ok(&["train_iters=1"]);
    load_export(&first);
    first.edit("  mtp_num_layers: 2\n", "");
    let output = first.train(&["train_iters=1", "checkpoint=null", "output_dir=without"]);
    let log = stderr(&output);
    assert!(output.status.success() && log.contains("not used: model.layers.2"), "{log}");
    let exported = first.path().join("without/model/global_step_1");
    let names: Vec<String> = Checkpoint::open(&exported).unwrap().names().map(str::to_owned).collect();
    assert!(!names.iter().any(|name| name.starts_with("model.layers.2.")), "{names:?}");
}
