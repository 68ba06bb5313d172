//! `--timings`: the durations of `evaluator score` and `evaluator generate` as JSON on stderr.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

const PROMPT: &str = "Say wolf 4 times.";

#[test]
fn timings_count_the_prompt_and_the_answer_and_leave_the_answer_alone() {
    let folder = tempfile::tempdir().unwrap();
    let model = crate::support::export(folder.path(), 1);
    let generate = ["generate", "--raw", "--prompt", PROMPT, "--max-new-tokens", "8"];
    let plain = evaluator(&model, &generate);
    let timed = evaluator(&model, &[&generate[..], &["--timings"]].concat());
    assert_eq!(plain.stdout, timed.stdout);
    let plain = String::from_utf8(plain.stderr).unwrap();
    let (note, speed) = plain.split_once('\n').unwrap();
    assert_eq!(note, "note: `evaluator generate` is now `trainer generate`");
    assert!(speed.contains(" tokens/s (prompt: ") && speed.lines().count() == 1, "{speed}");

    let timings = parse(&timed.stderr);
    let scored = parse(&evaluator(&model, &["score", "--text", PROMPT]).stdout);
    assert_eq!(timings["prompt_tokens"].as_u64().unwrap() as usize, scored.as_array().unwrap().len());
    let number = |name: &str| timings[name].as_f64().unwrap();
    assert!((1.0..=8.0).contains(&number("new_tokens")), "{timings}");
    let speed = number("new_tokens") / (number("prompt_time") + number("decode_time"));
    assert!((number("tokens_per_second") / speed - 1.0).abs() < 1e-9, "{timings}");
}

#[test]
fn timings_of_scored_rows_count_their_targets() {
    let folder = tempfile::tempdir().unwrap();
    let model = crate::support::export(folder.path(), 1);
    let data = folder.path().join("texts.txt");
    std::fs::write(&data, "Say wolf 4 times.\nSpell the word cloud.\n").unwrap();
    let output = evaluator(&model, &["score", "--timings", "--data", data.to_str().unwrap()]);
    let (said, timings) = (parse(&output.stdout), parse(&output.stderr));
    assert_eq!(timings["tokens"], said["tokens"]);
    let speed = said["tokens"].as_f64().unwrap() / timings["eval_time"].as_f64().unwrap();
    assert_eq!(timings["tokens_per_second"].as_f64().unwrap(), speed);
}

fn evaluator(model: &Path, arguments: &[&str]) -> Output {
    let (command, options) = arguments.split_first().unwrap();
    let mut evaluator = Command::new(env!("CARGO_BIN_EXE_evaluator"));
    success(evaluator.arg(command).arg("--model").arg(model).args(["--device", "cpu"]).args(options).output().unwrap())
}

fn success(output: Output) -> Output {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

fn parse(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap()
}
