//! Adapter folders with tensors besides LoRA factors: embedding layers, and tensors that cannot be applied.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candlewick_model::checkpoint::Checkpoint;
use candlewick_model::{AdapterFolder, Config};

use crate::merging::merge;
use crate::tiny::fixture;

const EMBEDDING: &str = "model.embed_tokens.weight";
const LM_HEAD: &str = "lm_head.weight";

/// Writes the adapter of a fixture with more tensors: a number of rows and the value of all elements.
fn write_adapter(folder: &Path, adapter: &str, tensors: &[(&str, usize, f32)]) {
    let source = fixture(adapter);
    let text = fs::read_to_string(source.join("adapter_config.json")).unwrap();
    fs::write(folder.join("adapter_config.json"), text).unwrap();
    let factors = candle_core::safetensors::load(source.join("adapter_model.safetensors"), &Device::Cpu).unwrap();
    let more = tensors.iter().map(|(name, n_rows, value)| {
        (format!("base_model.model.{name}"), Tensor::full(*value, (*n_rows, 16), &Device::Cpu).unwrap())
    });
    let all: HashMap<String, Tensor> = factors.into_iter().chain(more).collect();
    candle_core::safetensors::save(&all, folder.join("adapter_model.safetensors")).unwrap();
}

/// Returns the value of all elements of a tensor of `n_rows` rows.
fn value_of(checkpoint: &Checkpoint, name: &str, n_rows: usize) -> f32 {
    let tensor = checkpoint.tensor(name, &[n_rows, 16], DType::F32, &Device::Cpu).unwrap();
    let values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert!(values.iter().all(|value| *value == values[0]), "{name}");
    values[0]
}

/// Merges the adapter of a fixture with more tensors, and compares the merged vocabulary size and embedding layers.
#[track_caller]
fn applied(base: &str, adapter: &str, tensors: &[(&str, usize, f32)], n_rows: usize, want: &[(&str, f32)]) {
    let (folder, output) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_adapter(folder.path(), adapter, tensors);
    let merged = output.path().join("merged");
    let report = merge(&merged, &fixture(base), folder.path(), None).unwrap();
    assert_eq!(
        report.dtype,
        Checkpoint::open(&fixture(base)).unwrap().float_dtype().unwrap(),
        "the base model's dtype"
    );
    assert_eq!(Config::read(&merged).unwrap().vocab_size(), n_rows);
    let checkpoint = Checkpoint::open(&merged).unwrap();
    for (name, value) in want {
        assert_eq!(value_of(&checkpoint, name, n_rows), *value, "{name}");
    }
    let is_tied = Config::read(&merged).unwrap().tied();
    assert_eq!(checkpoint.names().any(|name| name == LM_HEAD), !is_tied);
}

#[test]
fn embedding_layers_of_an_adapter_replace_those_of_its_base() {
    let (tied, untied) = (["qwen2", "qwen2-lora"], ["mixtral", "mixtral-lora"]);
    applied(tied[0], tied[1], &[(EMBEDDING, 40, 0.5)], 40, &[(EMBEDDING, 0.5)]);
    applied(tied[0], tied[1], &[(EMBEDDING, 40, 0.5), (LM_HEAD, 40, 0.5)], 40, &[(EMBEDDING, 0.5)]);
    applied(tied[0], tied[1], &[(LM_HEAD, 40, 0.5)], 40, &[(EMBEDDING, 0.5)]);
    applied(tied[0], tied[1], &[(EMBEDDING, 43, 0.5)], 43, &[(EMBEDDING, 0.5)]);
    applied(tied[0], tied[1], &[(EMBEDDING, 38, 0.5)], 38, &[(EMBEDDING, 0.5)]);
    applied(tied[0], tied[1], &[(LM_HEAD, 38, 0.5)], 38, &[(EMBEDDING, 0.5)]);
    applied(untied[0], untied[1], &[(EMBEDDING, 40, 0.5)], 40, &[(EMBEDDING, 0.5)]);
    applied(untied[0], untied[1], &[(LM_HEAD, 40, 0.25)], 40, &[(LM_HEAD, 0.25)]);
    let both = [(EMBEDDING, 41, 0.5), (LM_HEAD, 41, 0.25)];
    applied(untied[0], untied[1], &both, 41, &[(EMBEDDING, 0.5), (LM_HEAD, 0.25)]);
    let fewer = [(EMBEDDING, 38, 0.5), (LM_HEAD, 38, 0.25)];
    applied(untied[0], untied[1], &fewer, 38, &[(EMBEDDING, 0.5), (LM_HEAD, 0.25)]);
}

