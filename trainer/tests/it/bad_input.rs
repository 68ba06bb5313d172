//! Bad input. The message fits a screen and names the place and a fix; the exit code is the documented one.

use std::fs;

use crate::support::{Run, stderr};

/// Checks that a run fails before its first step, with `code` and a message that contains `phrases`.
#[track_caller]
fn check(run: &Run, overrides: &[&str], code: i32, phrases: &[&str]) {
    let output = run.train(overrides);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{text}");
    for phrase in phrases {
        assert!(text.contains(phrase), "{phrase:?} is not in:\n{text}");
    }
    assert!(!text.contains("panicked"), "{text}");
    assert!(text.lines().count() < 40, "more than a screen:\n{text}");
    assert!(!run.has_exports(), "a refused run exported weights");
    assert!(!run.path().join("run/metrics.jsonl").exists(), "a refused run logged a step");
}

#[test]
fn an_unknown_key_is_refused_with_its_line_and_the_nearest_key() {
    let run = Run::new();
    run.edit("gradient_accumulation_steps: 2", "gradient_acumulation_steps: 2");
    check(&run, &[], 2, &["recipe.yaml:5", "gradient_acumulation_steps", "gradient_accumulation_steps"]);
}

#[test]
fn a_config_key_of_another_family_is_refused_with_its_line_and_the_key_of_this_one() {
    let run = Run::of_experts();
    run.edit("    num_experts: 8", "    first_k_dense_replace: 1\n    num_experts: 8");
    let line = fs::read_to_string(run.path().join("recipe.yaml")).unwrap();
    let line = line.lines().position(|line| line.contains("first_k_dense_replace")).unwrap() + 1;
    let place = format!("recipe.yaml:{line}");
    let instead = "has no effect on a qwen3_moe model; use mlp_only_layers or moe_layer_freq instead";
    check(&run, &[], 2, &[&place, "first_k_dense_replace", instead]);
    run.edit("first_k_dense_replace: 1", "num_local_experts: 4");
    check(&run, &[], 2, &[&place, "4 experts", "set num_experts alone"]);
}

#[test]
fn an_unknown_override_is_refused() {
    check(&Run::new(), &["optimizer.learning_rat=1"], 2, &["optimizer.learning_rat", "learning_rate"]);
}

#[test]
fn a_wrong_type_names_the_key_and_the_value() {
    check(&Run::new(), &["micro_batch_size=many"], 2, &["micro_batch_size", "many"]);
}

#[test]
fn a_missing_recipe_is_named() {
    let run = Run::new();
    fs::remove_file(run.path().join("recipe.yaml")).unwrap();
    check(&run, &[], 2, &["recipe.yaml"]);
}

#[test]
fn a_broken_json_line_is_named() {
    let run = Run::new();
    let rows = fs::read_to_string(run.path().join("train.jsonl")).unwrap();
    let mut lines: Vec<&str> = rows.lines().collect();
    lines[16] = r#"{"messages": [{"role": "user", "content": "cut off"#;
    run.write("train.jsonl", &lines.join("\n"));
    check(&run, &[], 3, &["train.jsonl:17"]);
}

#[test]
fn a_row_without_the_required_column_is_named() {
    let run = Run::new();
    let mut rows = fs::read_to_string(run.path().join("train.jsonl")).unwrap();
    rows.push_str("{\"text\": \"no messages here\"}\n");
    run.write("train.jsonl", &rows);
    check(&run, &[], 3, &["train.jsonl:81", "messages"]);
}

#[test]
fn an_empty_dataset_is_refused() {
    let run = Run::new();
    run.write("train.jsonl", "");
    check(&run, &[], 3, &["train.jsonl"]);
}

#[test]
fn text_that_is_not_utf8_is_named() {
    let run = Run::new();
    fs::write(run.path().join("train.jsonl"), b"{\"text\": \"\xff\xfe\"}\n").unwrap();
    check(&run, &[], 3, &["train.jsonl", "UTF-8"]);
}

#[test]
fn rows_beyond_max_length_end_the_run_and_are_named() {
    check(&Run::new(), &["data.max_length=40"], 3, &["train.jsonl:", "truncation"]);
}

#[test]
fn a_missing_tokenizer_is_named() {
    let run = Run::new();
    let folder = run.path().join("no-tokenizer");
    fs::create_dir(&folder).unwrap();
    let key = format!("tokenizer.name_or_path={}", folder.display());
    check(&run, &[&key], 3, &["tokenizer.json", "no-tokenizer"]);
}

#[test]
fn an_unsupported_architecture_is_named_with_the_supported_ones() {
    let run = Run::new();
    run.edit("LlamaForCausalLM", "GPT2LMHeadModel");
    run.edit("model_type: llama", "model_type: gpt2");
    check(&run, &[], 2, &["GPT2LMHeadModel", "LlamaForCausalLM"]);
}

