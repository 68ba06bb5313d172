//! The loss watchdog, and the replay of the batches that it keeps.

use std::fs;
use std::path::PathBuf;
use std::process::Output;

use serde_json::Value;

use crate::support::{Run, stderr};

/// The row of the loss spike, and its step: a step has one row.
const SPIKE: usize = 41;

const ONE_ROW: [&str; 6] = [
    "data.order=sequential",
    "micro_batch_size=1",
    "gradient_accumulation_steps=1",
    "train_iters=60",
    "eval_interval=60",
    "scheduler.name=constant",
];

/// A watchdog that finds the spike and nothing else.
const WATCHDOG: &str = "rolling_interval_length: 16, warmup_steps: 24, sigma_factor: 8";

/// Returns a run whose rows are alike, except one of rare characters.
fn spiky() -> Run {
    let run = Run::new();
    run.write("train.jsonl", &rows(1..=80));
    run
}

/// Returns the rows of these steps. The one of the spike answers with rare characters.
fn rows(steps: impl Iterator<Item = usize>) -> String {
    let answer = |step: usize| {
        if step == SPIKE { "§ΩЖ¿ÞßЇ漢字§ΩЖ¿ÞßЇ漢字".to_owned() } else { "Yes. ".repeat(4) }
    };
    let row = |step: usize| {
        let messages = serde_json::json!([
            {"role": "user", "content": format!("Is {} a number?", step % 4)},
            {"role": "assistant", "content": answer(step).trim()},
        ]);
        serde_json::json!({ "messages": messages }).to_string() + "\n"
    };
    steps.map(row).collect()
}

/// Returns the arguments of one row a step, except those that `more` sets.
fn arguments<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let key = |argument: &'a str| argument.split('=').next();
    let is_set = |argument: &str| more.iter().any(|other| key(other) == argument.split('=').next());
    ONE_ROW.into_iter().filter(|argument| !is_set(argument)).chain(more.iter().copied()).collect()
}

fn train(run: &Run, action: &str, more: &[&str]) -> Output {
    let watchdog = format!("loss_watchdog={{action: {action}, {WATCHDOG}}}");
    run.train(&arguments(&[&[watchdog.as_str()], more].concat()))
}

#[track_caller]
fn train_ok(run: &Run, action: &str, more: &[&str]) {
    let output = train(run, action, more);
    assert!(output.status.success(), "{}", stderr(&output));
}

/// Returns the events of the watchdog, and their steps.
fn spikes(run: &Run) -> Vec<(u64, Value)> {
    let events = run
        .metrics()
        .into_iter()
        .filter_map(|record| Some((record["iter"].as_u64()?, record.get("loss_spike")?.clone())));
    events.collect()
}

/// Returns the files with the tensors of a checkpoint.
fn tensors(run: &Run, step: usize) -> Vec<Vec<u8>> {
    let folder = run.path().join("checkpoints");
    let mut folders = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let folder = folders.find(|path| path.to_str().unwrap().ends_with(&format!("global_step_{step}"))).unwrap();
    let mut shards: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    shards.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    shards.sort();
    assert!(!shards.is_empty());
    shards.iter().map(|path| fs::read(path).unwrap()).collect()
}

/// Returns the losses of steps by number.
fn loss_of(run: &Run, step: usize) -> f64 {
    run.losses()[step - 1]
}

#[test]
fn a_skipped_spike_changes_neither_weights_nor_optimizer() {
    let run = spiky();
    train_ok(&run, "skip", &["checkpoint.0.save_every_n_steps=1"]);
    let found = spikes(&run);
    assert_eq!(found.len(), 1, "{found:?} in {:?}", run.losses());
    let (step, event) = &found[0];
    assert_eq!((*step as usize, &event["action"]), (SPIKE, &Value::from("skip")));
    assert!(event["loss"].as_f64().unwrap() > event["max_loss"].as_f64().unwrap(), "{event}");
    assert!(event.get("rewound_to").is_none());
    assert!(tensors(&run, SPIKE - 1) == tensors(&run, SPIKE), "the update of the spike was applied");
    assert!(tensors(&run, SPIKE) != tensors(&run, SPIKE + 1));
    assert_eq!(run.report()["skipped_steps"], 1);
    assert_eq!(run.report()["metrics"]["loss_spikes"], 1);
    // Without a watchdog the update is applied, and the step before has the same loss.
    let applied = spiky();
    applied.train_ok(&arguments(&["checkpoint.0.save_every_n_steps=1"]));
    assert_eq!(loss_of(&applied, SPIKE), loss_of(&run, SPIKE));
    assert_ne!(loss_of(&applied, SPIKE + 1), loss_of(&run, SPIKE + 1));
}