#[track_caller]
fn refused(base: &str, adapter: &str, tensors: &[(&str, usize, f32)], parts: &[&str]) {
    let (folder, output) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_adapter(folder.path(), adapter, tensors);
    let message = merge(&output.path().join("merged"), &fixture(base), folder.path(), None).unwrap_err().to_string();
    for part in parts.iter().chain(&[folder.path().to_str().unwrap()]) {
        assert!(message.contains(part), "`{message}` lacks `{part}`");
    }
}

#[test]
fn a_tensor_of_an_adapter_that_is_not_applied_is_refused_by_name() {
    let norm = "model.norms.weight";
    refused("qwen2", "qwen2-lora", &[(norm, 1, 1.0)], &["1 tensor is no LoRA factor", norm, "merge_and_unload"]);
    let narrow = "model.layers.0.self_attn.v_proj.weight";
    refused("qwen2", "qwen2-lora", &[(narrow, 3, 1.0)], &[narrow, "[3, 16]", "the base model has [8, 16]"]);
    let factor = "model.layers.0.self_attn.q_proj.lora_A.weight";
    refused("qwen2", "qwen2-lora", &[(factor, 3, 1.0)], &["1 tensor is no LoRA factor of this model", factor]);
    let vector = "model.layers.1.self_attn.q_proj.lora_magnitude_vector";
    refused("qwen2", "qwen2-lora", &[(vector, 1, 1.0), (norm, 1, 1.0)], &["2 tensors are no LoRA", vector, norm]);
}

#[test]
fn embedding_layers_that_do_not_fit_are_refused() {
    let rows = "the base model has [40, 16]; only the number of rows may differ";
    refused("qwen2", "qwen2-lora", &[(EMBEDDING, 0, 1.0)], &[EMBEDDING, "[0, 16]", rows]);
    refused("mixtral", "mixtral-lora", &[(LM_HEAD, 39, 1.0)], &[LM_HEAD, "39 rows", "with 40"]);
    refused(
        "mixtral",
        "mixtral-lora",
        &[(EMBEDDING, 41, 1.0)],
        &[EMBEDDING, "41 rows", "with 40", "save_embedding_layers"],
    );
    let both = [(EMBEDDING, 41, 1.0), (LM_HEAD, 42, 1.0)];
    refused("mixtral", "mixtral-lora", &both, &[LM_HEAD, "[42, 16]", "the other embedding layer has [41, 16]"]);
    let differ = [(EMBEDDING, 40, 1.0), (LM_HEAD, 40, 2.0)];
    let (folder, output) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_adapter(folder.path(), "qwen2-lora", &differ);
    let error = merge(&output.path().join("merged"), &fixture("qwen2"), folder.path(), None).unwrap_err().to_string();
    assert!(error.contains("`lm_head.weight` differs from `model.embed_tokens.weight`"), "{error}");
}

#[test]
fn training_from_an_adapter_with_embedding_layers_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    write_adapter(folder.path(), "qwen2-lora", &[(EMBEDDING, 40, 1.0)]);
    let error = AdapterFolder::open(folder.path()).unwrap().check_trainable().unwrap_err().to_string();
    for part in [EMBEDDING, "trainer merge", folder.path().to_str().unwrap()] {
        assert!(error.contains(part), "`{error}` lacks `{part}`");
    }
    AdapterFolder::open(&fixture("qwen2-lora")).unwrap().check_trainable().unwrap();
}

