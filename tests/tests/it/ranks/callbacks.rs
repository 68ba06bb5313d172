//! Callbacks of the training loop on several ranks: all ranks stop, rewind and generate alike.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::same_curve;
use super::{ALL, STAGE_3, TrainerRun};

/// Meshes of two or four ranks that hold or divide weights in different ways.
const MESHES: [(usize, &[&str]); 4] = [
    (2, &[STAGE_3]),
    (2, &["tensor_parallel_size=2", ALL]),
    (2, &["pipeline_parallel_size=2", ALL]),
    (4, &["context_parallel_size=2", STAGE_3, "gradient_accumulation_steps=4"]),
];

fn name(n_ranks: usize, arguments: &[&str]) -> String {
    format!("{n_ranks}-{}", arguments.join("-")).replace(['.', '='], "-")
}

/// Runs the arguments on one rank and on each mesh, and returns the runs.
fn on_meshes(folder: &Path, arguments: &[&str]) -> (TrainerRun, Vec<TrainerRun>) {
    let one = TrainerRun::new(&folder.join("one"), 1, arguments);
    one.finish();
    let on_mesh = |(n_ranks, mesh): &(usize, &[&str])| {
        let run = TrainerRun::new(&folder.join(name(*n_ranks, mesh)), *n_ranks, &[arguments, mesh].concat());
        run.finish();
        run
    };
    (one, MESHES.iter().map(on_mesh).collect())
}

/// Returns the field of all records that have it, and their steps.
fn events(run: &TrainerRun, field: &str) -> Vec<(u64, Value)> {
    let records = run.records().into_iter();
    records.filter_map(|record| Some((record["iter"].as_u64()?, record.get(field)?.clone()))).collect()
}

#[test]
fn all_ranks_stop_early_at_the_step_of_one_rank() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["early_stopping={patience: 2, min_delta: 100}", "eval_interval=1", "train_iters=9"];
    let (one, others) = on_meshes(folder.path(), &arguments);
    assert_eq!(one.curve().iter().map(|(step, _)| *step).max(), Some(3));
    for run in others {
        same_curve(&run.curve(), &one.curve());
    }
}

/// Writes rows for 24 steps of 8 rows. The rows of step 19 are of rare characters.
fn write_spiky_rows(path: &Path) {
    let row = |i: usize| {
        let answer = if (144..152).contains(&i) { "§ΩЖ¿ÞßЇ漢字".repeat(2) } else { "Yes. ".repeat(4) };
        let messages = serde_json::json!([
            {"role": "user", "content": format!("Is {} a number?", i % 4)},
            {"role": "assistant", "content": answer.trim()},
        ]);
        serde_json::json!({ "messages": messages }).to_string() + "\n"
    };
    fs::write(path, (0..192).map(row).collect::<String>()).unwrap();
}

#[test]
fn all_ranks_rewind_together() {
    let folder = tempfile::tempdir().unwrap();
    let rows = folder.path().join("rows.jsonl");
    write_spiky_rows(&rows);
    let sources = format!("data.sources=[{}]", rows.display());
    let watchdog = "loss_watchdog={action: rewind, rolling_interval_length: 4, warmup_steps: 14}";
    let run = |n_ranks, mesh: &[&str]| {
        let path = folder.path().join(name(n_ranks, mesh));
        let saves = format!("checkpoint=[{{output_dir: {}/saves, save_every_n_steps: 8}}]", path.display());
        let arguments = ["train_iters=24", "data.order=sequential", &sources, &saves, watchdog];
        let run = TrainerRun::new(&path, n_ranks, &[&arguments[..], mesh].concat());
        run.finish();
        run
    };
    let one = run(1, &[]);
    let spikes = |run: &TrainerRun| {
        let events = events(run, "loss_spike").into_iter();
        events.map(|(step, event)| (step, event["rewound_to"].as_u64())).collect::<Vec<_>>()
    };
    assert_eq!(spikes(&one), [(19, Some(16))], "{:?}", one.curve());
    for (n_ranks, mesh) in MESHES {
        let other = run(n_ranks, mesh);
        assert_eq!(spikes(&other), spikes(&one), "{mesh:?}");
        same_curve(&other.curve(), &one.curve());
    }
}

#[test]
fn all_meshes_generate_the_samples_of_one_rank() {
    let folder = tempfile::tempdir().unwrap();
    let generate = "generate={prompts: [What is 2 + 2?], temperature: [0, 0.7], max_new_tokens: 6, on_evaluate: true}";
    let (one, others) = on_meshes(folder.path(), &[generate]);
    let samples = |run: &TrainerRun| {
        let text = fs::read_to_string(run.folder.join("samples.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["samples"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(samples(&one).len(), 1);
    for run in others {
        // Greedy replies are equal; a sampled one may differ by rounding.
        assert_eq!(samples(&run)[0][0], samples(&one)[0][0], "{}", run.folder.display());
        assert_eq!(samples(&run)[0].as_array().unwrap().len(), 2);
    }
}

#[test]
fn a_horizon_in_tokens_does_not_depend_on_the_mesh() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["train_iters=null", "train_tokens=1500", "scheduler={name: cosine, warmup_tokens: 600}"];
    let (one, others) = on_meshes(folder.path(), &arguments);
    assert!(one.curve().len() > 1, "{:?}", one.curve());
    for run in others {
        same_curve(&run.curve(), &one.curve());
    }
}

#[test]
fn retained_checkpoints_stay_on_all_meshes() {
    let folder = tempfile::tempdir().unwrap();
    for (n_ranks, mesh) in MESHES {
        let path = folder.path().join(name(n_ranks, mesh));
        let saves = path.join("saves");
        let entry = "save_every_n_steps: 1, save_total_limit: 1, save_retain_interval: 2, async_save: true";
        let checkpoint = format!("checkpoint=[{{output_dir: {}, {entry}}}]", saves.display());
        TrainerRun::new(&path, n_ranks, &[&[checkpoint.as_str()], mesh].concat()).finish();
        let names = fs::read_dir(&saves).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.filter(|name| name.starts_with("epoch")).collect();
        names.sort();
        assert_eq!(names.len(), 3, "{names:?}");
        for step in [2, 4, 5] {
            assert!(names.iter().any(|name| name.ends_with(&format!("global_step_{step}"))), "{names:?}");
        }
    }
}
