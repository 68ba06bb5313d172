//! LoRA against peft: forward, gradients, files, merging, and what is refused.

use candle_core::{DType, Device};
use candlewick_model::{
    AdapterFolder, Config, LoraConfig, Model,
    checkpoint::{Companions, Export},
};
use serde_json::{Value, json};

use crate::tiny::{Reference, Tiny, assert_close, fixture};

fn adapted() -> (Tiny, Reference) {
    (Tiny::load_with_adapter("qwen2", &fixture("qwen2-lora")), Reference::load("qwen2-lora"))
}

fn config() -> Config {
    Config::read(&fixture("qwen2")).unwrap()
}

#[test]
fn an_adapter_is_pefts() {
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
    let value = |name: &str| tiny.weights.iter().find_map(|w| w.get(name).ok()).unwrap().value().unwrap();
    AdapterFolder::save(&target, &tiny.model, DType::F32, Companions::default(), |param| Ok(value(&param.name)))
        .unwrap();
    let again = Tiny::load_with_adapter("qwen2", &target);
    assert_eq!(again.model.lora().unwrap(), tiny.model.lora().unwrap());
    let logits = |tiny: &Tiny| tiny.logits(&reference.ids, &reference.lengths).to_vec2::<f32>().unwrap();
    assert_eq!(logits(&again), logits(&tiny));
}

#[test]
fn a_merged_export_computes_what_the_adapter_did() {
    let (tiny, reference) = adapted();
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("merged");
    let value = |name: &str| Ok(tiny.weights.iter().find_map(|w| w.get(name).ok()).unwrap().value().unwrap());
    let export = Export {
        folder: &target,
        config: tiny.model.config(),
        companions: Companions::default(),
        dtype: DType::F32,
        shard_bytes: 4000,
    };
    export.save(tiny.model.base_params(), |param| tiny.model.merged(&param.name, value)).unwrap();
    let checkpoint = candlewick_model::checkpoint::Checkpoint::open(&target).unwrap();
    let plain = Model::new(Config::read(&target).unwrap(), None).unwrap();
    assert!(checkpoint.check(plain.base_params()).unwrap().is_empty());
    let merged = Tiny::with_weights(plain, |param| {
        checkpoint.tensor(&param.name, &param.shape, DType::F32, &Device::Cpu).unwrap()
    });
    let logits = merged.logits(&reference.ids, &reference.lengths);
    assert_close("merged logits", &logits, reference.get("logits"));
    let base = Tiny::load("qwen2").logits(&reference.ids, &reference.lengths);
    assert!(crate::tiny::relative_error(&base, &logits) > 1e-2, "the adapter does something");
}

#[track_caller]
fn modules(peft_config: Value) -> Vec<(String, usize, f64)> {
    let model = Model::new(config(), Some(LoraConfig::from_json(&peft_config).unwrap())).unwrap();
    model.adapters().map(|a| (a.module.clone(), a.r, a.scaling)).collect()
}

#[test]
fn names_expressions_and_all_linear_choose_as_peft_does() {
    assert_eq!(modules(json!({"target_modules": "all-linear"})).len(), 14);
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

#[track_caller]
fn refused(peft_config: Value, parts: &[&str]) {
    let model = LoraConfig::from_json(&peft_config).and_then(|lora| Model::new(config(), Some(lora)));
    let message = model.unwrap_err().to_string();
    for part in parts {
        assert!(message.contains(part), "`{message}` lacks `{part}`");
    }
}

#[test]
fn what_is_not_implemented_is_refused_by_name() {
    refused(json!({"lora_dropout": 1.0}), &["lora_dropout", "from 0 to below 1", "1"]);
    refused(json!({"lora_dropout": -0.5}), &["lora_dropout", "-0.5"]);
    refused(json!({"lora_alpha": 0}), &["lora_alpha", "nothing would train"]);
    refused(json!({"rank_pattern": {"up_prj": 4}}), &["rank_pattern", "`up_prj` matches no module"]);
    refused(json!({"exclude_modules": ["up_prj"]}), &["exclude_modules", "`up_prj` matches no module"]);
    refused(json!({"layers_to_transform": [99]}), &["layers_to_transform", "there is no layer 99"]);
    refused(json!({"use_dora": true}), &["use_dora", "DoRA"]);
    refused(json!({"peft_type": "IA3"}), &["peft_type", "IA3"]);
    refused(json!({"bias": "all"}), &["bias", "all", "none"]);
    refused(json!({"init_lora_weights": "pissa"}), &["init_lora_weights", "pissa"]);
    refused(json!({"init_lora_weights": false}), &["init_lora_weights", "false"]);
    refused(json!({"modules_to_save": ["embed_tokens"]}), &["modules_to_save"]);
    refused(json!({"task_type": "SEQ_CLS"}), &["task_type", "SEQ_CLS"]);
    refused(json!({"lora_aplha": 16}), &["lora_aplha", "did you mean `lora_alpha`?"]);
    refused(json!({"eva_config": {"rho": 2}}), &["eva_config"]);
    // Whatever the value: a person meant something else.
    refused(json!({"lora_dropot": 0}), &["lora_dropot", "did you mean `lora_dropout`?"]);
    refused(json!({"use_rsloraa": false}), &["use_rsloraa", "did you mean `use_rslora`?"]);
    assert!(LoraConfig::from_json(&json!({"eva_config": null, "use_dora": false})).is_ok());
}

#[test]
fn a_target_that_cannot_be_met_is_refused_with_the_modules_there_are() {
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
fn a_fresh_adapter_is_nothing() {
    let lora = LoraConfig::from_json(&json!({"r": 4, "target_modules": "all-linear"})).unwrap();
    let base = Tiny::load("qwen2");
    let fetch = |param: &candlewick_model::ParamSpec| {
        if let Some(weight) = base.weights.iter().find_map(|w| w.get(&param.name).ok()) {
            return weight.value().unwrap();
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