#[cfg(debug_assertions)]
#[test]
fn a_run_rewinds_to_the_checkpoint_of_a_stopped_run() {
    let run = spiky();
    let watchdog = format!("loss_watchdog={{action: skip, {WATCHDOG}}}");
    let mut command = run.command("train", &arguments(&[&watchdog, "checkpoint=null"]));
    let output = command.env("CANDLEWICK_TEST_TERMINATE_AT", "step_computed:38").output().unwrap();
    assert_eq!(output.status.code(), Some(75), "{}", stderr(&output));
    train_ok(&run, "rewind", &["checkpoint.0.save_every_n_steps=50"]);
    let found = spikes(&run);
    assert!(found.iter().any(|(step, event)| (*step, &event["rewound_to"]) == (41, &Value::from(38))), "{found:?}");
}

#[test]
fn a_run_that_resumes_after_a_spike_or_before_one_equals_an_uninterrupted_one() {
    for action in ["skip", "rewind"] {
        let (whole, parts) = (spiky(), spiky());
        let saves = "checkpoint.0.save_every_n_steps=15";
        train_ok(&whole, action, &[saves]);
        for exit in ["exit_iteration=38", "exit_iteration=43"] {
            train_ok(&parts, action, &[saves, exit]);
        }
        train_ok(&parts, action, &[saves]);
        parts.assert_resumed();
        if action == "skip" {
            assert_eq!(parts.losses(), whole.losses());
            assert!(parts.exported() == whole.exported());
        } else {
            // The end of the first process saved step 38, to which the second one rewinds.
            let rewound_to = |run: &Run| spikes(run)[0].1["rewound_to"].as_u64();
            assert_eq!((rewound_to(&whole), rewound_to(&parts)), (Some(30), Some(38)));
        }
    }
}

/// The steps after a rewind equal those of a run whose data lack the rows between the checkpoint and the end of the spike.
#[test]
fn a_rewind_loads_the_checkpoint_and_skips_the_data_until_after_the_spike() {
    let run = spiky();
    let saves = "checkpoint.0.save_every_n_steps=15";
    train_ok(&run, "rewind", &[saves]);
    let found = spikes(&run);
    assert_eq!(found.len(), 1, "{found:?}");
    let (step, event) = &found[0];
    assert_eq!((*step as usize, &event["action"], &event["rewound_to"]), (SPIKE, &"rewind".into(), &30.into()));
    let other = Run::new();
    other.write("train.jsonl", &rows((1..=30).chain(SPIKE + 1..=80)));
    other.train_ok(&arguments(&[saves]));
    assert_eq!(run.losses()[..30], other.losses()[..30]);
    assert_eq!(run.losses()[SPIKE..60], other.losses()[30..30 + 60 - SPIKE], "{:?}", run.losses());
    assert_eq!(run.report()["skipped_steps"], SPIKE - 30);
}

/// A loader that has read ahead continues after the spike, too. A stream begins again within a chunk.
#[test]
fn a_rewind_continues_after_the_spike_with_workers_and_in_a_stream() {
    let saves = "checkpoint.0.save_every_n_steps=15";
    let losses = |more: &[&str]| {
        let run = spiky();
        train_ok(&run, "rewind", &[&[saves], more].concat());
        assert_eq!(spikes(&run)[0].1["rewound_to"], 30);
        run.losses()
    };
    let want = losses(&[]);
    assert_eq!(losses(&["data.dl_num_workers=2"]), want);
    for n_workers in ["data.dl_num_workers=0", "data.dl_num_workers=2"] {
        assert_eq!(losses(&["data.streaming=true", "data.buffer_size=7", n_workers]), want);
    }
}

/// The kept batch of a stream names the row of the spike.
#[test]
fn the_kept_batch_of_a_stream_names_its_row() {
    let run = spiky();
    let output = train(&run, "stop", &["data.streaming=true", "data.buffer_size=7"]);
    assert_eq!(output.status.code(), Some(5), "{}", stderr(&output));
    let kept = fs::read_to_string(run.path().join("run/kept_batches").join(format!("step_{SPIKE}.json")));
    let kept: Value = serde_json::from_str(&kept.unwrap()).unwrap();
    let place = kept["micro_batches"][0]["sources"][0][0].as_str().unwrap();
    assert!(place.ends_with(&format!("train.jsonl:{SPIKE}")), "{place}");
}

#[test]
fn a_spike_before_the_first_checkpoint_is_skipped() {
    let run = spiky();
    let output = train(&run, "rewind", &["checkpoint.0.save_every_n_steps=50"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("there is no checkpoint to rewind to yet"), "{}", stderr(&output));
    assert!(spikes(&run)[0].1.get("rewound_to").is_none());
}

#[test]
fn a_spike_ends_a_run_with_stop_and_after_the_last_event() {
    for (action, reason) in [("stop", ""), ("skip, max_events: 0", "loss_watchdog.max_events")] {
        let run = spiky();
        let output = train(&run, action, &["checkpoint.0.save_every_n_steps=1"]);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(5), "{said}");
        let step = format!("the loss of step {SPIKE} is");
        for words in [&step, reason, "trainer replay", "kept_batches/step_41.json"] {
            assert!(said.contains(words), "no {words:?} in {said}");
        }
        assert_eq!(spikes(&run)[0].1["action"], "stop");
        assert!(!run.path().join(format!("checkpoints/epoch_0_global_step_{SPIKE}")).exists());
        assert_eq!(run.report()["exit"]["code"], 5);
    }
}