#[test]
fn an_output_folder_that_cannot_be_created_is_an_error_before_the_first_step() {
    let run = Run::new();
    run.write("in-the-way", "a file");
    let key = format!("checkpoint.0.output_dir={}", run.path().join("in-the-way/checkpoints").display());
    check(&run, &[&key], 6, &["in-the-way"]);
}

/// Exports a model by training; returns a run that loads it, and its folder.
fn run_from_checkpoint() -> (Run, std::path::PathBuf) {
    let first = Run::new();
    first.train_ok(&["train_iters=1"]);
    let run = Run::new();
    let model = run.path().join("model");
    fs::rename(first.export_folder(), &model).unwrap();
    let recipe = fs::read_to_string(run.path().join("recipe.yaml")).unwrap();
    let (head, rest) = recipe.split_once("  config:\n").unwrap();
    let (_, tail) = rest.split_once("tokenizer:\n").unwrap();
    run.write("recipe.yaml", &format!("{head}  name_or_path: {}\ntokenizer:\n{tail}", model.display()));
    (run, model)
}

#[test]
fn an_exported_model_can_be_trained_further() {
    let (run, _) = run_from_checkpoint();
    run.train_ok(&["train_iters=2"]);
}

#[test]
fn a_truncated_weight_file_is_refused() {
    let (run, model) = run_from_checkpoint();
    let path = model.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    check(&run, &[], 6, &["model.safetensors"]);
}

#[test]
fn an_absurd_header_length_is_refused() {
    let (run, model) = run_from_checkpoint();
    fs::write(model.join("model.safetensors"), [0xff; 64]).unwrap();
    check_finds(&run, &["model.safetensors", "header"]);
}

/// Checks that `trainer check` fails with the error of the run, which contains `phrases`.
#[track_caller]
fn check_finds(run: &Run, phrases: &[&str]) {
    check(run, &[], 6, phrases);
    let error = |command| {
        let text = stderr(&run.command(command, &[]).output().unwrap());
        let first = text.lines().position(|line| line.starts_with("error")).unwrap_or_else(|| panic!("{text}"));
        text.lines().skip(first).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(error("check"), error("train"));
}

#[test]
fn a_wrong_shape_names_both_shapes() {
    let (run, model) = run_from_checkpoint();
    let path = model.join("config.json");
    let config = fs::read_to_string(&path).unwrap();
    assert!(config.contains("\"intermediate_size\": 64"), "{config}");
    fs::write(&path, config.replace("\"intermediate_size\": 64", "\"intermediate_size\": 48")).unwrap();
    check_finds(&run, &["[64, 32]", "[48, 32]"]);
}

#[test]
fn a_missing_tensor_is_named() {
    let (run, model) = run_from_checkpoint();
    let path = model.join("config.json");
    let config = fs::read_to_string(&path).unwrap();
    fs::write(&path, config.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3")).unwrap();
    check_finds(&run, &["model.layers.2."]);
}

#[test]
fn an_adapter_of_another_rank_is_named() {
    let (run, model) = run_from_checkpoint();
    run.train_ok(&["model.peft_config={r: 4, target_modules: [q_proj]}", "train_iters=1"]);
    let adapter = run.path().join("adapter");
    fs::rename(run.export_folder(), &adapter).unwrap();
    fs::remove_dir_all(run.path().join("run")).unwrap();
    let path = adapter.join("adapter_config.json");
    let config = fs::read_to_string(&path).unwrap();
    assert!(config.contains("\"r\": 4"), "{config}");
    fs::write(&path, config.replace("\"r\": 4", "\"r\": 8")).unwrap();
    let base = format!("  name_or_path: {}\n", model.display());
    run.edit(&base, &format!("{base}  adapter_name_or_path: {}\n", adapter.display()));
    check_finds(&run, &["lora_A", "[4, 32]", "adapter_config.json makes it [8, 32]"]);
}

#[test]
fn weights_that_a_run_does_not_load_are_not_checked() {
    let (run, model) = run_from_checkpoint();
    fs::write(model.join("model.safetensors"), [0xff; 64]).unwrap();
    let check = run.command("check", &["model.type=random-weight-hf"]).output().unwrap();
    assert!(check.status.success(), "{}", stderr(&check));
}

#[test]
fn a_broken_config_is_named() {
    let (run, model) = run_from_checkpoint();
    fs::write(model.join("config.json"), "{\"hidden_size\": ").unwrap();
    check(&run, &[], 2, &["config.json: line 1", "model.name_or_path"]);
}
