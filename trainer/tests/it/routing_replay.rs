//! Runs that record their experts, and runs that replay them.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::support::{Run, stderr};

/// Returns a run of a mixture of experts, with an MTP layer.
fn run() -> Run {
    let run = Run::of_experts();
    run.edit("  dtype: float32\n", "  dtype: float32\n  mtp_num_layers: 1\n");
    run.edit("train_iters: 24", "train_iters: 10");
    run
}

fn record(dir: &Path) -> String {
    format!("moe.routing_replay.record={}", dir.display())
}

fn replay(dir: &Path) -> String {
    format!("moe.routing_replay.replay={}", dir.display())
}

/// Returns the numbers of selections in each step and layer.
fn loads(run: &Run) -> Vec<Value> {
    let of_layer = |layer: &Value| {
        let number = |key: &str| Value::from(layer[key].as_f64().unwrap());
        Value::from(["layer", "max_over_mean", "entropy", "unused"].map(number).to_vec())
    };
    let of_step = |record: Value| {
        let layers = record["expert_load"]["layers"].as_array()?.iter().map(of_layer).collect();
        Some(Value::Array(layers))
    };
    run.metrics().into_iter().filter_map(of_step).collect()
}

/// Returns the files of a record with their bytes. The id of the run differs between runs.
fn files(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let list = |dir: &Path| {
        let mut paths: Vec<PathBuf> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths
    };
    let all = list(dir).into_iter().flat_map(|step| list(&step));
    all.map(|path| {
        let bytes = fs::read(&path).unwrap();
        let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        (path.strip_prefix(dir).unwrap().to_owned(), bytes[data..].to_vec())
    })
    .collect()
}

#[test]
fn bf16_replays_the_experts_of_f32() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("experts");
    let f32 = run();
    f32.train_ok(&[&record(&dir)]);
    assert_eq!(loads(&f32).len(), 10);
    assert_eq!(loads(&f32)[0].as_array().unwrap().len(), 3, "two layers and an MTP layer");
    let of_record = files(&dir);
    assert_eq!(of_record.len(), 20, "two micro-batches in each of ten steps");
    assert_eq!(of_record[1].0, Path::new("step-000001/micro-0001.rank-000.safetensors"));
    let bf16 = |more: &[&str]| {
        let run = run();
        run.train_ok(&[&["model.dtype=bfloat16"], more].concat());
        run
    };
    let (replayed, selected) = (bf16(&[&replay(&dir), "model.activation_checkpoint=full"]), bf16(&[]));
    assert_eq!(loads(&replayed), loads(&f32));
    assert_ne!(loads(&selected), loads(&f32));
}

#[test]
fn a_replay_of_the_same_run_has_its_bits() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("experts");
    let [recorded, replayed, plain] = [run(), run(), run()];
    recorded.train_ok(&[&record(&dir)]);
    replayed.train_ok(&[&replay(&dir)]);
    plain.train_ok(&[]);
    assert!(recorded.exported() == plain.exported() && replayed.exported() == plain.exported());
    assert_eq!(recorded.losses(), plain.losses());
    assert_eq!((replayed.losses(), loads(&replayed)), (plain.losses(), loads(&plain)));
}

#[test]
fn a_replay_may_have_fewer_steps_than_its_record() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("experts");
    let [recorded, replayed] = [run(), run()];
    recorded.train_ok(&[&record(&dir)]);
    let log = stderr(&replayed.train(&[&replay(&dir), "train_iters=3", "seed=8"]));
    assert!(!log.contains("routing_replay"), "{log}");
    assert_eq!(loads(&replayed), loads(&recorded)[..3]);
}

#[test]
fn recorded_and_replayed_runs_resume() {
    let folder = tempfile::tempdir().unwrap();
    let [whole_dir, parts_dir] = ["whole", "parts"].map(|name| folder.path().join(name));
    let [whole, parts] = [run(), run()];
    whole.train_ok(&[&record(&whole_dir)]);
    let key = record(&parts_dir);
    // Release builds have no failpoints.
    if cfg!(debug_assertions) {
        let killed =
            parts.command("train", &[&key]).env("CANDLEWICK_TEST_KILL_AT", "step_computed:9").output().unwrap();
        assert!(!killed.status.success());
        assert!(parts_dir.join("step-000008").exists() && !parts_dir.join("step-000009").exists());
    } else {
        parts.train_ok(&[&key, "exit_iteration=5"]);
    }
    let log = stderr(&parts.train(&[&key]));
    parts.assert_resumed();
    assert!(!log.contains("routing_replay"), "{log}");
    assert!(files(&parts_dir) == files(&whole_dir));

    let [replayed, in_parts] = [run(), run()];
    let key = replay(&parts_dir);
    // Other initial weights select other experts.
    replayed.train_ok(&[&key, "seed=8"]);
    in_parts.train_ok(&[&key, "seed=8", "exit_iteration=4"]);
    in_parts.train_ok(&[&key, "seed=8"]);
    in_parts.assert_resumed();
    assert_eq!((in_parts.losses(), loads(&in_parts)), (replayed.losses(), loads(&whole)));
    assert!(in_parts.exported() == replayed.exported());
    assert_ne!(replayed.losses(), whole.losses());
}

