//! Names of models: run folders, adapters, paths without a model, and weights that are not finite.

use std::fs;
use std::path::Path;

use super::{TrainedRuns, ok, text};

#[test]
fn a_runs_folder_names_its_newest_export() {
    let runs = TrainedRuns::shared();
    let at =
        |model: &str| ok(runs.run("trainer", &["generate", model, "--prompt", "Say wolf.", "--device", "cpu"], ""));
    let newest = at("full/model/global_step_24");
    for (model, note) in [("full", "newest of 2"), ("full/model", "newest of 2")] {
        let found = at(model);
        assert_eq!(found.stdout, newest.stdout);
        let note = format!("model: full/model/global_step_24 ({note})\n");
        assert!(text(&found.stderr).starts_with(&note), "{}", text(&found.stderr));
    }
    assert_eq!(at("full/model/latest").stdout, newest.stdout);
    assert_eq!(fs::read_link(runs.path("full/model/latest")).unwrap(), Path::new("global_step_24"));
    let sharded = fs::read_link(runs.path("full/checkpoints/latest")).unwrap();
    assert!(runs.path("full/checkpoints").join(sharded).join("manifest.json").is_file());
}

#[test]
fn an_adapter_brings_its_base() {
    let runs = TrainedRuns::shared();
    let prompt = ["--prompt", "What comes after 5?"];
    let alone = runs.says(&[&["generate", "--model", "lora"], &prompt[..]].concat(), "");
    let both = ["generate", "--model", "full", "--adapter", "lora/model/global_step_24"];
    assert_eq!(alone, runs.says(&[&both[..], &prompt].concat(), ""));
    assert_ne!(runs.eval_loss("full"), runs.eval_loss("lora"), "the adapter has learned something");
    let twice = runs.evaluator(&[&["generate", "--model", "lora", "--adapter", "lora"], &prompt[..]].concat(), "");
    runs.refuses(&twice, 2, &["it is an adapter, and --adapter names another"]);
    let output = runs.run("trainer", &["check", "lora.yaml", "model.name_or_path=lora/model"], "");
    runs.refuses(&output, 2, &["is an adapter, not a model", "model.adapter_name_or_path: lora/model/global_step_24"]);
}

#[test]
fn a_path_without_a_model_is_an_error_before_any_hub_request() {
    let runs = TrainedRuns::shared();
    let at = |model: &str| runs.evaluator(&["generate", "--model", model, "--prompt", "a"], "");
    runs.refuses(&at("full/checkpoints"), 3, &["it holds sharded checkpoints", "trainer export"]);
    runs.refuses(&at("full/modle"), 3, &["neither a folder here nor a Hub id", "did you mean full/model?"]);
    runs.refuses(&at("./ful"), 3, &["did you mean ./full?"]);
    runs.refuses(&at("owner/nope"), 3, &["it is no folder here", "failed to reach http://127.0.0.1:9"]);
    assert!(!text(&at("owner/nope").stderr).contains("hunter2"));
}

#[test]
fn weights_that_are_not_finite_are_an_error_everywhere() {
    let runs = TrainedRuns::shared();
    let weights = runs.copy_model("broken").join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let n_bytes = bytes.len();
    bytes[n_bytes - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&weights, bytes).unwrap();
    runs.write("requests.jsonl", "{\"type\": \"generate_until\", \"context\": \"a\", \"max_gen_toks\": 8}\n");
    for arguments in [
        &["generate", "--model", "broken", "--prompt", "a"][..],
        &["chat", "--model", "broken"],
        &["score", "--model", "broken", "--text", "some text"],
        &["score", "--model", "broken", "--data", "eval.jsonl"],
        &["answer", "requests.jsonl", "--model", "broken"],
    ] {
        let output = runs.evaluator(arguments, "hello\n");
        runs.refuses(&output, 5, &["not finite"]);
        assert_eq!(text(&output.stdout).trim(), "", "{arguments:?}");
    }
}
