//! Callbacks of the training loop: early stopping, retention, sample generations, horizons in tokens.

use std::fs;

use serde_json::{Value, json};

use crate::support::{Run, stderr};

const STOPPING: &str = "early_stopping={patience: 2, min_delta: 100}";

/// Returns the steps of the run's sharded checkpoints.
fn checkpoints(run: &Run) -> Vec<usize> {
    let names = fs::read_dir(run.path().join("checkpoints")).unwrap().map(|entry| entry.unwrap().file_name());
    let step = |name: &str| name.rsplit_once("global_step_")?.1.parse().ok();
    let mut steps: Vec<usize> = names.filter_map(|name| step(name.to_str()?)).collect();
    steps.sort_unstable();
    steps
}

#[test]
fn a_run_without_improvement_ends_early_and_keeps_the_best_checkpoint() {
    let run = Run::new();
    let keep = ["checkpoint.0.save_every_n_steps=2", "checkpoint.0.save_total_limit=1"];
    let output = run.train(&[&[STOPPING, "eval_interval=2"], &keep[..]].concat());
    let log = stderr(&output);
    assert!(output.status.success(), "{log}");
    // The first evaluation is an improvement, and no later one is 100 lower.
    let reason = "early stopping: loss/eval has not improved in 2 evaluations since step 2 (";
    assert!(log.contains(reason), "{log}");
    let exit = &run.report()["exit"];
    assert!(exit["code"] == 0 && exit["reason"].as_str().unwrap().starts_with(reason), "{exit}");
    assert_eq!(run.losses().len(), 6);
    assert!(run.export_folder().ends_with("global_step_6"), "an early end exports as the end does");
    // The best checkpoint of all evaluations, and the newest.
    let best = run.report()["metrics"]["best"]["iter"].as_u64().unwrap() as usize;
    let mut kept = vec![best, 6];
    kept.dedup();
    assert_eq!(checkpoints(&run), kept);
}

#[test]
fn a_resumed_run_stops_at_the_step_of_an_uninterrupted_one() {
    let run = Run::new();
    let arguments = [STOPPING, "eval_interval=2", "checkpoint.0.save_every_n_steps=1"];
    run.train_ok(&[&arguments[..], &["exit_iteration=5"]].concat());
    run.train_ok(&arguments);
    run.assert_resumed();
    assert_eq!(run.losses().len(), 6);
    // A restart after the end trains nothing more.
    run.train_ok(&arguments);
    assert_eq!(run.losses().len(), 6);
    assert!(run.report()["exit"]["reason"].as_str().unwrap().contains("early stopping"));
}

#[test]
fn a_run_that_improves_is_not_stopped() {
    let run = Run::new();
    run.train_ok(&["early_stopping={patience: 1, metric: loss, mode: min}", "eval_interval=6"]);
    assert_eq!(run.losses().len(), 24);
    // In the other direction, every evaluation is worse than the first.
    let run = Run::new();
    run.train_ok(&["early_stopping={patience: 1, metric: loss, mode: max}", "eval_interval=6"]);
    assert_eq!(run.losses().len(), 12);
}

