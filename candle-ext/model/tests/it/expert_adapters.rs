//! LoRA on experts and routers: outputs and gradients of PEFT, files in both layouts, merging and refused configurations.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candlewick_model::{
    AdapterFolder, Config, LoraConfig, Model, ParamGroupKind, ParamSpec, RouterDtype,
    checkpoint::{AuxiliaryFiles, Checkpoint},
};
use serde_json::{Value, json};

use crate::merging::merge;
use crate::tiny::{Reference, Tiny, assert_close, fixture, relative_error};

/// Writes a value of each factor as an adapter folder.
fn save(tiny: &Tiny, folder: &Path, value: impl Fn(&str) -> Tensor) {
    let fetch = |param: &ParamSpec| Ok(value(&param.name));
    AdapterFolder::save(folder, &tiny.model, DType::F32, AuxiliaryFiles::default(), fetch).unwrap();
}

fn tensors(folder: &Path) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(folder.join("adapter_model.safetensors"), &Device::Cpu).unwrap()
}

/// Compares logits, loss and gradients with the reference, and the files and the merged model with the adapter.
#[track_caller]
fn check(base: &str, adapter: &str, n_merged: usize) {
    let (tiny, reference) = (Tiny::load_with_adapter(base, &fixture(adapter)), Reference::load(adapter));
    let logits = |tiny: &Tiny| tiny.logits(&reference.ids, &reference.lengths);
    assert_close("logits", &logits(&tiny), reference.get("logits"));
    let plain = logits(&Tiny::load(base));
    assert!(relative_error(&plain, reference.get("logits")) > 1e-2, "the adapter does something");
    let (loss, want) = (tiny.loss_and_grads(&reference), reference.get("loss").to_scalar::<f32>().unwrap());
    assert!(((loss - want) / want).abs() < 1e-5, "loss {loss}, want {want}");

    let folder = tempfile::tempdir().unwrap();
    let [grads, again, merged] = ["grads", "again", "merged"].map(|name| folder.path().join(name));
    save(&tiny, &grads, |name| tiny.grad(name));
    let grads = tensors(&grads);
    let mut n_grads = 0;
    for (factor, grad) in reference.grads() {
        assert_close(factor, &grads[&format!("base_model.model.{factor}")], grad);
        n_grads += 1;
    }
    assert_eq!(n_grads, grads.len(), "the factors and nothing else are trained");

    save(&tiny, &again, |name| tiny.value(name).unwrap());
    let (saved, original) = (tensors(&again), tensors(&fixture(adapter)));
    assert_eq!(saved.len(), original.len());
    for (name, tensor) in &original {
        assert_eq!(relative_error(&saved[name], tensor), 0.0, "{name}");
    }
    let reread = Tiny::load_with_adapter(base, &again);
    assert_eq!(reread.model.lora(), tiny.model.lora());
    assert_eq!(logits(&reread).to_vec2::<f32>().unwrap(), logits(&tiny).to_vec2::<f32>().unwrap());

    let (base, adapter) = (fixture(base), fixture(adapter));
    let report = merge(&merged, &base, &adapter, Some(DType::F32)).unwrap();
    assert_eq!(report.n_matrices, n_merged);
    let checkpoint = Checkpoint::open(&merged).unwrap();
    let model = Model::new(Config::read(&merged).unwrap(), None).unwrap();
    let whole = Tiny::with_weights(model, |param| checkpoint.param(param, DType::F32, &Device::Cpu).unwrap());
    assert_close("merged logits", &logits(&whole), reference.get("logits"));
}

#[test]
fn adapters_of_both_parameters_and_of_the_router_are_pefts() {
    check("qwen3_moe", "qwen3_moe-lora", 2 * 2 + 6 + 6 + 1);
}

#[test]
fn an_adapter_on_a_router_in_f64_is_pefts() {
    let (adapter, reference) = (fixture("qwen3_moe-lora"), Reference::load("qwen3_moe-lora"));
    let load = |dtype| Tiny::load_with_adapter("qwen3_moe", &adapter).with_router_dtype(dtype);
    let [exact, rounded] = [RouterDtype::F64, RouterDtype::F32].map(load);
    assert!(exact.model.adapts_routers());
    assert_close("logits", &exact.logits(&reference.ids, &reference.lengths), reference.get("logits"));
    assert!(exact.loss_and_grads(&reference) > 0.0 && rounded.loss_and_grads(&reference) > 0.0);
    for param in exact.model.adapter_params() {
        assert_close(&param.name, &exact.grad(&param.name), &rounded.grad(&param.name));
    }
}

#[test]
fn an_adapter_of_one_parameter_is_pefts() {
    check("olmoe", "olmoe-lora", 2 * 6);
}