#[test]
fn a_run_that_restarts_before_its_first_checkpoint_continues_its_record() {
    // Release builds have no failpoints.
    if !cfg!(debug_assertions) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let [whole_dir, parts_dir] = ["whole", "parts"].map(|name| folder.path().join(name));
    let [whole, parts] = [run(), run()];
    whole.train_ok(&[&record(&whole_dir)]);
    let key = record(&parts_dir);
    for step in ["step_computed:4", "step_computed:3"] {
        let killed = parts.command("train", &[&key]).env("CANDLEWICK_TEST_KILL_AT", step).output().unwrap();
        assert!(!killed.status.success());
    }
    assert!(parts_dir.join("step-000002").exists() && !parts_dir.join("step-000003").exists());
    parts.train_ok(&[&key]);
    assert!(files(&parts_dir) == files(&whole_dir));
    assert_eq!(parts.losses(), whole.losses());
    let refused = whole.train(&[&key, "checkpoint.0.auto_resume=false"]);
    assert!(stderr(&refused).contains("another run wrote this file, in a record of 10 steps"), "{}", stderr(&refused));
}

#[test]
fn records_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("experts");
    let recorded = run();
    recorded.train_ok(&[&record(&dir), "train_iters=2"]);
    let refused = |arguments: &[&str], code: i32, want: &[&str]| {
        let output = run().train(&[&["train_iters=2"], arguments].concat());
        let log = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {log}");
        for part in want {
            assert!(log.contains(part), "no {part:?} in {log}");
        }
    };
    let (key, data) = (replay(&dir), 3);
    let all = |part: &'static str| ["failed to replay", "moe.routing_replay.replay", part];
    let later = run().train(&["train_iters=3", &key]);
    let log = stderr(&later);
    assert!(log.contains("step-000003") && log.contains("the record has 2 recorded steps (1 to 2)"), "{log}");
    let nowhere = replay(&folder.path().join("nowhere"));
    refused(
        &[&nowhere],
        data,
        &all("there is no such folder; name one that a run with moe.routing_replay.record wrote"),
    );
    let empty = folder.path().join("empty");
    fs::create_dir(&empty).unwrap();
    refused(&[&replay(&empty)], data, &all("the record has 0 recorded steps"));
    refused(&[&key, "data.seed=5"], data, &["micro-0000.rank-000.safetensors", "the data, their order or max_length"]);
    refused(
        &[&key, "gradient_accumulation_steps=3"],
        data,
        &["micro-0002.rank-*", "there is no such file: the step has 2 recorded micro-batches, and 3 in this run"],
    );
    let fewer = "this run has no such micro-batch: the step has 2 recorded micro-batches, and 1 in this run";
    refused(&[&key, "gradient_accumulation_steps=1"], data, &["step-000001/micro-0001.rank-*", fewer]);
    refused(&[&key, "model.config.num_experts=4"], data, &all("it was recorded with 8 experts, and this model has 4"));
    refused(&[&key, "model.config.num_experts_per_tok=3"], data, &all("it was recorded with 2 top_k"));
    refused(
        &[&key, "model.config.num_hidden_layers=3"],
        data,
        &all("with 3 layers with experts, and this model has 4"),
    );
    refused(&[&key, "model.mtp_num_layers=0"], data, &all("with 3 layers with experts, and this model has 2"));
    refused(&[&record(&dir)], 6, &["failed to record", "moe.routing_replay.record", "a record of 2 steps"]);
    fs::write(dir.join("step-000002/micro-0001.rank-000.safetensors"), "half").unwrap();
    refused(&[&key], data, &["step-000002/micro-0001.rank-000.safetensors", "no complete safetensors file"]);
    fs::remove_file(dir.join("step-000002/micro-0001.rank-000.safetensors")).unwrap();
    refused(&[&key], data, &["step-000002/micro-0001.rank-*.safetensors", "the step has 1 recorded micro-batches"]);
}
