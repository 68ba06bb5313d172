//! LoRA compared with PEFT: forward, gradients, files, merging and refused configurations.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candlewick_model::{
    AdapterFolder, BASE_MODEL_RECORD, BaseModelRecord, Config, LoraConfig, Model, ParamSpec,
    checkpoint::{AuxiliaryFiles, Checkpoint, CheckpointExport, ExpertTensors},
};
use serde_json::{Value, json};

use crate::merging::merge;
use crate::tiny::{Reference, Tiny, assert_close, fixture};

fn adapted() -> (Tiny, Reference) {
    (Tiny::load_with_adapter("qwen2", &fixture("qwen2-lora")), Reference::load("qwen2-lora"))
}

fn config() -> Config {
    Config::read(&fixture("qwen2")).unwrap()
}

#[test]
fn an_adapter_gives_the_outputs_of_peft() {
    let (tiny, reference) = adapted();
    assert_close("logits", &tiny.logits(&reference.ids, &reference.lengths), reference.get("logits"));
    let (loss, want) = (tiny.loss_and_grads(&reference), reference.get("loss").to_scalar::<f32>().unwrap());
    assert!(((loss - want) / want).abs() < 1e-5, "loss {loss}, want {want}");
    let mut n_grads = 0;
    for (factor, grad) in reference.grads() {
        assert_close(factor, &tiny.grad(factor), grad);
        n_grads += 1;
    }
    assert_eq!(n_grads, tiny.n_sinks(), "the factors and nothing else are trained");
    assert_eq!(n_grads, 2 * 5);
}

#[test]
fn an_adapter_folder_survives_a_round_trip() {
    let (tiny, reference) = adapted();
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("adapter");
    let value = |name: &str| tiny.value(name).unwrap();
    AdapterFolder::save(&target, &tiny.model, DType::F32, AuxiliaryFiles::default(), |param| Ok(value(&param.name)))
        .unwrap();
    let again = Tiny::load_with_adapter("qwen2", &target);
    assert_eq!(again.model.lora().unwrap(), tiny.model.lora().unwrap());
    let logits = |tiny: &Tiny| tiny.logits(&reference.ids, &reference.lengths).to_vec2::<f32>().unwrap();
    assert_eq!(logits(&again), logits(&tiny));
}

pub(crate) fn load(folder: &Path) -> Tiny {
    let checkpoint = Checkpoint::open(folder).unwrap();
    let plain = Model::new(Config::read(folder).unwrap(), None).unwrap();
    assert!(checkpoint.check(plain.base_params()).unwrap().is_empty());
    Tiny::with_weights(plain, |param| checkpoint.tensor(&param.name, &param.shape, DType::F32, &Device::Cpu).unwrap())
}

#[test]
fn a_merged_model_gives_the_outputs_of_its_adapter() {
    let reference = Reference::load("qwen2-lora");
    let (base, adapter) = (fixture("qwen2"), fixture("qwen2-lora"));
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("merged");
    let merged = merge(&target, &base, &adapter, Some(DType::F32)).unwrap();
    assert_eq!((merged.dtype, merged.n_matrices), (DType::F32, 5));
    let logits = load(&target).logits(&reference.ids, &reference.lengths);
    assert_close("merged logits", &logits, reference.get("logits"));
    let plain = Tiny::load("qwen2").logits(&reference.ids, &reference.lengths);
    assert!(crate::tiny::relative_error(&plain, &logits) > 1e-2, "the adapter does something");
}

#[test]
fn a_merge_in_16_bits_rounds_each_value_once() {
    let (base, adapter) = (fixture("qwen2"), fixture("qwen2-lora"));
    let folder = tempfile::tempdir().unwrap();
    let whole = folder.path().join("f32");
    merge(&whole, &base, &adapter, Some(DType::F32)).unwrap();
    for dtype in [DType::BF16, DType::F16] {
        let target = folder.path().join(format!("{dtype:?}"));
        let merged = merge(&target, &base, &adapter, Some(dtype)).unwrap();
        assert!(merged.rounding > 0.0 && merged.rounding < 0.5, "{merged:?}");
        let (exact, rounded) = (Checkpoint::open(&whole).unwrap(), Checkpoint::open(&target).unwrap());
        let model = Model::new(Config::read(&whole).unwrap(), None).unwrap();
        for param in model.base_params() {
            let read = |from: &Checkpoint, dtype| from.tensor(&param.name, &param.shape, dtype, &Device::Cpu).unwrap();
            let want = read(&exact, DType::F32).to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap();
            let values = |tensor: Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(values(read(&rounded, DType::F32)), values(want), "{}", param.name);
        }
    }
}