#[test]
fn retained_checkpoints_stay_next_to_the_newest() {
    let run = Run::new();
    let keep = ["checkpoint.0.save_total_limit=2", "checkpoint.0.save_retain_interval=8"];
    let output = run.train(&[&["checkpoint.0.save_every_n_steps=2"], &keep[..]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("save_total_limit 2, save_retain_interval 8"), "{}", stderr(&output));
    assert_eq!(checkpoints(&run), [8, 16, 22, 24]);
}

#[test]
fn each_evaluation_generates_greedy_and_sampled_replies() {
    let run = Run::new();
    let generate = "generate={prompts: ['What comes after 3?', hello], temperature: [0, 3], max_new_tokens: 8, \
                    on_evaluate: true}";
    let arguments = [generate, "checkpoint.0.save_every_n_steps=1"];
    run.train_ok(&[&arguments[..], &["exit_iteration=13"]].concat());
    // Of the record of step 13, which was no evaluation, nothing remains; those of step 12 are kept once.
    run.train_ok(&arguments);
    run.assert_resumed();
    let text = fs::read_to_string(run.path().join("run/samples.jsonl")).unwrap();
    let records: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(records.iter().map(|record| record["iter"].as_u64().unwrap()).collect::<Vec<_>>(), [12, 24]);
    for record in &records {
        let samples = record["samples"].as_array().unwrap();
        let settings: Vec<(&str, f64)> = samples
            .iter()
            .map(|sample| (sample["prompt"].as_str().unwrap(), sample["temperature"].as_f64().unwrap()))
            .collect();
        let number = "What comes after 3?";
        assert_eq!(settings, [(number, 0.0), (number, 3.0), ("hello", 0.0), ("hello", 3.0)]);
        assert_ne!(samples[2]["text"], samples[3]["text"], "the sampled reply is greedy: {record}");
    }
    assert!(!run.metrics().iter().any(|record| record.get("samples").is_some()));
}

#[test]
fn a_new_run_without_samples_leaves_none_of_the_earlier_run() {
    let run = Run::new();
    let fresh = "checkpoint={type: huggingface, output_dir: hf}";
    let tensorboard = "report_to=tensorboard";
    run.train_ok(&[
        fresh,
        tensorboard,
        "train_iters=2",
        "eval_interval=1",
        "generate={prompts: [hello], on_evaluate: true}",
    ]);
    let killed =
        run.command("train", &[fresh, "train_iters=3"]).env("CANDLEWICK_TEST_KILL_AT", "step_computed:2").output();
    assert!(!killed.unwrap().status.success());
    run.train_ok(&[fresh, "train_iters=4"]);
    let entries = fs::read_dir(run.path().join("run")).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = entries.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    let first = ["metrics.1.jsonl", "run.1.json", "samples.1.jsonl", "tensorboard.1"];
    let all = [&[".lock", "metrics.jsonl", "run.json"], &first[..], &["metrics.2.jsonl", "run.2.json"]].concat();
    assert_eq!(names, {
        let mut all = all;
        all.sort_unstable();
        all
    });
    let n_records =
        |name: &str| fs::read_to_string(run.path().join("run").join(name)).unwrap().matches("\"loss\":").count();
    assert_eq!(["metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl"].map(n_records), [2, 1, 4]);
    let report = |name: &str| -> Value {
        serde_json::from_slice(&fs::read(run.path().join("run").join(name)).unwrap()).unwrap()
    };
    assert_eq!(
        ["run.1.json", "run.2.json", "run.json"].map(|name| report(name)["run"]["total_steps"].clone()),
        [2, 3, 4]
    );
}

#[test]
fn sample_generations_do_not_change_a_run() {
    let (plain, sampled) = (Run::new(), Run::new());
    plain.train_ok(&[]);
    sampled.train_ok(&["generate={prompts: [hello], temperature: 1, on_evaluate: true}"]);
    assert_eq!(plain.losses(), sampled.losses());
    assert!(plain.exported() == sampled.exported());
}

/// Returns the tokens of each step, and the learning rates.
fn tokens(run: &Run) -> (Vec<u64>, Vec<f64>) {
    let steps: Vec<Value> = run.metrics().into_iter().filter(|record| record.get("loss").is_some()).collect();
    let tokens = steps.iter().map(|step| step["tokens"].as_u64().unwrap()).collect();
    (tokens, steps.iter().map(|step| step["lr"].as_f64().unwrap()).collect())
}

/// Checks that a run of `train_tokens` ends with the first step that reaches them, and that its warm-up has
/// `warmup_tokens`.
#[track_caller]
fn check_tokens(run: &Run, arguments: &[&str], train_tokens: u64, warmup_tokens: u64) {
    let (of_steps, lrs) = tokens(run);
    let sums: Vec<u64> = of_steps
        .iter()
        .scan(0, |sum, n| {
            *sum += n;
            Some(*sum)
        })
        .collect();
    let (last, before) = (sums[sums.len() - 1], sums[sums.len() - 2]);
    assert!(last >= train_tokens && before < train_tokens, "{arguments:?}: {sums:?}");
    // The peak follows the steps with the tokens of the warm-up.
    let peak = 1 + sums.iter().position(|sum| *sum >= warmup_tokens).unwrap();
    let highest = lrs.iter().position(|lr| (lr - 0.01).abs() < 1e-12).unwrap();
    assert_eq!(highest, peak, "{arguments:?}: {sums:?} {lrs:?}");
}

#[test]
fn a_horizon_in_tokens_ends_with_the_step_that_reaches_it() {
    let horizon = ["train_iters=null", "train_tokens=6K", "scheduler.warmup_tokens=1K"];
    for arguments in [
        &[][..],
        &["data.pack_samples=true", "micro_batch_size=1"],
        &[
            "data.pack_samples=true",
            "micro_batch_size=1",
            "data.always_max_length=true",
            "gradient_accumulation_steps=3",
        ],
        &["data.pad_to=max_length", "gradient_accumulation_steps=1"],
        &["micro_batch_size=7", "data.drop_last=true"],
        &["overfit_first_batch=true"],
    ] {
        let (whole, parts) = (Run::new(), Run::new());
        let arguments = [&horizon[..], arguments].concat();
        whole.train_ok(&arguments);
        check_tokens(&whole, &arguments, 6000, 1000);
        parts.train_ok(&[&arguments[..], &["exit_iteration=3"]].concat());
        parts.train_ok(&arguments);
        parts.assert_resumed();
        assert_eq!(tokens(&parts), tokens(&whole), "{arguments:?}");
        assert_eq!(parts.losses(), whole.losses(), "{arguments:?}");
    }
}

#[test]
fn a_decay_in_tokens_has_the_last_steps_that_have_them() {
    let run = Run::new();
    let scheduler = "scheduler={type: wsd, warmup_tokens: 500, num_decay_tokens: 1K}";
    run.train_ok(&["train_iters=null", "train_tokens=4K", scheduler]);
    let (of_steps, lrs) = tokens(&run);
    let n_decay = lrs.iter().rev().take_while(|lr| **lr < 0.01 - 1e-12).count();
    // The first step of the decay still has the peak.
    let last = |n: usize| of_steps.iter().rev().take(n).sum::<u64>();
    assert!(last(n_decay + 1) >= 1000 && last(n_decay) < 1000, "{of_steps:?} {lrs:?}");
}

#[test]
fn a_phase_with_more_tokens_than_the_run_is_an_error() {
    let run = Run::new();
    let output = run.train(&["train_iters=null", "train_tokens=2K", "scheduler.warmup_tokens=20K"]);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("warm-up steps into a run of"), "{said}");
}

#[test]
fn without_on_evaluate_samples_are_only_printed_at_the_end() {
    let run = Run::new();
    let output = run.train(&["train_iters=2", "generate={prompts: [hello], max_new_tokens: 2}"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(String::from_utf8_lossy(&output.stdout).starts_with("> hello\n"));
    assert!(!run.path().join("run/samples.jsonl").exists());
    assert_eq!(run.report()["plan"]["generate"]["temperature"], json!([0.0]));
}