#[test]
fn a_fixed_limit_applies_from_the_first_step_on() {
    let run = spiky();
    let output = run.train(&arguments(&["loss_watchdog={action: stop, max_loss: 1}"]));
    assert_eq!(output.status.code(), Some(5), "{}", stderr(&output));
    assert!(stderr(&output).contains("the loss of step 1 is"), "{}", stderr(&output));
}

fn replay_json(run: &Run, arguments: &[&str]) -> Value {
    let output = run.replay(&[&["--output-format", "json"], arguments].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_replay_has_the_loss_and_the_gradient_of_the_run_and_names_the_row() {
    let run = spiky();
    // Two rows a step, packed: the spike is in step 21.
    let more = ["checkpoint.0.save_every_n_steps=1", "gradient_accumulation_steps=2", "train_iters=30"];
    let watchdog = "loss_watchdog={rolling_interval_length: 8, warmup_steps: 12, sigma_factor: 8}";
    run.train_ok(&arguments(&[&[watchdog], &more[..]].concat()));
    let found = spikes(&run);
    assert_eq!(found.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [21], "{:?}", run.losses());
    let report = replay_json(&run, &[]);
    let close = |a: &Value, b: &Value| {
        let (a, b) = (a.as_f64().unwrap(), b.as_f64().unwrap());
        (a - b).abs() <= 1e-5 * b.abs()
    };
    assert_eq!((&report["step"], &report["weights_after_step"]), (&21.into(), &20.into()));
    for name in ["loss", "grad_norm"] {
        assert!(close(&report["replayed"][name], &report["recorded"][name]), "{name}: {report}");
    }
    let norms: f64 = report["grad_norms"].as_object().unwrap().values().map(|x| x.as_f64().unwrap().powi(2)).sum();
    assert!(close(&norms.sqrt().into(), &report["recorded"]["grad_norm"]), "{report}");
    let layers: Vec<&String> = report["grad_norms"].as_object().unwrap().keys().collect();
    assert_eq!(layers, ["embed_tokens", "layers.00000", "layers.00001", "norm"]);
    let sequences = report["sequences"].as_array().unwrap();
    assert_eq!(sequences.len(), 2);
    let worst = &sequences[0];
    assert!(worst["sources"][0].as_str().unwrap().ends_with(&format!("train.jsonl:{SPIKE}")), "{worst}");
    assert!(worst["text"].as_str().unwrap().contains('Ω'), "{worst}");
    let sum: f64 = sequences.iter().map(|sequence| sequence["loss_sum"].as_f64().unwrap()).sum();
    assert!(close(&(sum / report["n_targets"].as_f64().unwrap()).into(), &report["recorded"]["loss"]), "{report}");
    // Other weights have another loss.
    let initial = replay_json(&run, &["--initial-weights"]);
    assert!(!close(&initial["replayed"]["loss"], &report["replayed"]["loss"]));
    let text = String::from_utf8(run.replay(&["--rows", "1"]).stdout).unwrap();
    for words in ["the loss watchdog found a loss spike", "layers.00001", "sequences with the highest loss (1 of 2)"] {
        assert!(text.contains(words), "no {words:?} in {text}");
    }
}

#[test]
fn a_replay_without_its_batch_or_checkpoint_says_how_to_fix_it() {
    let run = Run::new();
    run.train_ok(&["train_iters=1"]);
    let none = run.replay(&[]);
    assert_eq!(none.status.code(), Some(3), "{}", stderr(&none));
    assert!(stderr(&none).contains("failed to find a kept batch"), "{}", stderr(&none));
    let run = spiky();
    train_ok(&run, "skip", &["checkpoint.0.save_every_n_steps=10"]);
    let other = run.replay(&["--step", "7"]);
    assert!(stderr(&other).contains("of step 7") && stderr(&other).contains("[41]"), "{}", stderr(&other));
    fs::remove_dir_all(run.path().join("checkpoints/epoch_0_global_step_40")).unwrap();
    let missing = run.replay(&[]);
    assert_eq!(missing.status.code(), Some(6), "{}", stderr(&missing));
    assert!(stderr(&missing).contains("--checkpoint"), "{}", stderr(&missing));
    let given = run.path().join("checkpoints/epoch_0_global_step_30");
    let report = replay_json(&run, &["--checkpoint", given.to_str().unwrap()]);
    assert_eq!(report["weights_after_step"], 30);
}