#[test]
fn an_adapter_records_its_base_weights() {
    let (base, folder) = (fixture("qwen2"), tempfile::tempdir().unwrap());
    let (tiny, adapter) = (Tiny::load_with_adapter("qwen2", &fixture("qwen2-lora")), folder.path().join("adapter"));
    let value = |name: &str| tiny.value(name).unwrap();
    let weights = Checkpoint::open(&base).unwrap().identity();
    let record = BaseModelRecord { model: "me/qwen2".to_owned(), weights }.to_json();
    let auxiliary_files = AuxiliaryFiles { files: &[(BASE_MODEL_RECORD, &record)], ..AuxiliaryFiles::default() };
    AdapterFolder::save(&adapter, &tiny.model, DType::F32, auxiliary_files, |param| Ok(value(&param.name))).unwrap();
    // Equal weights in more files are the same base; merged weights are another one.
    let [split, merged, again] = ["split", "merged", "again"].map(|name| folder.path().join(name));
    let plain = Model::new(Config::read(&base).unwrap(), None).unwrap();
    let source = Checkpoint::open(&base).unwrap();
    let dtype = source.float_dtype().unwrap();
    let config = plain.config();
    let export = CheckpointExport {
        folder: &split,
        config,
        auxiliary_files: AuxiliaryFiles::default(),
        dtype,
        shard_bytes: 4000,
        expert_tensors: ExpertTensors::Separate,
    };
    export
        .save(plain.base_params(), |param| Ok(source.tensor(&param.name, &param.shape, dtype, &Device::Cpu).unwrap()))
        .unwrap();
    assert!(split.join("model.safetensors.index.json").exists());
    merge(&merged, &split, &adapter, None).unwrap();
    let error = merge(&again, &merged, &adapter, Some(DType::F32)).unwrap_err().to_string();
    for word in ["on other weights", "me/qwen2", merged.to_str().unwrap(), BASE_MODEL_RECORD] {
        assert!(error.contains(word), "{word} is not in {error}");
    }
    assert!(!again.exists());
    std::fs::remove_file(adapter.join(BASE_MODEL_RECORD)).unwrap();
    merge(&again, &merged, &adapter, Some(DType::F32)).unwrap();
}

#[test]
fn a_pickled_adapter_is_named() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(fixture("qwen2-lora").join("adapter_config.json"), folder.path().join("adapter_config.json"))
        .unwrap();
    std::fs::write(folder.path().join("adapter_model.bin"), "").unwrap();
    assert!(AdapterFolder::open(folder.path()).unwrap_err().to_string().contains("adapter_model.bin, a pickle"));
}

#[test]
fn a_merged_model_has_the_tokenizer_of_its_adapter() {
    let (folder, adapter) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let base = folder.path().join("base");
    let copy = |from: &Path, to: &Path| {
        std::fs::create_dir_all(to).unwrap();
        for entry in std::fs::read_dir(from).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_file()) {
            std::fs::copy(&entry, to.join(entry.file_name().unwrap())).unwrap();
        }
    };
    copy(&fixture("qwen2"), &base);
    copy(&fixture("qwen2-lora"), adapter.path());
    for (path, name, text) in [
        (base.as_path(), "tokenizer.json", "base"),
        (&base, "chat_template.jinja", "base"),
        (&base, "generation_config.json", "base"),
        (adapter.path(), "tokenizer.json", "adapter"),
    ] {
        std::fs::write(path.join(name), text).unwrap();
    }
    let target = folder.path().join("merged");
    merge(&target, &base, adapter.path(), Some(DType::F32)).unwrap();
    let read = |name: &str| std::fs::read_to_string(target.join(name)).ok();
    assert_eq!(read("tokenizer.json").as_deref(), Some("adapter"));
    assert_eq!(read("chat_template.jinja"), None, "the template of another tokenizer");
    assert_eq!(read("generation_config.json").as_deref(), Some("base"));
}

#[track_caller]
fn modules(peft_config: Value) -> Vec<(String, usize, f64)> {
    let model = Model::new(config(), Some(LoraConfig::from_json(&peft_config).unwrap())).unwrap();
    model.adapters().map(|a| (a.module.clone(), a.r, a.scaling)).collect()
}

#[test]
fn names_expressions_and_all_linear_choose_as_peft_does() {
    assert_eq!(modules(json!({"target_modules": "all-linear"})).len(), 14);
    assert_eq!(modules(json!({"target_modules": "all"})).len(), 14);
    assert_eq!(modules(json!({"target_modules": ["v_proj", "mlp.up_proj"]})).len(), 4);
    assert_eq!(modules(json!({})).len(), 4, "q_proj and v_proj, as PEFT chooses");
    let one = [("model.layers.1.mlp.up_proj".to_string(), 8, 1.0)];
    assert_eq!(modules(json!({"target_modules": ["model.layers.1.mlp.up_proj"]})), one);
    assert_eq!(modules(json!({"target_modules": ["up_proj"], "layers_to_transform": 1})), one);
    assert_eq!(modules(json!({"target_modules": r".*\.1\.mlp\.(?!down|gate)\w+"})), one);
    let all_but = json!({"target_modules": "all-linear", "exclude_modules": ["up_proj"]});
    assert_eq!(modules(all_but).len(), 12);
    let scaled = json!({"target_modules": ["up_proj"], "r": 16, "lora_alpha": 12, "use_rslora": true,
        "rank_pattern": {"layers.0.mlp.up_proj": 4}, "alpha_pattern": {".*up_proj": 6}});
    let got: Vec<_> = modules(scaled).into_iter().map(|(_, r, scaling)| (r, scaling)).collect();
    assert_eq!(got, [(4, 3.0), (16, 1.5)]);
}

