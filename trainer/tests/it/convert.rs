//! Conversion of files of axolotl, torchtune, LLaMA-Factory and picotron: every value of the recipe, and the report.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use trainer::convert::{Conversion, FindingKind, ForeignFormat, convert};
use trainer::recipe::{RecipeError, RecipeLocation};

const FILES: [(&str, ForeignFormat); 8] = [
    ("axolotl_qlora.yml", ForeignFormat::Axolotl),
    ("axolotl_full.yml", ForeignFormat::Axolotl),
    ("axolotl_text.yml", ForeignFormat::Axolotl),
    ("torchtune_lora.yaml", ForeignFormat::Torchtune),
    ("torchtune_full.yaml", ForeignFormat::Torchtune),
    ("llama_factory_lora.yaml", ForeignFormat::LlamaFactory),
    ("llama_factory_pretrain.yaml", ForeignFormat::LlamaFactory),
    ("picotron.json", ForeignFormat::Picotron),
];

/// The folder of the files, from the folder of the crate.
fn folder() -> PathBuf {
    PathBuf::from("tests/fixtures/convert")
}

fn convert_file(name: &str) -> Conversion {
    let path = folder().join(name);
    let text = std::fs::read_to_string(&path).unwrap();
    convert(&path, text, None).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn convert_text(text: &str, from: Option<ForeignFormat>) -> Result<Conversion, RecipeError> {
    convert(Path::new("file.yaml"), text.to_owned(), from)
}

fn recipe(conversion: &Conversion) -> Value {
    serde_saphyr::from_str(&conversion.recipe).unwrap()
}

#[test]
fn files_give_the_values_that_they_have_in_their_toolkits() {
    for (name, format) in FILES {
        let conversion = convert_file(name);
        assert_eq!(conversion.format, format, "{name}");
        let expected = folder().join("expected").join(name).with_extension("json");
        let expected: Value = serde_json::from_slice(&std::fs::read(expected).unwrap()).unwrap();
        same(name, &recipe(&conversion), &expected["recipe"]);
        assert_eq!(json!(conversion.n_ranks), expected["ranks"], "{name}");
        let keys = |kind| conversion.report.of(kind);
        let changed: Value = keys(FindingKind::Changed).map(|finding| json!(finding.key)).collect();
        assert_eq!(changed, expected["changed"], "{name}");
        let lost: Value = keys(FindingKind::NoCounterpart).map(|finding| json!([finding.key, finding.line])).collect();
        assert_eq!(lost, expected["no_counterpart"], "{name}");
    }
}

/// Compares values key by key. Numbers are equal if they are the same number.
#[track_caller]
fn same(at: &str, found: &Value, want: &Value) {
    match (found, want) {
        (Value::Object(found), Value::Object(want)) => {
            let keys = |map: &serde_json::Map<String, Value>| {
                let mut keys: Vec<String> = map.keys().cloned().collect();
                keys.sort();
                keys
            };
            assert_eq!(keys(found), keys(want), "{at}");
            want.iter().for_each(|(key, want)| same(&format!("{at}: {key}"), &found[key], want));
        }
        (Value::Array(found), Value::Array(want)) => {
            assert_eq!(found.len(), want.len(), "{at}");
            found.iter().zip(want).for_each(|(found, want)| same(at, found, want));
        }
        (Value::Number(_), Value::Number(_)) => assert_eq!(found.as_f64(), want.as_f64(), "{at}"),
        _ => assert_eq!(found, want, "{at}"),
    }
}

/// Every key of a file is in a list of the report, with its line.
#[test]
fn no_key_is_lost() {
    for (name, _) in FILES {
        let conversion = convert_file(name);
        let text = std::fs::read_to_string(folder().join(name)).unwrap();
        let lines = text.lines().enumerate().map(|(idx, line)| (idx + 1, line));
        let set = lines.filter(|(_, line)| {
            let value = line.split_once(": ").map_or("", |(_, value)| value.trim().trim_end_matches(','));
            let is_set = !["", "null", "{", "["].contains(&value);
            is_set && !line.trim_start().starts_with(['#', '-'])
        });
        let mut n_keys = 0;
        for (line, text) in set {
            let key = text.split(':').next().unwrap_or_default().trim().trim_matches('"');
            let has = conversion.report.findings.iter().any(|finding| {
                // A section that one rule reads has one finding.
                let inside = finding.value.is_object() && finding.line.is_some_and(|start| start < line);
                finding.line == Some(line)
                    || (inside && finding.value.get(key).is_some())
                    || (finding.value.is_array() && finding.line.is_some_and(|start| start < line))
            });
            assert!(has, "{name}:{line}: {text}");
            n_keys += 1;
        }
        assert!(n_keys >= 6, "{name}: {n_keys} keys");
    }
}

#[test]
fn lines_of_changed_keys_and_defaults_have_comments() {
    let recipe = convert_file("axolotl_text.yml").recipe;
    assert!(recipe.contains("# Changed from `deepspeed` (line "), "{recipe}");
    assert!(recipe.contains("  # Default of axolotl (`sequence_len`).\n  max_length: 512\n"), "{recipe}");
    assert!(!recipe.contains("`base_model`"), "{recipe}");
}

#[test]
fn a_credential_is_neither_in_the_recipe_nor_in_the_report() {
    for name in ["picotron.json", "llama_factory_lora.yaml"] {
        let conversion = convert_file(name);
        let report = conversion.report.text() + &conversion.report.json().to_string();
        assert!(!report.contains("hf_secret") && !conversion.recipe.contains("hf_secret"), "{name}");
    }
}

#[track_caller]
fn refused(text: &str, line: usize, parts: &[&str]) {
    let error = convert_text(text, None).unwrap_err();
    let lines: Vec<Option<usize>> = error
        .faults()
        .iter()
        .map(|fault| match fault.location {
            Some(RecipeLocation::File { line, .. }) => Some(line),
            _ => None,
        })
        .collect();
    assert!(lines.contains(&Some(line)), "{lines:?}: {error}");
    let message = error.to_string();
    assert!(parts.iter().all(|part| message.contains(part)), "{message}");
}

const AXOLOTL: &str = "base_model: a/b\ndatasets:\n  - path: chats.jsonl\n    type: chat_template\n";

#[test]
fn a_wrong_value_is_an_error_at_its_line_in_the_converted_file() {
    let with = |lines: &str| format!("{AXOLOTL}{lines}");
    refused(&with("micro_batch_size: many\n"), 5, &["file.yaml:5", "micro_batch_size", "whole number", "many"]);
    refused(&with("learning_rate: -1\n"), 5, &["file.yaml:5", "learning_rate: in the recipe", "above 0"]);
    refused(&with("rl: dpo\n"), 5, &["file.yaml:5", "preference training"]);
    refused(&with("adapter: ia3\n"), 5, &["LoRA is the only adapter"]);
    refused(&with("sequence_len: 1\n"), 5, &["at least 2"]);
    refused(&with("context_parallel_size: 2\neager_attention: true\n"), 6, &["reference attention"]);
    refused(&with("adapter: lora\nlora_r: 0\n"), 6, &["lora_r: in the recipe", "peft_config"]);
    refused(
        "base_model: a\ndatasets:\n  - path: a\n    type: completion\n  - path: b\n    type: alpaca\n",
        2,
        &["not both"],
    );
    refused("stage: dpo\nmodel_name_or_path: a/b\ndataset: a/b\n", 1, &["stages are sft and pt"]);
    refused("base_model: [\n", 1, &["file.yaml:1", "unclosed"]);
}

#[test]
fn a_template_by_name_is_the_built_in_one_that_prints_the_same_text() {
    let llama_factory = |name: &str| format!("stage: sft\nmodel_name_or_path: a/b\ndataset: a/b\ntemplate: {name}\n");
    let torchtune = |name: &str| {
        let file = std::fs::read_to_string(folder().join("torchtune_lora.yaml")).unwrap();
        file.replacen("tokenizer:\n", &format!("tokenizer:\n  prompt_template: {name}\n"), 1)
    };
    for (text, want) in [
        (format!("{AXOLOTL}chat_template: chatml\n"), json!("chatml")),
        (format!("{AXOLOTL}chat_template: qwen_25\n"), json!("qwen2.5")),
        (format!("{AXOLOTL}chat_template: gemma3n\n"), json!("gemma")),
        (format!("{AXOLOTL}chat_template: mistral_v2v3\n"), json!("mistral")),
        (format!("{AXOLOTL}chat_template: mistral_v7_tekken\n"), Value::Null),
        (format!("{AXOLOTL}chat_template: alpaca\n"), Value::Null),
        (format!("{AXOLOTL}chat_template: tokenizer_default_fallback_chatml\n"), Value::Null),
        (format!("{AXOLOTL}chat_template: jamba\n"), Value::Null),
        (llama_factory("gemma2"), json!("gemma")),
        (llama_factory("mistral"), json!("mistral")),
        (llama_factory("qwen3"), json!("qwen3")),
        (llama_factory("alpaca"), json!("alpaca")),
        (llama_factory("vicuna"), Value::Null),
        (torchtune("torchtune.data.ChatMLTemplate"), json!("chatml")),
        (torchtune("torchtune.data.MistralChatTemplate"), Value::Null),
    ] {
        let conversion = convert_text(&text, None).unwrap();
        assert_eq!(recipe(&conversion)["tokenizer"]["chat_template"], want, "{text}");
        let is_reported = conversion.report.of(FindingKind::Changed).any(|found| found.key.ends_with("template"));
        let has_other_text = ["mistral", "qwen3", "alpaca"].iter().any(|name| want == *name);
        assert_eq!(is_reported, want.is_null() || has_other_text, "{text}");
    }
}

/// The default's value in the other toolkit may differ from the recipe's: `train_on_input: true` is `mask_inputs: false`.
#[test]
fn the_report_of_a_default_has_the_value_of_the_recipe_alone() {
    let report = convert_file("torchtune_lora.yaml").report;
    let defaults: Vec<_> = report.findings.iter().filter(|finding| finding.line.is_none()).collect();
    assert!(!defaults.is_empty() && defaults.iter().all(|finding| finding.value.is_null()), "{defaults:?}");
    let text = report.text();
    assert!(text.contains("  default   (long rows are truncated)  ->  data.truncation: truncate\n"), "{text}");
}

#[test]
fn a_file_of_no_known_format_is_refused_unless_the_format_is_given() {
    refused("a: 1\n", 1, &["no known format", "--from"]);
    refused("model: {name_or_path: a}\ndata: {sources: [b]}\n", 1, &["a recipe already"]);
    let conversion =
        convert_text("base_model: a/b\ndatasets: [{path: c.jsonl}]\n", Some(ForeignFormat::Axolotl)).unwrap();
    assert_eq!(recipe(&conversion)["model"]["name_or_path"], "a/b");
}

/// Numbers and booleans in the forms of Python's YAML.
#[test]
fn values_in_the_forms_of_pythons_yaml_are_read() {
    let text = format!("{AXOLOTL}learning_rate: \"1e-5\"\nsample_packing: yes\nbf16: no\n");
    let recipe = recipe(&convert_text(&text, None).unwrap());
    assert_eq!(recipe["optimizer"]["learning_rate"], 1e-5);
    assert_eq!(recipe["data"]["pack_samples"], true);
    assert_eq!(recipe["model"]["dtype"], "f32");
}

#[test]
fn early_stopping_streams_and_mixtures_of_llama_factory_are_those_of_a_recipe() {
    let head = "model_name_or_path: a/b\nstage: sft\ndo_train: true\nfinetuning_type: full\ndataset_dir: ONLINE\n";
    let mixed = "dataset: c/d,e/f\nmix_strategy: interleave_over\ninterleave_probs: 0.75,0.25\nmask_history: true\nearly_stopping_steps: 4\nval_size: 0.1\n";
    let found = recipe(&convert_text(&format!("{head}{mixed}"), None).unwrap());
    assert_eq!(found["data"]["stopping_strategy"], "all_exhausted");
    assert_eq!(found["data"]["masking_strategy"], "train_on_last");
    assert_eq!(found["data"]["sources"][0]["weight"], 0.75);
    assert_eq!(found["data"]["sources"][1]["weight"], 0.25);
    assert_eq!(found["early_stopping"]["patience"], 4);
    let error = convert_text(&format!("{head}{}", mixed.replace("0.75,0.25", "0.75")), None).unwrap_err().to_string();
    assert!(error.contains("a number for each data set"), "{error}");
    let stream = "dataset: c/d\nstreaming: true\n";
    let limited = convert_text(&format!("{head}{stream}max_steps: 9\n"), None).unwrap();
    assert_eq!(recipe(&limited)["data"]["streaming"], true);
    let unlimited = convert_text(&format!("{head}{stream}"), None).unwrap();
    assert!(unlimited.report.of(FindingKind::NoCounterpart).any(|finding| finding.key == "streaming"));
}

#[test]
fn the_balancing_loss_of_llama_factory_is_that_of_transformers() {
    let text = "model_name_or_path: a/b\nstage: sft\ndo_train: true\nfinetuning_type: full\ndataset_dir: ONLINE\n\
                dataset: c/d\nmoe_aux_loss_coef: 0.01\n";
    let moe = &recipe(&convert_text(text, None).unwrap())["moe"];
    assert_eq!(moe, &json!({"router_load_balancing_type": "transformers_aux_loss", "aux_loss_coeff": 0.01}));
}

#[test]
fn settings_of_the_loss_keep_their_values() {
    let axolotl = |sets: &str| {
        let text = format!("base_model: a/b\nmicro_batch_size: 1\nloss_watchdog_threshold: 5.0\ndatasets:\n{sets}");
        convert_text(&text, Some(ForeignFormat::Axolotl)).unwrap()
    };
    let set = |name: &str, roles: &str| {
        format!("  - {{path: {name}, type: chat_template, roles_to_train: {roles}, train_on_eos: all}}\n")
    };
    let both = set("c/d", "[gpt, human]") + &set("e/f", "[gpt, human]");
    let found = recipe(&axolotl(&both));
    assert_eq!(found["data"]["roles_to_train"], json!(["assistant", "user"]));
    assert_eq!(found["data"]["train_on_eos"], "all");
    assert_eq!(found["loss_watchdog"], json!({"max_loss": 5.0, "action": "stop"}));
    let unequal = axolotl(&(set("c/d", "[gpt, human]") + &set("e/f", "[assistant]")));
    assert_eq!(recipe(&unequal)["data"].get("roles_to_train"), None);
    assert!(unequal.report.of(FindingKind::NoCounterpart).any(|finding| finding.key.ends_with("roles_to_train")));
    let torchtune = "model: {_component_: torchtune.models.qwen2_5.qwen2_5_0_5b}\ncheckpointer: {checkpoint_dir: /tmp/a}\n\
        dataset: {_component_: torchtune.datasets.chat_dataset, source: a/b, conversation_column: messages, \
        conversation_style: openai, masking_strategy: train_on_last}\nbatch_size: 1\n";
    let found = recipe(&convert_text(torchtune, Some(ForeignFormat::Torchtune)).unwrap());
    assert_eq!(found["data"]["masking_strategy"], "train_on_last");
    assert_eq!(found["data"].get("mask_inputs"), None);
}

#[test]
fn fractions_of_epochs_and_of_the_run_are_kept() {
    let converted = |lines: &str| {
        let conversion = convert_text(&format!("{AXOLOTL}val_set_size: 0.1\n{lines}"), None).unwrap();
        assert_eq!(
            conversion.report.of(FindingKind::Changed).filter(|it| lines.contains(&it.key)).count(),
            0,
            "{lines}"
        );
        recipe(&conversion)
    };
    let found = converted("num_epochs: 0.5\nevals_per_epoch: 4\nsaves_per_epoch: 2\n");
    assert_eq!((&found["epochs"], &found["evals_per_epoch"]), (&json!(0.5), &json!(4)));
    assert_eq!(found["checkpoint"][0]["saves_per_epoch"], 2);
    let found = converted("num_epochs: 2\neval_steps: 0.25\nsave_steps: 0.5\n");
    assert_eq!((&found["epochs"], &found["eval_interval"]), (&json!(2), &json!(0.25)));
    assert_eq!(found["checkpoint"][0]["save_every_n_steps"], 0.5);
}

#[test]
fn missing_features_have_the_words_of_their_table() {
    for (line, part) in [
        ("peft_use_dora: true", "DoRA: not supported; use LoRA"),
        ("lora_modules_to_save: [lm_head]", "(`modules_to_save`): not supported"),
        ("neftune_noise_alpha: 5", "NEFTune (noise on embeddings): not supported"),
        ("tokens: [a]", "new tokens and resized embeddings: not supported"),
        ("special_tokens: {bos_token: a}", "new tokens and resized embeddings: not supported"),
        ("unfrozen_parameters: [a]", "freezing by name: not supported"),
    ] {
        let report = convert_text(&format!("{AXOLOTL}{line}\n"), None).unwrap().report;
        let mut notes = report.of(FindingKind::NoCounterpart).map(|finding| finding.note.clone());
        assert!(notes.any(|note| note.contains(part)), "{line}: {}", report.text());
    }
}

#[test]
fn eval_steps_have_an_effect_with_the_strategy_of_steps_alone() {
    let check = |lines: &str, want: Value| {
        let conversion = convert_text(&format!("{AXOLOTL}val_set_size: 0.1\n{lines}"), None).unwrap();
        assert_eq!(recipe(&conversion)["eval_interval"], want, "{lines}");
    };
    check("eval_steps: 20\n", json!(20));
    check("eval_strategy: steps\neval_steps: 0.5\n", json!(0.5));
    check("eval_strategy: epoch\neval_steps: 20\n", Value::Null);
    check("evaluation_strategy: epoch\neval_steps: 0.5\n", Value::Null);
    check("eval_strategy: \"no\"\neval_steps: 20\n", Value::Null);
}

#[test]
fn early_stopping_that_cannot_end_the_run_is_reported() {
    let note = |lines: &str| {
        let text = format!("{AXOLOTL}val_set_size: 0.1\nearly_stopping_patience: 3\n{lines}");
        let conversion = convert_text(&text, None).unwrap();
        assert_eq!(recipe(&conversion)["early_stopping"]["patience"], 3);
        let changed: Vec<String> = conversion.report.of(FindingKind::Changed).map(|it| it.note.clone()).collect();
        changed.into_iter().find(|note| note.contains("cannot end it"))
    };
    assert_eq!(
        note("num_epochs: 1\n").unwrap(),
        "the run has 1 evaluation, so this cannot end it; set evals_per_epoch"
    );
    assert!(note("num_epochs: 1\nevals_per_epoch: 4\n").is_some());
    assert!(note("num_epochs: 4\neval_steps: 0.25\n").is_some());
    assert!(note("num_epochs: 4\neval_strategy: epoch\neval_steps: 10\n").is_some());
    assert_eq!(note("num_epochs: 4\neval_on_start: true\n"), None);
    for able in ["num_epochs: 5\n", "num_epochs: 1\nevals_per_epoch: 5\n", "num_epochs: 1\neval_steps: 10\n"] {
        assert_eq!(note(able), None, "{able}");
    }
}

#[test]
fn two_keys_with_different_values_for_one_setting_are_refused() {
    let text = format!("{AXOLOTL}dataset_processes: 2\ndataset_num_proc: 3\n");
    refused(&text, 6, &["dataset_num_proc and dataset_processes", "data.num_proc"]);
}

/// Runs `trainer convert` in a folder. Returns the exit code, stdout and stderr.
fn run(folder: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_trainer"));
    command.arg("convert").args(arguments).current_dir(folder).env("HF_HUB_OFFLINE", "1").env_remove("RUST_BACKTRACE");
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn the_command_writes_a_recipe_that_checks_and_overwrites_nothing() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("a.yml"), format!("{AXOLOTL}my_key: 1\n")).unwrap();
    let (code, recipe, report) = run(folder.path(), &["a.yml"]);
    assert_eq!(code, Some(0), "{report}");
    assert!(
        recipe.contains("name_or_path: a/b") && report.contains("No counterpart (1)\n  line 5    my_key: 1"),
        "{report}"
    );
    let (code, report, _) = run(folder.path(), &["a.yml", "-o", "r.yaml"]);
    assert!(code == Some(0) && report.contains("next: trainer check r.yaml"), "{report}");
    assert_eq!(std::fs::read_to_string(folder.path().join("r.yaml")).unwrap(), recipe);
    let (code, _, error) = run(folder.path(), &["a.yml", "-o", "r.yaml"]);
    assert!(code == Some(2) && error.contains("the file exists"), "{error}");
    let (code, report, _) = run(folder.path(), &["a.yml", "--from", "axolotl", "--json"]);
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!((code, &report["format"], &report["recipe"]), (Some(0), &json!("axolotl"), &json!(recipe)));
    assert_eq!(
        (&report["no_counterpart"][0]["key"], &report["no_counterpart"][0]["line"]),
        (&json!("my_key"), &json!(5))
    );
    let (code, _, error) = run(folder.path(), &["missing.yml"]);
    assert!(code == Some(2) && error.contains("failed to read missing.yml"), "{error}");
    let (code, _, error) = run(folder.path(), &["a.yml", "--from", "picotron"]);
    assert!(code == Some(2) && error.contains("model.name_or_path"), "{error}");
}

