//! `trainer config explain` and `trainer config diff`.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

const RECIPE: &str = "\
model:
  config: {model_type: llama, vocab_size: 64, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
           num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 128, rms_norm_eps: 1e-5}
tokenizer: {name_or_path: tok}
data:
  sources: [{name_or_path: a.jsonl, split: train}]
  max_length: 64
optimizer: {lr: 1e-3}
checkpoint: {type: huggingface, output_dir: out, save_every_n_steps: 5}
";

/// A folder with a recipe.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("r.yaml"), RECIPE).unwrap();
    folder
}

fn run(folder: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_trainer"));
    command.arg("config").args(arguments).current_dir(folder).env("HF_HUB_OFFLINE", "1").env_remove("RUST_BACKTRACE");
    command.envs(environment.iter().copied()).output().unwrap()
}

/// Checks the exit code, and that the output has these lines in this order, without regard to spaces. Returns stdout.
#[track_caller]
fn check_in(folder: &Path, arguments: &[&str], environment: &[(&str, &str)], code: i32, lines: &[&str]) -> String {
    let output = run(folder, arguments, environment);
    let text = String::from_utf8([&output.stdout[..], &output.stderr[..]].concat()).unwrap();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {text}");
    let spaced = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut found = text.lines().map(spaced);
    for line in lines {
        assert!(found.any(|found| found.starts_with(line)), "no line {line:?} in its place:\n{text}");
    }
    String::from_utf8(output.stdout).unwrap()
}

#[track_caller]
fn check(arguments: &[&str], code: i32, lines: &[&str]) -> String {
    check_in(folder().path(), arguments, &[], code, lines)
}

#[test]
fn a_key_is_explained_with_type_default_values_and_other_names() {
    check(
        &["explain", "data.truncation"],
        0,
        &["data.truncation", "type name", "default", "values", "elsewhere excess_length_strategy, overlong"],
    );
    check(
        &["explain", "optimizer.lr"],
        0,
        &["optimizer.learning_rate", "type number", "default 2e-5 for a pretrained", "alias lr"],
    );
}

#[test]
fn a_section_is_explained_by_its_keys() {
    let text = check(&["explain", "optimizer"], 0, &["optimizer", "key default meaning", "optimizer.eps 1e-8 A"]);
    assert!(!text.contains("scheduler"), "{text}");
    let lines = ["model.activation_checkpoint", "type name or section", "model.activation_checkpoint none default"];
    check(&["explain", "model.activation_checkpoint", "r.yaml"], 0, &lines);
    check(&["explain", "optimizer", "r.yaml"], 0, &["key value set by", "optimizer.learning_rate 0.001 r.yaml:8"]);
}

#[test]
fn the_value_of_a_recipe_is_explained_with_its_origin() {
    for (key, lines) in [
        ("data.max_length", ["value 64", "set by r.yaml:7"]),
        ("optimizer.lr", ["value 0.5", "set by command line"]),
        ("epochs", ["value 1", "set by default"]),
        ("checkpoint.save_every_n_steps", ["value checkpoint.0.save_every_n_steps = 5", "set by r.yaml:9"]),
        ("data.sources.0.split", ["value data.sources.0.split = train", "set by r.yaml:6"]),
        ("model.config.hidden_size", ["value model.config.hidden_size = 16", "set by r.yaml:2"]),
    ] {
        check(&["explain", key, "r.yaml", "optimizer.lr=0.5"], 0, &lines);
    }
    check(&["explain", "generate.top_p", "r.yaml"], 0, &["value not set in r.yaml"]);
}

#[test]
fn a_value_of_the_environment_is_explained_with_its_variable() {
    let arguments = ["explain", "wandb.project", "r.yaml", "report_to=wandb"];
    let environment = [("WANDB_PROJECT", "mine"), ("WANDB_MODE", "offline")];
    let lines = ["value mine", "set by environment variable WANDB_PROJECT"];
    check_in(folder().path(), &arguments, &environment, 0, &lines);
}