#[test]
fn an_adapter_that_peft_converted_from_transformers_4_is_pefts() {
    check("mixtral", "mixtral-lora", 2 * (1 + 5 + 5));
}

#[test]
fn adapters_of_single_experts_have_the_names_of_vllm_and_its_outputs() {
    check("mixtral", "mixtral-experts-lora", 2 * (1 + 5 + 5));
}

#[test]
fn an_adapter_of_the_up_projections_alone_has_the_outputs_of_the_reader() {
    check("qwen2_moe", "qwen2_moe-up-lora", 2 * 6);
}

/// In transformers 5, `gate_proj` is no module of an expert.
#[test]
fn an_adapter_folder_without_experts_is_one_of_shared_experts_and_dense_layers() {
    check("qwen2_moe", "qwen2_moe-lora", 3 * 2);
    assert_eq!(modules("qwen2_moe", json!({"target_modules": ["gate_proj", "down_proj"]})).len(), 3 * 2 + 2 * 2);
    let warning = |base: &str, adapter: &str| {
        let lora = LoraConfig::read(&fixture(adapter)).unwrap();
        Model::new(config(base), Some(lora)).unwrap().unadapted_experts_warning()
    };
    assert!(warning("qwen2_moe", "qwen2_moe-lora").unwrap().contains("the adapter has no tensors of experts"));
    for (base, adapter) in [("qwen2_moe", "qwen2_moe-up-lora"), ("olmoe", "olmoe-split-lora"), ("olmoe", "olmoe-lora")]
    {
        assert_eq!(warning(base, adapter), None, "{adapter}");
    }
}

#[test]
fn an_adapter_of_the_shared_experts_gate_is_pefts() {
    check("qwen2_moe", "qwen2_moe-gate-lora", 3 + 2);
    let gates = [of_layer(0, &["shared_expert_gate"]), of_layer(2, &["shared_expert_gate"])].concat();
    assert_eq!(modules("qwen2_moe", json!({"target_modules": ["shared_expert_gate"]})), gates);
    assert_eq!(modules("qwen2_moe", json!({"target_parameters": ["mlp.shared_expert_gate.weight"]})), gates);
    let all = modules("qwen2_moe", json!({"target_modules": "all-linear"}));
    assert!(gates.iter().all(|gate| all.contains(gate)) && all.len() == 3 * (4 + 3) + gates.len());
    assert!(modules("dots1", json!({"target_modules": "all-linear"})).iter().all(|name| !name.ends_with("gate")));
}

/// Adapters of 3-D parameters have the same factors as those with a module for each projection of each expert.
#[test]
fn both_layouts_of_one_adapter_have_equal_outputs() {
    // Gate and up projections of two layers; of one layer, with its down projections and router, and attention of two layers.
    for (base, n_adapters) in [("olmoe", 2 * 2), ("qwen3_moe", 3 + 1 + 2 * 2)] {
        let reference = Reference::load(&format!("{base}-lora"));
        let split = Tiny::load_with_adapter(base, &fixture(&format!("{base}-split-lora")));
        assert_eq!(split.model.adapters().count(), n_adapters);
        let logits = split.logits(&reference.ids, &reference.lengths);
        assert_close("logits", &logits, reference.get("logits"));
        let folder = tempfile::tempdir().unwrap();
        let merged = folder.path().join("merged");
        merge(&merged, &fixture(base), &fixture(&format!("{base}-split-lora")), Some(DType::F32)).unwrap();
        let checkpoint = Checkpoint::open(&merged).unwrap();
        let model = Model::new(Config::read(&merged).unwrap(), None).unwrap();
        let whole = Tiny::with_weights(model, |param| checkpoint.param(param, DType::F32, &Device::Cpu).unwrap());
        assert_close("merged logits", &whole.logits(&reference.ids, &reference.lengths), reference.get("logits"));
    }
}

fn config(family: &str) -> Config {
    Config::read(&fixture(family)).unwrap()
}

fn model(family: &str, peft_config: Value) -> Model {
    Model::new(config(family), Some(LoraConfig::from_json(&peft_config).unwrap())).unwrap()
}

#[test]
fn frozen_experts_and_a_frozen_router_have_no_gradients() {
    for target in [json!("all-linear"), json!(["q_proj", "v_proj"])] {
        let model = model("qwen2_moe", json!({"target_modules": target}));
        assert!(!model.adapts_experts() && !model.adapts_routers());
        let params = || model.units().iter().flat_map(|unit| &unit.params);
        assert!(params().filter(|param| param.group == ParamGroupKind::Expert).all(|param| !param.trainable));
        assert!(params().filter(|param| param.name.contains("mlp.gate.")).all(|param| !param.trainable));
        let base = Tiny::load("qwen2_moe");
        let tiny = Tiny::with_weights(model.clone(), |param| {
            let zeros = || Tensor::zeros(param.shape.as_slice(), DType::F32, &Device::Cpu).unwrap();
            base.value(&param.name).unwrap_or_else(zeros)
        });
        assert_eq!(tiny.n_sinks(), 2 * model.adapters().count());
    }
}

