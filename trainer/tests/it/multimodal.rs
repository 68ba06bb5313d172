//! Training of a multimodal model's text: the vision tower goes from the base model to every export, byte for byte.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use candlewick_model::checkpoint::{HeaderEntry, encode_header};
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

use crate::support::{Run, stderr};

/// Name and contents of the only tensor of the vision tower.
const TOWER: (&str, [u8; 12]) = ("vision_tower.patch_conv.weight", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 255]);

/// Returns dtype, shape and bytes of the tensors in all files of a folder.
fn tensors(folder: &Path) -> BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut found = BTreeMap::new();
    for path in paths.filter(|path| path.extension().is_some_and(|end| end == "safetensors")) {
        let bytes = fs::read(path).unwrap();
        for (name, tensor) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            found.insert(name, (tensor.dtype(), tensor.shape().to_vec(), tensor.data().to_vec()));
        }
    }
    found
}

/// Writes a Mistral 3 model whose text is the exported Mistral model in `text`.
fn write_model(text: &Path, folder: &Path, tower: &[u8]) {
    fs::create_dir_all(folder).unwrap();
    let mut tensors = tensors(text);
    tensors = tensors.into_iter().map(|(name, tensor)| (format!("language_model.{name}"), tensor)).collect();
    tensors.insert(TOWER.0.to_owned(), (Dtype::BF16, vec![2, 3], tower.to_vec()));
    let entry = |(name, (dtype, shape, _)): (&String, &(Dtype, Vec<usize>, Vec<u8>))| HeaderEntry {
        name: name.clone(),
        dtype: *dtype,
        shape: shape.clone(),
    };
    let mut bytes = encode_header(&[], tensors.iter().map(entry));
    tensors.values().for_each(|(_, _, data)| bytes.extend(data));
    fs::write(folder.join("model.safetensors"), bytes).unwrap();
    let mut config: Value = serde_json::from_slice(&fs::read(text.join("config.json")).unwrap()).unwrap();
    config.as_object_mut().unwrap().remove("architectures");
    let dtype = config["torch_dtype"].take();
    let whole = json!({
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": config,
        "torch_dtype": dtype, "tie_word_embeddings": true, "vision_config": {"model_type": "pixtral"},
    });
    fs::write(folder.join("config.json"), whole.to_string()).unwrap();
    fs::write(folder.join("preprocessor_config.json"), "{}").unwrap();
}

/// Returns a run of a multimodal model, and its folder.
fn run() -> (Run, PathBuf) {
    let run = Run::new();
    run.edit("LlamaForCausalLM", "MistralForCausalLM");
    run.edit("model_type: llama", "model_type: mistral");
    run.train_ok(&["train_iters=1", "checkpoint=[{type: huggingface, output_dir: text, save_end_of_training: true}]"]);
    let folder = run.path().join("multimodal");
    write_model(&run.path().join("text/global_step_1"), &folder, &TOWER.1);
    let path = run.path().join("recipe.yaml");
    let recipe = fs::read_to_string(&path).unwrap();
    let (before, rest) = recipe.split_once("  config:\n").unwrap();
    let (_, after) = rest.split_once("tokenizer:\n").unwrap();
    fs::write(path, format!("{before}  name_or_path: multimodal\ntokenizer:\n{after}")).unwrap();
    fs::remove_dir_all(run.path().join("run")).unwrap();
    (run, folder)
}

#[track_caller]
fn check_export(export: &Path, source: &Path) {
    let (before, after) = (tensors(source), tensors(export));
    assert_eq!(after.keys().collect::<Vec<_>>(), before.keys().collect::<Vec<_>>());
    assert_eq!(after[TOWER.0], before[TOWER.0]);
    assert_ne!(after["language_model.model.norm.weight"], before["language_model.model.norm.weight"]);
    let config =
        |folder: &Path| -> Value { serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap() };
    let (before, after) = (config(source), config(export));
    assert_eq!((&after["vision_config"], &after["model_type"]), (&before["vision_config"], &before["model_type"]));
    assert_eq!(after["text_config"]["hidden_size"], 32);
}

#[test]
fn exports_of_a_run_and_of_its_checkpoint_have_the_vision_tower() {
    let (run, folder) = run();
    run.train_ok(&["train_iters=5", "checkpoint.0.output_dir=run/checkpoints"]);
    let export = run.export_folder();
    check_export(&export, &folder);
    let sharded = run.path().join("run/checkpoints/epoch_0_global_step_5");
    let mut command = Command::new(env!("CARGO_BIN_EXE_trainer"));
    command
        .args(["export", sharded.to_str().unwrap(), "--output", "exported"])
        .current_dir(run.path())
        .env("HF_HUB_OFFLINE", "1");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    check_export(&run.path().join("exported"), &folder);
    assert!(tensors(&run.path().join("exported")) == tensors(&export), "both exports are equal");
}

#[test]
fn a_run_whose_vision_tower_was_replaced_does_not_resume() {
    let (run, folder) = run();
    run.train_ok(&["train_iters=5"]);
    write_model(&run.path().join("text/global_step_1"), &folder, &[7; 12]);
    let output = run.train(&["train_iters=7"]);
    assert!(!output.status.success());
    assert!(stderr(&output).contains("frozen weights"), "{}", stderr(&output));
}

#[test]
fn a_multimodal_model_is_not_initialized_randomly() {
    let (run, _) = run();
    let output = run.train(&["model.hf_config_kwargs={num_hidden_layers: 1}"]);
    assert!(!output.status.success());
    for part in ["Mistral 3", "initialized randomly", "vision tower"] {
        assert!(stderr(&output).contains(part), "no {part:?} in {}", stderr(&output));
    }
}