/// axolotl gives its embeddings no weight decay, and its groups come after them.
#[test]
fn learning_rates_of_groups_become_optimizer_groups() {
    let groups = |keys: &str| {
        let text = format!("base_model: a/b\ndatasets: [{{path: a.jsonl, type: chat_template}}]\n{keys}\n");
        recipe(&convert_text(&text, Some(ForeignFormat::Axolotl)).unwrap())["optimizer"]["groups"].clone()
    };
    let embeddings = json!({"name": "embeddings", "pattern": "embed_tokens|lm_head", "weight_decay": 0});
    let with = |key: &str, value: f64| {
        let mut group = embeddings.clone();
        group[key] = json!(value);
        group
    };
    same("embedding_lr", &groups("embedding_lr: 1e-5"), &json!([with("learning_rate", 1e-5)]));
    same("embedding_lr_scale", &groups("embedding_lr_scale: 0.5"), &json!([with("learning_rate_factor", 0.5)]));
    let both = "embedding_lr: 1e-5\nlr_groups: [{name: o, modules: [self_attn.o_proj, q_proj], lr: 1e-6}]";
    let attention = json!({"name": "o", "pattern": r"self_attn\.o_proj|q_proj", "learning_rate": 1e-6});
    same("both", &groups(both), &json!([with("learning_rate", 1e-5), attention]));
    let lora_b = json!([{"name": "lora_B", "pattern": "lora_B", "learning_rate_factor": 16}]);
    same("loraplus_lr_ratio", &groups("loraplus_lr_ratio: 16"), &lora_b);
    let refused = "base_model: a/b\ndatasets: [{path: a.jsonl, type: chat_template}]\nlr_groups: [{modules: 3}]\n";
    assert!(
        convert_text(refused, Some(ForeignFormat::Axolotl)).unwrap_err().to_string().contains("lr_groups: expected")
    );
}

/// The rows of a step are those of the file, also where packed rows become micro-batches.
#[test]
fn a_batch_size_that_is_found_by_memory_is_an_automatic_one() {
    for packing in ["false", "true"] {
        let text = format!(
            "{AXOLOTL}micro_batch_size: 4\ngradient_accumulation_steps: 3\nsample_packing: {packing}\nauto_find_batch_size: true\n"
        );
        let conversion = convert_text(&text, None).unwrap();
        for line in ["micro_batch_size: auto", "gradient_accumulation_steps: 12"] {
            assert!(conversion.recipe.lines().any(|found| found == line), "{}", conversion.recipe);
        }
        let off = convert_text(&text.replace("size: true", "size: false"), None).unwrap();
        assert!(!off.recipe.contains("auto"), "{}", off.recipe);
    }
}