/// Saves a new adapter, and returns `target_modules` of its folder, after a comparison of the adapters of both configs.
#[track_caller]
fn saved_targets(base: &str, peft_config: Value) -> Value {
    let config = Config::read(&fixture(base)).unwrap();
    let model = Model::new(config.clone(), Some(LoraConfig::from_json(&peft_config).unwrap())).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("adapter");
    let zeros = |param: &ParamSpec| Tensor::zeros(param.shape.as_slice(), DType::F32, &Device::Cpu);
    AdapterFolder::save(&target, &model, DType::F32, AuxiliaryFiles::default(), zeros).unwrap();
    let read = Model::new(config, Some(AdapterFolder::open(&target).unwrap().config)).unwrap();
    assert!(read.adapters().eq(model.adapters()), "{peft_config}");
    assert_eq!(read.adapts_experts(), model.adapts_experts());
    let text = std::fs::read_to_string(target.join("adapter_config.json")).unwrap();
    serde_json::from_str::<Value>(&text).unwrap()["target_modules"].clone()
}

/// PEFT 0.21 saves such ends of names for models of 20 or more linear layers. Other programs do not read `all-linear`.
#[test]
fn an_adapter_folder_names_its_modules_as_peft_does() {
    let all = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"];
    assert_eq!(saved_targets("qwen2", json!({"target_modules": "all-linear"})), json!(all));
    let excluded = json!({"target_modules": "all-linear", "exclude_modules": ["up_proj"]});
    assert_eq!(
        saved_targets("qwen2", excluded),
        json!(all.iter().filter(|name| **name != "up_proj").collect::<Vec<_>>())
    );
    let one = json!({"target_modules": "all-linear", "exclude_modules": ["layers.0.mlp.up_proj"]});
    let of_second = ["1.mlp.up_proj", "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "v_proj"];
    assert_eq!(saved_targets("qwen2", one), json!(of_second));
    let names = saved_targets("qwen2_moe", json!({"target_modules": "all-linear"}));
    assert!(names.to_string().contains("\"shared_expert.up_proj\""), "not those of routed experts: {names}");
    for kept in [json!(r".*\.1\.mlp\.up_proj"), json!(["q_proj", "mlp.up_proj"])] {
        assert_eq!(saved_targets("qwen2", json!({"target_modules": kept})), kept);
    }
    let layers = json!({"target_modules": ["q_proj"], "layers_to_transform": [1]});
    assert_eq!(saved_targets("qwen2", layers), json!(["q_proj"]));
}

#[track_caller]
fn refused(peft_config: Value, parts: &[&str]) {
    let model = LoraConfig::from_json(&peft_config).and_then(|lora| Model::new(config(), Some(lora)));
    let message = model.unwrap_err().to_string();
    for part in parts {
        assert!(message.contains(part), "`{message}` lacks `{part}`");
    }
}

/// Checks that the patterns of a new adapter are refused, and that a folder with them loads.
#[track_caller]
fn idle(peft_config: Value, parts: &[&str]) {
    let lora = LoraConfig::from_json(&peft_config).unwrap();
    let message = lora.check_patterns(&config()).unwrap_err().to_string();
    for part in parts {
        assert!(message.contains(part), "`{message}` lacks `{part}`");
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("adapter_config.json"), peft_config.to_string()).unwrap();
    let stored = [LoraConfig::read(folder.path()).unwrap(), LoraConfig::from_peft_json(&lora.to_json()).unwrap()];
    for stored in stored {
        assert!(Model::new(config(), Some(stored)).unwrap().adapters().next().is_some());
    }
}

#[test]
fn a_pattern_of_modules_without_an_adapter_is_refused_in_a_new_adapter_alone() {
    let modules =
        "matches only modules without an adapter: model.layers.0.self_attn.k_proj, model.layers.1.self_attn.k_proj";
    idle(json!({"rank_pattern": {"q_proj": 4, "k_proj": 4}}), &["rank_pattern", "`k_proj`", modules, "target_modules"]);
    idle(json!({"alpha_pattern": {"mlp.up_proj": 4}}), &["alpha_pattern", "`mlp.up_proj` matches only", "or remove"]);
    let of_layer = json!({"target_modules": ["q_proj"], "layers_to_transform": 0, "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 4}});
    idle(of_layer, &["rank_pattern", "without an adapter: model.layers.1.self_attn.q_proj; select"]);
    LoraConfig::from_json(&json!({"rank_pattern": {"q_proj": 4}})).unwrap().check_patterns(&config()).unwrap();
}

#[test]
fn unsupported_settings_are_refused_by_name() {
    refused(json!({"lora_dropout": 1.0}), &["lora_dropout", "from 0 to below 1", "1"]);
    refused(json!({"lora_dropout": -0.5}), &["lora_dropout", "-0.5"]);
    refused(json!({"lora_alpha": 0}), &["lora_alpha", "nothing would train"]);
    refused(json!({"rank_pattern": {"up_prj": 4}}), &["rank_pattern", "`up_prj` matches no module"]);
    refused(json!({"exclude_modules": ["up_prj"]}), &["exclude_modules", "`up_prj` matches no module"]);
    refused(json!({"layers_to_transform": [99]}), &["layers_to_transform", "there is no layer 99"]);
    refused(json!({"use_dora": true}), &["use_dora", "true is not supported"]);
    refused(json!({"peft_type": "IA3"}), &["peft_type", "IA3"]);
    refused(json!({"bias": "all"}), &["bias", "all", "none"]);
    refused(json!({"init_lora_weights": "pissa"}), &["init_lora_weights", "pissa"]);
    refused(json!({"init_lora_weights": false}), &["init_lora_weights", "false"]);
    refused(json!({"modules_to_save": ["embed_tokens"]}), &["modules_to_save"]);
    refused(json!({"task_type": "SEQ_CLS"}), &["task_type", "SEQ_CLS"]);
    refused(json!({"lora_aplha": 16}), &["lora_aplha", "did you mean `lora_alpha`?"]);
    refused(json!({"eva_config": {"rho": 2}}), &["eva_config"]);
    // The key is refused with any value.
    refused(json!({"lora_dropot": 0}), &["lora_dropot", "did you mean `lora_dropout`?"]);
    refused(json!({"use_rsloraa": false}), &["use_rsloraa", "did you mean `use_rslora`?"]);
    assert!(LoraConfig::from_json(&json!({"eva_config": null, "use_dora": false})).is_ok());
}

#[test]
fn a_target_without_a_match_is_refused_with_a_list_of_the_modules() {
    refused(json!({"target_modules": ["q_prj"]}), &["q_prj", "did you mean `q_proj`?", "gate_proj"]);
    refused(json!({"target_modules": "nothing"}), &["no module matches", "q_proj", "layers 0 to 1"]);
    refused(json!({"target_modules": []}), &["no module matches"]);
    refused(json!({"target_modules": ["up_proj"], "layers_to_transform": [7]}), &["there is no layer 7"]);
    refused(json!({"target_modules": ["lm_head"]}), &["lm_head", "not supported"]);
    refused(json!({"target_modules": ".*embed_tokens"}), &["model.embed_tokens"]);
    refused(json!({"target_modules": "("}), &["target_modules", "regular expression"]);
    refused(json!({"target_modules": 3}), &["target_modules", "all-linear", "found 3"]);
    refused(json!({"target_modules": "all-linear", "layers_to_transform": [0]}), &["layers_to_transform"]);
    refused(json!({"r": 0}), &["`r`", "found 0"]);
    refused(json!({"rank_pattern": {"q_proj": 0}}), &["rank_pattern", "found 0"]);
}

#[test]
fn a_new_adapter_does_not_change_the_outputs() {
    let lora = LoraConfig::from_json(&json!({"r": 4, "target_modules": "all-linear"})).unwrap();
    let base = Tiny::load("qwen2");
    let fetch = |param: &candlewick_model::ParamSpec| {
        if let Some(value) = base.value(&param.name) {
            return value;
        }
        let mut values = vec![0.0; param.numel()];
        param.initialise(1, &mut values);
        candle_core::Tensor::from_vec(values, param.shape.as_slice(), &Device::Cpu).unwrap()
    };
    let tiny = Tiny::with_weights(Model::new(config(), Some(lora)).unwrap(), fetch);
    let reference = Reference::load("qwen2");
    let logits = |tiny: &Tiny| tiny.logits(&reference.ids, &reference.lengths).to_vec2::<f32>().unwrap();
    assert_eq!(logits(&tiny), logits(&base));
    tiny.loss_and_grads(&reference);
    let norm = |name: &str| tiny.grad(name).sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap();
    assert_eq!(norm("model.layers.0.mlp.up_proj.lora_A.weight"), 0.0);
    assert!(norm("model.layers.0.mlp.up_proj.lora_B.weight") > 0.0);
}
