//! `trainer preprocess --show` and `--json`, and a run on a mixture of sources.

use std::process::Output;

use serde_json::Value;

use crate::support::{Run, stderr};

fn preprocess(run: &Run, arguments: &[&str], environment: &[(&str, &str)]) -> String {
    let mut command = run.command("preprocess", &[]);
    command.args(arguments).env_remove("NO_COLOR").env_remove("CLICOLOR_FORCE").envs(environment.iter().copied());
    text(&command.output().unwrap())
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{}", stderr(output));
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn samples_are_shown_with_their_targets_in_brackets() {
    let run = Run::new();
    let shown = preprocess(&run, &["--show", "2"], &[]);
    let samples: Vec<&str> = shown.split("\n--- sample ").skip(1).collect();
    assert_eq!(samples.len(), 2, "{shown}");
    for (number, sample) in samples.iter().enumerate() {
        let (header, sample) = sample.split_once('\n').unwrap();
        assert!(header.starts_with(&format!("{}: ", number + 1)) && header.contains("train.jsonl:"), "{header}");
        let (prompt, answer) = sample.split_once("[[").unwrap();
        assert!(prompt.contains("What comes after") && answer.contains("comes after"), "{sample}");
        assert!(answer.contains("]]") && !sample.contains('\u{1b}'), "{sample}");
    }
    assert!(shown.contains("targets are in [[ ]]"), "{shown}");
    assert!(!preprocess(&run, &[], &[]).contains("--- sample"));
}

/// A stream is shown by its first chunk, in the order of training.
#[test]
fn samples_and_lengths_of_a_stream_are_those_of_its_first_chunk() {
    let run = Run::new();
    let stream = ["data.streaming=true", "data.buffer_size=7", "train_iters=10"];
    let with = |more: &[&str]| preprocess(&run, &[more, &stream].concat(), &[]);
    let shown = with(&["--show", "3"]);
    assert!(shown.contains("the first chunk of the stream:"), "{shown}");
    assert!(shown.contains("lengths of 7 sequences"), "{shown}");
    let samples: Vec<&str> = shown.split("\n--- sample ").skip(1).collect();
    let texts: Vec<&str> = samples.iter().map(|sample| sample.split_once('\n').unwrap().1.trim()).collect();
    assert_eq!(texts.len(), 3, "{shown}");
    let steps = with(&["--steps", "1"]);
    let trained: Vec<&str> = steps.split("\n---\n").skip(1).map(str::trim).collect();
    assert_eq!(trained[..3], texts, "{steps}");
    let json: Value = serde_json::from_str(&with(&["--show", "2", "--json"])).unwrap();
    assert_eq!((&json["part"], json["samples"].as_array().unwrap().len()), (&"first_chunk".into(), 2));
}

#[test]
fn colours_replace_the_brackets_unless_they_are_refused() {
    let run = Run::new();
    let forced = preprocess(&run, &["--show", "1"], &[("CLICOLOR_FORCE", "1")]);
    let (_, sample) = forced.split_once("--- sample 1").unwrap();
    assert!(sample.contains("\u{1b}[32m") && !sample.contains("[["), "{sample}");
    assert!(sample.contains("\u{1b}[1m"), "special tokens are bold: {sample}");
    let refused = preprocess(&run, &["--show", "1"], &[("NO_COLOR", "1"), ("CLICOLOR_FORCE", "0")]);
    assert!(refused.contains("[[") && !refused.contains('\u{1b}'), "{refused}");
}

#[test]
fn lengths_targets_and_packing_are_summarized() {
    let run = Run::new();
    let summary = preprocess(&run, &["data.pack_samples=true", "micro_batch_size=1"], &[]);
    for part in ["lengths of 80 sequences: min ", " % of the tokens", "packing: ", " % full", "\u{2588}"] {
        assert!(summary.contains(part), "no {part:?} in:\n{summary}");
    }
    let padded = preprocess(&run, &["data.pad_to=max_length"], &[]);
    assert!(padded.contains("padding: ") && !padded.contains("packing: "), "{padded}");
}

/// Checks the warnings of a run, which `train`, `preprocess` and `check` print alike.
#[track_caller]
fn check_warnings(arguments: &[&str], want: &[&str]) {
    let run = Run::new();
    let is_open = |default: &&str| {
        let key = default.split('=').next().unwrap();
        !arguments.iter().any(|argument| argument.split('=').next() == Some(key))
    };
    let defaults = ["train_iters=null", "eval_interval=null", "micro_batch_size=1", "gradient_accumulation_steps=1"];
    let defaults = defaults.into_iter().filter(is_open);
    let arguments: Vec<&str> = defaults.chain(arguments.iter().copied()).collect();
    let shown = [preprocess(&run, &arguments, &[]), text(&run.command("check", &arguments).output().unwrap())];
    for shown in shown {
        let warnings: Vec<&str> = shown.lines().filter_map(|line| line.strip_prefix("warning: ")).collect();
        assert_eq!(warnings, want, "{shown}");
    }
}

#[test]
fn a_run_with_few_steps_is_warned_of_with_the_cause_and_the_remedies() {
    let [pack, long] = ["data.pack_samples=true", "data.max_length=4096"];
    check_warnings(&["epochs=1"], &[]);
    check_warnings(&["train_iters=3", pack, long], &[]);
    let packed = "packing puts 80 samples into 1 row. For more steps, set data.pack_samples: false";
    let none = format!("3 steps can teach little: {packed} (240 steps), or raise epochs");
    check_warnings(&["epochs=3", pack, long], &[&none]);
    let many = format!("40 steps can teach little: {packed} (3,200 steps), or raise epochs");
    check_warnings(&["epochs=40", pack, long], &[&many]);
    let batch = "10 steps can teach little: a step has 8 rows. For more steps, lower gradient_accumulation_steps, or \
                 lower micro_batch_size, or raise epochs";
    check_warnings(&["epochs=1", "micro_batch_size=2", "gradient_accumulation_steps=4"], &[batch]);
    let output =
        Run::new().command("check", &["--ranks", "50", "train_iters=24", "gradient_accumulation_steps=1"]).output();
    let idle = "warning: 10 data ranks have no row in any step: the data have 80 rows. Start at most 40 data ranks, or lower \
                micro_batch_size";
    assert!(text(&output.unwrap()).contains(idle), "{idle}");
    let short = "8 steps can teach little: the data have 80 rows. For more steps, raise epochs";
    check_warnings(&["epochs=0.1"], &[short]);
}

#[test]
fn early_stopping_that_cannot_end_the_run_is_warned_of() {
    let stopping = "early_stopping={patience: 3}";
    let want = "early_stopping cannot end this run: its patience is 3 evaluations, and the run has 4; set evals_per_epoch \
                or eval_interval, or lower early_stopping.patience";
    check_warnings(&["epochs=4", stopping], &[want]);
    check_warnings(&["epochs=4", stopping, "eval_interval=0.25"], &[want]);
    check_warnings(&["epochs=4", stopping, "eval_on_start=true"], &[]);
    check_warnings(&["epochs=4", stopping, "evals_per_epoch=2"], &[]);
    check_warnings(&["epochs=5", stopping], &[]);
}

#[test]
fn the_summary_is_one_json_object() {
    let run = Run::new();
    let arguments = ["--show", "3", "--json", "data.pack_samples=true", "micro_batch_size=1"];
    let json: Value = serde_json::from_str(&preprocess(&run, &arguments, &[])).unwrap();
    let report = &json["report"];
    let bins = report["lengths"]["bins"].as_array().unwrap();
    assert_eq!(bins.iter().map(|bin| bin["sequences"].as_u64().unwrap()).sum::<u64>(), 80);
    assert_eq!(report["lengths"]["sequences"], 80);
    let packing = &report["packing"];
    let fill = packing["tokens"].as_f64().unwrap() / packing["capacity"].as_f64().unwrap();
    assert_eq!(report["packing_fill"].as_f64().unwrap(), fill);
    let counts = &json["token_stats"]["train"];
    let share = counts["supervised"]["tokens"].as_f64().unwrap() / counts["kept"]["tokens"].as_f64().unwrap();
    assert!((report["target_share"].as_f64().unwrap() - share).abs() < 1e-12);
    let samples = json["samples"].as_array().unwrap();
    assert_eq!(samples.len(), 3);
    for sample in samples {
        assert_eq!(sample["ids"].as_array().unwrap().len(), sample["is_target"].as_array().unwrap().len());
        assert_eq!(sample["is_target"][0], false);
        assert!(sample["text"].as_str().unwrap().contains("[["));
    }
}

/// A run that is stopped and resumed reads what a run without a stop reads, and has its losses.
#[test]
fn a_mixture_is_counted_by_source_and_resumes_exactly() {
    let sources = |run: &Run| {
        let path = |name: &str| run.path().join(name).display().to_string();
        let (a, b) = (path("train.jsonl"), path("eval.jsonl"));
        format!("data.sources=[{{name_or_path: {a}, weight: 1}}, {{name_or_path: {b}, weight: 3}}]")
    };
    let keys = ["data.eval_sources=null", "data.stopping_strategy=all_exhausted"];
    let (whole, stopped) = (Run::new(), Run::new());
    whole.train_ok(&[&keys[..], &[&sources(&whole)]].concat());
    stopped.train_ok(&[&keys[..], &[&sources(&stopped), "exit_iteration=10"]].concat());
    let output = stopped.train(&[&keys[..], &[&sources(&stopped)]].concat());
    assert!(stderr(&output).contains("train.jsonl: ") && stderr(&output).contains(" times the source"));
    assert!(stderr(&output).lines().any(|line| line.contains(" read ") && line.contains("eval.jsonl")));
    stopped.assert_resumed();
    assert_eq!(stopped.losses(), whole.losses());
    assert_eq!(stopped.exported(), whole.exported());
    let counts = |run: &Run| run.report()["ledger"]["sources"].as_array().unwrap().clone();
    let read: Vec<u64> = counts(&whole).iter().map(|source| source["read"]["samples"].as_u64().unwrap()).collect();
    assert_eq!(read.iter().sum::<u64>(), 24 * 4);
    assert!(read[1] > 2 * read[0], "{read:?}");
    assert!(counts(&whole)[1]["epochs"].as_f64().unwrap() > 5.0);
    let read_of = |run: &Run| counts(run).iter().map(|source| source["read"].clone()).collect::<Vec<_>>();
    assert_eq!(read_of(&stopped), read_of(&whole));
    let output =
        stopped.train(&["data.eval_sources=null", "data.stopping_strategy=first_exhausted", &sources(&stopped)]);
    assert!(!output.status.success() && stderr(&output).contains("the mixture of sources was"), "{}", stderr(&output));
}