/// Returns the names of all adapters.
#[track_caller]
fn modules(family: &str, peft_config: Value) -> Vec<String> {
    model(family, peft_config).adapters().map(|adapter| adapter.module.clone()).collect()
}

fn of_layer(layer: usize, names: &[&str]) -> Vec<String> {
    names.iter().map(|name| format!("model.layers.{layer}.mlp.{name}")).collect()
}

#[test]
fn names_of_modules_and_parameters_choose_experts_and_routers() {
    let both = of_layer(1, &["experts.gate_up_proj", "experts.down_proj"]);
    let of = |peft_config| modules("qwen3_moe", peft_config);
    assert_eq!(of(json!({"target_parameters": ["experts.gate_up_proj", "down_proj"]})), both);
    assert_eq!(of(json!({"target_parameters": ["mlp.gate.weight"]})), of_layer(1, &["gate"]));
    assert_eq!(of(json!({"target_modules": ["mlp.gate"]})), of_layer(1, &["gate"]));
    let names: Vec<String> = (0..6).map(|expert| format!("mlp.experts.{expert}.down_proj")).collect();
    assert_eq!(of(json!({"target_modules": names})), of_layer(1, &["experts.down_proj"]));
    let expression = json!({"target_modules": r".*\.experts\.\d+\.(gate|up)_proj"});
    assert_eq!(of(expression), of_layer(1, &["experts.gate_proj", "experts.up_proj"]));
    let gate_proj = [of_layer(0, &["gate_proj"]), of_layer(1, &["experts.gate_proj"])].concat();
    assert_eq!(of(json!({"target_modules": ["gate_proj"]})), gate_proj);
    let excluded = json!({"target_modules": ["gate_proj"], "exclude_modules": r".*\.experts\..*"});
    assert_eq!(of(excluded), of_layer(0, &["gate_proj"]));
    assert_eq!(of(json!({"target_parameters": ["0.self_attn.q_proj.weight"]})), ["model.layers.0.self_attn.q_proj"]);
    assert_eq!(of(json!({"target_modules": "all-linear"})).len(), 2 * 4 + 3);
    let mixtral = json!({"target_modules": ["w2", "block_sparse_moe.gate"], "layers_to_transform": [1]});
    assert_eq!(modules("mixtral", mixtral), of_layer(1, &["gate", "experts.down_proj"]));
}

#[test]
fn ranks_of_experts_follow_patterns() {
    let peft_config = json!({"r": 2, "target_parameters": ["gate_up_proj", "down_proj"],
        "rank_pattern": {"experts.down_proj": 4}, "alpha_pattern": {".*gate_up_proj": 6}});
    let model = model("qwen3_moe", peft_config);
    let got: Vec<_> = model.adapters().map(|adapter| (adapter.r, adapter.scaling)).collect();
    assert_eq!(got, [(2, 3.0), (4, 2.0)]);
}

#[track_caller]
fn refused(family: &str, peft_config: Value, parts: &[&str]) {
    let model = LoraConfig::from_json(&peft_config).and_then(|lora| Model::new(config(family), Some(lora)));
    let message = model.unwrap_err().to_string();
    for part in parts {
        assert!(message.contains(part), "`{message}` lacks `{part}`");
    }
}

#[test]
fn names_that_match_nothing_are_refused_with_the_nearest() {
    let of = |peft_config, parts: &[&str]| refused("qwen3_moe", peft_config, parts);
    of(
        json!({"target_parameters": ["experts.gate_up_prj"]}),
        &["target_parameters", "`experts.gate_up_prj` matches no parameter", "did you mean `experts.gate_up_proj`?"],
    );
    of(json!({"target_parameters": ["mlp.experts.0.gate_proj"]}), &["it is a module: name it in target_modules"]);
    of(json!({"target_modules": ["experts.gate_up_proj"]}), &["it is a parameter: name it in target_parameters"]);
    of(
        json!({"target_modules": ["mlp.experts.9.gate_proj"]}),
        &["matches no module", "model.layers.1.mlp.experts.0.gate_proj", "parameters model.layers.1.mlp.gate.weight"],
    );
    of(json!({"target_parameters": "experts.gate_up_proj"}), &["expected a list of parameter names"]);
    of(json!({"target_parameters": ["down_proj"], "rank_pattern": {"up_prj": 2}}), &["`up_prj` matches no module"]);
    refused("qwen2", json!({"target_parameters": ["experts.down_proj"]}), &["matches no parameter"]);
}