#[test]
fn a_key_of_another_toolkit_is_explained_by_its_counterpart() {
    check(&["explain", "max_steps"], 0, &["max_steps is a key of another toolkit: use `train_iters`", "train_iters"]);
    check(&["explain", "lora_r"], 0, &["lora_r is a key of another toolkit", "model.peft_config"]);
}

#[test]
fn an_unknown_key_exits_with_2_and_a_suggestion() {
    check(
        &["explain", "data.max_lenght"],
        2,
        &["error: unknown key `data.max_lenght`", "= did you mean `max_length`?"],
    );
    check(&["explain", "trust_remote_code"], 2, &["error: unknown key", "= remove the key: a model's code is never"]);
    for (word, part) in [
        ("dpo", "TRL"),
        ("qlora", "`model.quantize_base: fp8`"),
        ("grpo", "TRL"),
        ("use_dora", "DoRA: not supported"),
        ("modules_to_save", "full fine-tuning"),
        ("neftune", "NEFTune"),
        ("muon", "AdamW"),
        ("pissa", "rsLoRA"),
        ("adamw_8bit", "`offload_optimizer`"),
        ("mps", "`device: cpu`"),
        ("add_special_tokens", "`resize_token_embeddings` of transformers"),
        ("group_by_length", "remove the key"),
    ] {
        let output = run(folder().path(), &["explain", word], &[]);
        let text = String::from_utf8(output.stderr).unwrap();
        let is_missing = text.contains("error: unknown key") && text.contains(part);
        assert!(output.status.code() == Some(2) && is_missing, "{word}: {text}");
    }
    for word in
        super::plan_rules::other_toolkits::WORDS.split_whitespace().chain(["reward model", "4-bit", "Flash Attention"])
    {
        let output = run(folder().path(), &["explain", word], &[]);
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        let answers = ["is a key of another toolkit: use `", "not supported; use ", "   = "];
        let is_answered = answers.iter().any(|part| text.contains(part));
        let is_guess =
            text.contains("did you mean") || text.lines().nth(1).is_none_or(|line| line.contains("have all keys"));
        assert!(is_answered && !is_guess, "{word}: {text}");
    }
    check(&["explain", "lora_rnk"], 2, &["error: unknown key", "= did you mean `lora_rank` of other toolkits?"]);
}

#[test]
fn an_explanation_as_json_has_the_documentation_and_the_settings() {
    let json = |arguments: &[&str]| -> serde_json::Value {
        let text = check(&[&["explain"], arguments, &["--json"]].concat(), 0, &[]);
        serde_json::from_str(&text).unwrap()
    };
    let of_key = json(&["optimizer.lr", "r.yaml", "optimizer.lr=0.5"]);
    assert_eq!(of_key["documentation"]["path"], "optimizer.learning_rate");
    assert_eq!(of_key["documentation"]["aliases"], serde_json::json!(["lr"]));
    let setting = serde_json::json!({"key": "optimizer.learning_rate", "value": 0.5, "origin": "command line"});
    assert_eq!((&of_key["recipe"], &of_key["settings"]), (&"r.yaml".into(), &serde_json::json!([setting])));
    let unset = json(&["generate.top_p", "r.yaml"]);
    assert_eq!(unset["settings"], serde_json::json!([]));
    let section = json(&["optimizer"]);
    assert!(section["keys"].as_array().unwrap().iter().any(|key| key["path"] == "optimizer.weight_decay"), "{section}");
    assert!(section["settings"].is_null() && section["documentation"]["default"].is_null(), "{section}");
    let foreign = json(&["max_steps"]);
    assert_eq!(foreign["documentation"]["path"], "train_iters");
    assert!(foreign["note"].as_str().unwrap().contains("another toolkit"), "{foreign}");
    check(&["explain", "data.max_lenght", "--json"], 2, &["error: unknown key"]);
}

