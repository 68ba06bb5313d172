//! Multimodal checkpoints: their text is a text model, and exports carry the other tensors byte for byte.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use candlewick_model::checkpoint::{AuxiliaryFiles, CarriedTensors, Checkpoint, CheckpointExport, ExpertTensors};
use candlewick_model::{AdapterFolder, Config, LoraConfig, MergedModel, Model, ModelError, ParamSpec};
use safetensors::SafeTensors;
use serde_json::Value;

use crate::merging::merge;
use crate::tiny::{Reference, Tiny, assert_close, fixture};

const FIXTURES: [&str; 4] = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "mistral3"];

/// Names with dtype, shape and bytes of the tensors in all files of a folder.
fn tensors(folder: &Path) -> BTreeMap<String, (String, Vec<u8>)> {
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let weights = files.filter(|path| {
        path.extension().is_some_and(|end| end == "safetensors") && !path.ends_with("reference.safetensors")
    });
    let mut found = BTreeMap::new();
    for path in weights {
        let bytes = fs::read(path).unwrap();
        for (name, tensor) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let kind = format!("{:?} {:?}", tensor.dtype(), tensor.shape());
            assert!(found.insert(name, (kind, tensor.data().to_vec())).is_none());
        }
    }
    found
}

fn json(folder: &Path) -> Value {
    serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap()
}

/// Exports the text of a folder, with the carried tensors or without.
fn export(source: &Path, target: &Path, carried: Option<&CarriedTensors>, shard_bytes: u64) -> Result<(), ModelError> {
    let model = Model::new(Config::read(source)?, None)?;
    let weights = Checkpoint::of_model(source, model.config())?;
    let (config, dtype) = (model.config(), weights.float_dtype().unwrap());
    let (auxiliary_files, expert_tensors) = (AuxiliaryFiles::default(), ExpertTensors::default());
    let export = CheckpointExport { folder: target, config, auxiliary_files, dtype, shard_bytes, expert_tensors };
    let value = |param: &_| weights.param(param, DType::F32, &Device::Cpu).map_err(candle_core::Error::wrap);
    export.save_with(carried, model.base_params(), value)
}

fn carried(folder: &Path) -> CarriedTensors {
    CarriedTensors::open(folder, &Config::read(folder).unwrap()).unwrap().unwrap()
}

fn temporary() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("export");
    (folder, target)
}

#[test]
fn an_export_has_the_names_the_config_and_the_bytes_of_its_source() {
    for name in FIXTURES {
        for shard_bytes in [u64::MAX, 3000] {
            let (_folder, target) = temporary();
            export(&fixture(name), &target, Some(&carried(&fixture(name))), shard_bytes).unwrap();
            assert!(tensors(&target) == tensors(&fixture(name)), "{name}: the tensors differ");
            assert_eq!(json(&target).to_string(), json(&fixture(name)).to_string(), "{name}");
            let again = Checkpoint::of_model(&target, &Config::read(&target).unwrap()).unwrap();
            let source = Checkpoint::of_model(&fixture(name), &Config::read(&target).unwrap()).unwrap();
            assert_eq!(again.identity(), source.identity(), "{name}");
            assert_eq!(carried(&target).identity(), carried(&fixture(name)).identity(), "{name}");
        }
    }
}

#[test]
fn an_export_in_another_dtype_keeps_the_carried_bytes() {
    let (_folder, target) = temporary();
    fs::create_dir(&target).unwrap();
    let model = MergedModel::open(&fixture("qwen3_vl"), None).unwrap();
    let auxiliary_files = AuxiliaryFiles::default();
    let expert_tensors = ExpertTensors::default();
    let export = candlewick_model::SafetensorsExport {
        auxiliary_files,
        dtype: Some(DType::F32),
        shard_bytes: 4000,
        expert_tensors,
    };
    export.write(&model, &target, &|_, _| ()).unwrap();
    let (before, after) = (tensors(&fixture("qwen3_vl")), tensors(&target));
    assert_eq!(before.len(), after.len());
    for (name, tensor) in before {
        assert_eq!(after[&name] == tensor, name.starts_with("model.visual."), "{name}");
    }
    let config = json(&target);
    assert_eq!((config["dtype"].as_str(), config["text_config"].get("dtype")), (Some("float32"), None));
}

#[test]
fn a_multimodal_model_is_not_written_without_its_carried_tensors() {
    let (_folder, target) = temporary();
    let error = export(&fixture("mistral3"), &target, None, u64::MAX).unwrap_err().to_string();
    assert!(error.contains("Mistral 3") && error.contains("source"), "{error}");
    assert!(!target.exists());
}

#[test]
fn overrides_change_the_keys_of_the_text() {
    let mut config = Config::read(&fixture("qwen2_5_vl")).unwrap();
    let before = config.to_json();
    let overrides = serde_json::json!({"rms_norm_eps": 0.5, "tie_word_embeddings": true});
    assert_eq!(config.apply_overrides(overrides.as_object().unwrap()).unwrap(), ["tie_word_embeddings"]);
    let mut wanted = before.clone();
    wanted["text_config"]["rms_norm_eps"] = 0.5.into();
    wanted["tie_word_embeddings"] = true.into();
    assert_eq!(config.to_json(), wanted);
    let again = Config::from_json(wanted.clone()).unwrap();
    assert_eq!((again.to_json(), again.rms_norm_eps(), again.tied()), (wanted, config.rms_norm_eps(), config.tied()));
}