/// Writes the weights of a fixture with other embedding layers.
fn write_base(folder: &Path, base: &str, change: impl Fn(&mut HashMap<String, Tensor>)) {
    let source = fixture(base);
    fs::copy(source.join("config.json"), folder.join("config.json")).unwrap();
    let mut tensors = candle_core::safetensors::load(source.join("model.safetensors"), &Device::Cpu).unwrap();
    change(&mut tensors);
    candle_core::safetensors::save(&tensors, folder.join("model.safetensors")).unwrap();
}

/// Merges an adapter into changed weights of a fixture.
fn merged(base: &str, adapter: &str, change: impl Fn(&mut HashMap<String, Tensor>)) -> Result<Vec<u8>, String> {
    let folder = tempfile::tempdir().unwrap();
    write_base(folder.path(), base, change);
    let output = folder.path().join("merged");
    merge(&output, folder.path(), &fixture(adapter), Some(DType::F32)).map_err(|error| error.to_string())?;
    let name = fs::read_dir(&output).unwrap().map(|entry| entry.unwrap().path());
    let mut shards: Vec<_> = name.filter(|path| path.extension().is_some_and(|end| end == "safetensors")).collect();
    shards.sort();
    Ok(shards.into_iter().flat_map(|path| fs::read(path).unwrap()).collect())
}

#[test]
fn of_tied_embeddings_either_tensor_may_be_stored_and_both_must_be_equal() {
    let merged = |change: &dyn Fn(&mut HashMap<String, Tensor>)| merged("qwen2", "qwen2-lora", change);
    let plain = merged(&|_| ()).unwrap();
    let copied = |tensors: &mut HashMap<String, Tensor>| {
        tensors.insert(LM_HEAD.to_owned(), tensors[EMBEDDING].clone());
    };
    assert_eq!(merged(&copied).unwrap(), plain, "an equal copy");
    let widened = |tensors: &mut HashMap<String, Tensor>| {
        tensors.insert(LM_HEAD.to_owned(), tensors[EMBEDDING].to_dtype(DType::F32).unwrap());
    };
    assert_eq!(merged(&widened).unwrap(), plain, "an equal copy in another dtype");
    let moved = |tensors: &mut HashMap<String, Tensor>| {
        let embedding = tensors.remove(EMBEDDING).unwrap();
        tensors.insert(LM_HEAD.to_owned(), embedding);
    };
    assert_eq!(merged(&moved).unwrap(), plain, "transformers loads the output layer as the embedding");
    let error = merged(&|tensors| {
        tensors.insert(LM_HEAD.to_owned(), (tensors[EMBEDDING].clone() * 2.0).unwrap());
    });
    let error = error.unwrap_err();
    for part in ["`lm_head.weight` differs from `model.embed_tokens.weight`", "tie_word_embeddings to false"] {
        assert!(error.contains(part), "{error}");
    }
    let error = merged(&|tensors| {
        tensors.insert(LM_HEAD.to_owned(), Tensor::zeros((41, 16), DType::F32, &Device::Cpu).unwrap());
    });
    assert!(error.unwrap_err().contains("differs"));
}

#[test]
fn an_embedding_that_is_not_tied_must_be_stored() {
    let error = merged("mixtral", "mixtral-lora", |tensors| drop(tensors.remove(EMBEDDING))).unwrap_err();
    assert!(error.contains("1 tensor is missing: model.embed_tokens.weight"), "{error}");
    let error = merged("mixtral", "mixtral-lora", |tensors| drop(tensors.remove(LM_HEAD))).unwrap_err();
    assert!(error.contains("1 tensor is missing: lm_head.weight"), "{error}");
}