#[test]
fn equal_recipes_have_no_difference() {
    check(&["diff", "r.yaml", "r.yaml"], 0, &["the "]);
    check(&["diff", "r.yaml", "r.yaml", "epochs=1"], 0, &["the "]);
}

#[test]
fn a_diff_has_the_keys_that_differ_with_both_origins() {
    let overrides = ["epochs=2", "data.sources.0.split=test", "checkpoint.save_every_n_steps=null"];
    let text = check(
        &[&["diff", "r.yaml", "r.yaml"][..], &overrides].concat(),
        1,
        &[
            "- r.yaml",
            "+ r.yaml",
            "epochs",
            "- 1 default",
            "+ 2 command line",
            "data.sources.0.split",
            "- train r.yaml:6",
            "+ test command line",
            "checkpoint.0.save_every_n_steps",
            "- 5 r.yaml:9",
            "+ not set",
        ],
    );
    assert!(!text.contains("max_length"), "{text}");
}

#[test]
fn paths_that_follow_from_the_output_folder_are_no_difference() {
    let text = check(&["diff", "r.yaml", "r.yaml", "output_dir=elsewhere", "epochs=2"], 1, &["epochs", "output_dir"]);
    for key in ["kill_switch_path", "train_log_metrics_path"] {
        assert!(!text.contains(key), "{key} in {text}");
    }
}

#[test]
fn a_diff_as_json_has_values_and_origins() {
    let text = check(&["diff", "r.yaml", "r.yaml", "epochs=2", "--output-format", "json"], 1, &[]);
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let want = serde_json::json!([{
        "key": "epochs", "a": {"value": 1, "origin": "default"}, "b": {"value": 2, "origin": "command line"}
    }]);
    assert_eq!(json["differences"], want, "{json}");
}

/// `trainer check --output-format json` prints the plan as run.json has it.
#[test]
fn a_recipe_is_compared_with_a_run() {
    let folder = folder();
    let check_json = Command::new(env!("CARGO_BIN_EXE_trainer"))
        .args(["check", "r.yaml", "epochs=3", "--output-format", "json"])
        .current_dir(folder.path())
        .output()
        .unwrap();
    let plan: serde_json::Value = serde_json::from_slice(&check_json.stdout).unwrap();
    let write = |plan: &serde_json::Value| {
        fs::create_dir_all(folder.path().join("run")).unwrap();
        fs::write(folder.path().join("run/run.json"), serde_json::json!({ "plan": plan }).to_string()).unwrap();
    };
    write(&plan);
    let lines = ["- run", "+ r.yaml", "epochs", "- 3 command line", "+ 1 default"];
    check_in(folder.path(), &["diff", "run", "r.yaml"], &[], 1, &lines);
    check_in(folder.path(), &["diff", "run", "r.yaml", "epochs=3"], &[], 0, &["the "]);
    // A run of an older version has the settings only.
    let mut older = plan.clone();
    older.as_object_mut().unwrap().remove("written");
    write(&older);
    check_in(folder.path(), &["diff", "run", "r.yaml", "epochs=3"], &[], 0, &["the "]);
}

#[test]
fn a_folder_without_a_run_exits_with_2() {
    let folder = folder();
    let lines = ["error: failed to read the settings in ./run.json"];
    check_in(folder.path(), &["diff", "r.yaml", "."], &[], 2, &lines);
    for json in ["{}", "[]", "3", r#"{"plan": []}"#, r#"{"plan": {"recipe": "r.yaml", "settings": {}}}"#] {
        fs::write(folder.path().join("run.json"), json).unwrap();
        check_in(folder.path(), &["diff", "r.yaml", "."], &[], 2, &lines);
    }
    let lines = ["error: failed to compare: epochs=1: an override needs a recipe, and . is a run"];
    check_in(folder.path(), &["diff", "r.yaml", ".", "epochs=1"], &[], 2, &lines);
}