#[test]
fn selections_that_no_adapter_can_hold_are_refused() {
    let of = |peft_config, parts: &[&str]| refused("qwen3_moe", peft_config, parts);
    of(
        json!({"target_modules": ["experts.1.up_proj", "experts.2.up_proj"]}),
        &["2 of the 6 experts of a layer match, but `model.layers.1.mlp.experts.0.up_proj` does not"],
    );
    of(
        json!({"target_modules": ["up_proj"], "rank_pattern": {r"experts\.3\.up_proj": 2}}),
        &["rank_pattern", "experts.3.up_proj", "all experts of a layer have one rank"],
    );
    of(
        json!({"target_modules": ["up_proj"], "target_parameters": ["gate_up_proj"]}),
        &["`model.layers.1.mlp.experts.gate_up_proj` is also selected by target_modules"],
    );
    of(json!({"target_modules": ["gate"], "target_parameters": ["gate.weight"]}), &["mlp.gate.weight` is also"]);
    of(
        json!({"target_parameters": ["down_proj"], "layers_to_transform": [1]}),
        &["layers_to_transform", "name the layers in target_parameters"],
    );
}

/// Writes an adapter folder of PEFT 0.18, which exchanged inputs and outputs of 3-D parameters.
fn exchanged(folder: &Path, version: &str) {
    let source = fixture("olmoe-lora");
    let mut saved = tensors(&source);
    for layer in 0..2 {
        let name = |factor| format!("base_model.model.model.layers.{layer}.mlp.experts.lora_{factor}.weight");
        let [a, b] = ["A", "B"].map(|factor| saved[&name(factor)].t().unwrap().contiguous().unwrap());
        saved.extend([(name("A"), b), (name("B"), a)]);
    }
    candle_core::safetensors::save(&saved, folder.join("adapter_model.safetensors")).unwrap();
    let text = std::fs::read_to_string(source.join("adapter_config.json")).unwrap().replace("0.21.2", version);
    std::fs::write(folder.join("adapter_config.json"), text).unwrap();
}

#[test]
fn factors_with_inputs_and_outputs_exchanged_are_refused_by_name_and_shapes() {
    let folder = tempfile::tempdir().unwrap();
    exchanged(folder.path(), "0.18.1");
    let adapter = AdapterFolder::open(folder.path()).unwrap();
    let model = Model::new(config("olmoe"), Some(adapter.config)).unwrap();
    let message = model.check_adapter(&adapter.weights).unwrap_err().to_string();
    for part in ["model.layers.0.mlp.experts.lora_A.weight", "[18, 40]", "[18, 16]", "PEFT before 0.19.1"] {
        assert!(message.contains(part), "`{message}` lacks `{part}`");
    }
}

/// Ranks that differ from adapter_config.json are no exchange.
#[test]
fn factors_of_another_rank_have_no_hint_about_old_versions_of_peft() {
    let source = fixture("olmoe-lora");
    let text = std::fs::read_to_string(source.join("adapter_config.json")).unwrap();
    let mut peft_config: Value = serde_json::from_str(&text).unwrap();
    peft_config["r"] = json!(peft_config["r"].as_u64().unwrap() + 1);
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(source.join("adapter_model.safetensors"), folder.path().join("adapter_model.safetensors")).unwrap();
    std::fs::write(folder.path().join("adapter_config.json"), peft_config.to_string()).unwrap();
    let adapter = AdapterFolder::open(folder.path()).unwrap();
    let model = Model::new(config("olmoe"), Some(adapter.config)).unwrap();
    let message = model.check_adapter(&adapter.weights).unwrap_err().to_string();
    assert!(message.contains("adapter_config.json makes it") && !message.contains("PEFT before"), "{message}");
}

/// OLMoE's hidden size is twice its intermediate size: the shapes alone do not show the exchange.
#[test]
fn exchanged_factors_of_square_matrices_are_refused_by_the_version_of_peft() {
    let mut square: Value =
        serde_json::from_str(&std::fs::read_to_string(fixture("olmoe").join("config.json")).unwrap()).unwrap();
    square["intermediate_size"] = json!(8);
    let folder = tempfile::tempdir().unwrap();
    for (version, is_refused) in [("0.18.1", true), ("0.19.0", true), ("0.19.1.dev0", false), ("0.21.2", false)] {
        exchanged(folder.path(), version);
        let lora = LoraConfig::read(folder.path()).unwrap();
        let model = Model::new(Config::from_json(square.clone()).unwrap(), Some(lora));
        match model {
            Ok(_) => assert!(!is_refused, "{version}"),
            Err(error) => {
                let message = error.to_string();
                assert!(is_refused && message.contains("peft_version"), "{version}: {message}");
                assert!(message.contains("model.layers.0.mlp.experts.gate_up_proj"), "{message}");
            }
        }
    }
}