#[test]
fn a_text_part_of_another_family_is_named() {
    let mut config = json(&fixture("mistral3"));
    for (found, wanted) in
        [("ministral3", "the family Ministral and Pixtral is missing"), ("llama", "supported: mistral")]
    {
        config["text_config"]["model_type"] = found.into();
        let error = Config::from_json(config.clone()).unwrap_err().to_string();
        assert!(error.contains("text_config.model_type") && error.contains(wanted), "{error}");
    }
}

#[test]
fn an_adapter_of_peft_on_the_text_gives_its_outputs_and_keeps_its_names() {
    let reference = Reference::load("qwen3_vl-lora");
    let tiny = Tiny::load_with_adapter("qwen3_vl", &fixture("qwen3_vl-lora"));
    assert_close("logits", &tiny.logits(&reference.ids, &reference.lengths), reference.get("logits"));
    tiny.loss_and_grads(&reference);
    let mut n_grads = 0;
    for (factor, grad) in reference.grads() {
        assert_close(factor, &tiny.grad(factor), grad);
        n_grads += 1;
    }
    assert_eq!(n_grads, tiny.n_sinks());
    let (_folder, target) = temporary();
    let value = |name: &str| tiny.value(name).unwrap();
    AdapterFolder::save(&target, &tiny.model, DType::F32, AuxiliaryFiles::default(), |param| Ok(value(&param.name)))
        .unwrap();
    assert!(tensors(&target) == tensors(&fixture("qwen3_vl-lora")), "the tensors differ");
    let modules = |folder: &Path| {
        let config = fs::read(folder.join("adapter_config.json")).unwrap();
        serde_json::from_slice::<Value>(&config).unwrap()["target_modules"].clone()
    };
    assert_eq!(modules(&target), modules(&fixture("qwen3_vl-lora")));
    assert_eq!(AdapterFolder::open(&target).unwrap().config, *tiny.model.lora().unwrap());
}

#[test]
fn a_merged_adapter_keeps_the_carried_bytes() {
    let (_folder, target) = temporary();
    merge(&target, &fixture("qwen3_vl"), &fixture("qwen3_vl-lora"), None).unwrap();
    let (before, after) = (tensors(&fixture("qwen3_vl")), tensors(&target));
    let changed: Vec<&str> = before.keys().filter(|name| after[*name] != before[*name]).map(String::as_str).collect();
    let adapted = |layer: usize| {
        ["mlp.up_proj", "self_attn.q_proj"].map(|module| format!("model.language_model.layers.{layer}.{module}.weight"))
    };
    assert_eq!(changed, [adapted(0), adapted(1)].concat());
}

/// Returns the adapted modules and their ranks, of an adapter on the text of `qwen3_vl`.
fn ranks(config: &LoraConfig) -> Vec<(String, usize)> {
    let model = Model::new(Config::read(&fixture("qwen3_vl")).unwrap(), Some(config.clone())).unwrap();
    let is_down = |param: &&ParamSpec| param.name.ends_with("lora_A.weight");
    model.adapter_params().filter(is_down).map(|param| (param.name.clone(), param.shape[0])).collect()
}

#[test]
fn rules_of_peft_on_a_multimodal_model_select_its_text() {
    let of = |rules: Value| LoraConfig::from_json(&rules).unwrap();
    let short =
        ranks(&of(serde_json::json!({"target_modules": ["q_proj"], "exclude_modules": ["layers.1.self_attn.q_proj"]})));
    assert_eq!(short.len(), 1);
    let by_expression = serde_json::json!({
        "target_modules": r"model\.language_model\..*\.q_proj",
        "exclude_modules": ["model.language_model.layers.1.self_attn.q_proj"],
    });
    assert_eq!(ranks(&of(by_expression)), short);
    let by_parameter =
        serde_json::json!({"target_parameters": ["model.language_model.layers.0.self_attn.q_proj.weight"]});
    assert_eq!(ranks(&of(by_parameter)).len(), 1);
}

#[test]
fn a_saved_adapter_has_the_ranks_of_its_rules() {
    for key in [
        "model.layers.0.self_attn.q_proj",
        "model.language_model.layers.0.self_attn.q_proj",
        r"model\.layers\.0\.self_attn\.q_proj",
    ] {
        let rules = serde_json::json!({"target_modules": ["q_proj"], "r": 2, "rank_pattern": {key: 3}, "alpha_pattern": {key: 5}});
        let config = LoraConfig::from_json(&rules).unwrap();
        let model = Model::new(Config::read(&fixture("qwen3_vl")).unwrap(), Some(config.clone())).unwrap();
        let (_folder, target) = temporary();
        let zeros = |param: &ParamSpec| Tensor::zeros(param.shape.as_slice(), DType::F32, &Device::Cpu);
        AdapterFolder::save(&target, &model, DType::F32, AuxiliaryFiles::default(), zeros).unwrap();
        let again = AdapterFolder::open(&target).unwrap();
        let wanted: Vec<usize> = ranks(&config).into_iter().map(|(_, rank)| rank).collect();
        assert_eq!(wanted, [3, 2], "{key}");
        assert_eq!(ranks(&again.config).into_iter().map(|(_, rank)| rank).collect::<Vec<_>>(), wanted, "{key}");
        let saved: Value = serde_json::from_slice(&fs::read(target.join("adapter_config.json")).unwrap()).unwrap();
        for pattern in ["rank_pattern", "alpha_pattern"] {
            let (found, _) = saved[pattern].as_object().unwrap().iter().next().unwrap();
            assert!(found.contains("language_model"), "{found}");
        }
    }
}
