//! Runs with layers for multi-token prediction.

use std::fs;

use candle_core::{DType, Device};
use candlewick_model::checkpoint::Checkpoint;
use serde_json::Value;

use crate::naive_llama::NaiveLlama;
use crate::support::{Run, stderr};

/// Label of a token without a loss.
const IGNORED: i64 = -100;

/// Token `<|im_end|>` of the quickstart's tokenizer.
const END_OF_TURN: u32 = 2;

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
    // As on the Hub, each MTP layer has copies of embedding and output layer, which are one parameter here.
    let read = |name: &str| {
        let tensor = checkpoint.tensor(name, &[1024, 32], DType::F32, &Device::Cpu).unwrap();
        tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    for copy in ["2.embed_tokens", "2.shared_head.head", "3.embed_tokens", "3.shared_head.head"] {
        assert_eq!(read(&format!("model.layers.{copy}.weight")), read("model.embed_tokens.weight"), "{copy}");
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

/// Token ids and labels of a tokenized row, which ends its turn. A third of the other labels are ignored.
fn tokenized(row: usize) -> Vec<(u32, i64)> {
    let n = [5, 11, 3, 8][row];
    let id = |i: usize| (7 + 131 * row + 37 * i * i) as u32 % 512;
    let label = |i: usize| if (row + i).is_multiple_of(3) { IGNORED } else { i64::from(id(i)) };
    (0..n).map(|i| (id(i), label(i))).chain([(END_OF_TURN, i64::from(END_OF_TURN))]).collect()
}

/// Returns the means of the losses of the model and of each MTP layer over their targets.
fn mean_losses(model: &NaiveLlama, rows: &[Vec<(u32, i64)>], n_mtp_layers: usize) -> candle_core::Result<Vec<f64>> {
    let mut sums = vec![(0.0, 0.0); n_mtp_layers + 1];
    for row in rows {
        let ids: Vec<u32> = row.iter().map(|(id, _)| *id).collect();
        let mut hidden = model.hidden(&ids)?;
        for (depth, (sum, n)) in sums.iter_mut().enumerate() {
            let later = |i: usize| ids[if i + depth < ids.len() { i + depth } else { i }];
            if depth > 0 {
                hidden = model.mtp(depth, &hidden, &(0..ids.len()).map(later).collect::<Vec<_>>())?;
            }
            // Position i predicts the token after the next `depth` ones.
            let target = |i: usize| row.get(i + depth + 1).map_or(IGNORED, |(_, label)| *label);
            let targets: Vec<i64> = (0..ids.len()).map(target).collect();
            let losses =
                model.losses(&hidden, &targets.iter().map(|target| *target.max(&0) as u32).collect::<Vec<_>>())?;
            for (loss, _) in losses.iter().zip(&targets).filter(|(_, target)| **target != IGNORED) {
                (*sum, *n) = (*sum + loss, *n + 1.0);
            }
        }
    }
    Ok(sums.into_iter().map(|(sum, n)| sum / n).collect())
}

/// A step is computed in f32, the reference in f64.
#[test]
fn losses_of_a_step_are_means_over_the_targets_of_each_mtp_layer() {
    let rows: Vec<_> = (0..4).map(tokenized).collect();
    let line = |row: &Vec<(u32, i64)>| {
        let (ids, labels): (Vec<u32>, Vec<i64>) = row.iter().copied().unzip();
        serde_json::json!({"input_ids": ids, "labels": labels}).to_string() + "\n"
    };
    for packing in [&[][..], &["data.pack_samples=true", "micro_batch_size=1", "gradient_accumulation_steps=1"]] {
        let run = run();
        run.write("train.jsonl", &rows.iter().map(line).collect::<String>());
        let tokens = format!("data.sources=[{{name_or_path: {}/train.jsonl, process: false}}]", run.path().display());
        // The weights of the export are those before the step.
        run.train_ok(&[&[&tokens, "train_iters=1", "optimizer.learning_rate=1e-30"][..], packing].concat());
        let want = mean_losses(&NaiveLlama::read(&run.export_folder()).unwrap(), &rows, 2).unwrap();
        let step = &run.metrics()[0];
        let auxiliary = &step["auxiliary_losses"];
        let ours = [&step["loss"], &auxiliary["mtp_1 loss"], &auxiliary["mtp_2 loss"]];
        for (ours, want) in ours.iter().map(|ours| ours.as_f64().unwrap()).zip(&want) {
            assert!((ours / want - 1.0).abs() < 1e-5, "{packing:?}: {ours} {want}");
        }
    }
}
