//! Adapters that share the weights of a base.

use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use candlewick_inference::lm::Lm;
use candlewick_model::checkpoint::{AuxiliaryFiles, DEFAULT_SHARD_BYTES, ExpertTensors};
use serde_json::{Value, json};

use super::{COMPLETIONS, Server, complete, greedy, received};
use crate::support;

/// Writes an adapter with random factors for some modules of the first layer, and returns its folder.
fn adapter(folder: &Path, name: &str, r: usize, modules: &[(&str, usize, usize)]) -> PathBuf {
    let folder = folder.join(name);
    fs::create_dir(&folder).unwrap();
    let targets: Vec<&str> = modules.iter().map(|(module, ..)| module.rsplit('.').next().unwrap()).collect();
    let config = json!({
        "peft_type": "LORA", "r": r, "lora_alpha": 4 * r, "target_modules": targets, "base_model_name_or_path": "tiny",
        "task_type": "CAUSAL_LM",
    });
    fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
    let mut tensors = std::collections::HashMap::new();
    for layer in 0..2 {
        for (module, out, input) in modules {
            for (factor, shape) in [("A", (r, *input)), ("B", (*out, r))] {
                let values: Vec<f32> =
                    (0..shape.0 * shape.1).map(|i| ((i * 37 + r * 11) % 17) as f32 / 17.0 - 0.5).collect();
                let name = format!("base_model.model.model.layers.{layer}.{module}.lora_{factor}.weight");
                tensors.insert(name, candle_core::Tensor::from_vec(values, shape, &Device::Cpu).unwrap());
            }
        }
    }
    candle_core::safetensors::save(&tensors, folder.join("adapter_model.safetensors")).unwrap();
    folder
}

fn two_adapters(folder: &Path) -> [PathBuf; 2] {
    let mlp = [("mlp.up_proj", 24, 16), ("mlp.down_proj", 16, 24)];
    [adapter(folder, "first", 2, &[("self_attn.q_proj", 16, 16)]), adapter(folder, "second", 4, &mlp)]
}

#[test]
fn a_request_chooses_an_adapter_by_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let adapters = two_adapters(folder.path());
    let [first, second] = adapters.each_ref().map(|path| path.display().to_string());
    let server = Server::start(&["--lora-modules", &format!("first={first}"), &format!("second={second}")]);
    let load = |adapter| Lm::load(&server.model, adapter, DType::F32, Device::Cpu).unwrap();
    let models = [("tiny", load(None)), ("first", load(Some(&adapters[0]))), ("second", load(Some(&adapters[1])))];
    let prompts: Vec<String> = (0..4).map(|i| format!("Say wolf {i} times.")).collect();
    let responses: Vec<(usize, usize, Value)> = std::thread::scope(|scope| {
        let (server, prompts) = (&server, &prompts);
        let send = |(model, prompt): (usize, usize)| {
            let name = ["tiny", "first", "second"][model];
            scope.spawn(move || {
                let body = json!({"model": name, "prompt": prompts[prompt], "max_tokens": 20, "temperature": 0});
                (model, prompt, server.ok(COMPLETIONS, &body))
            })
        };
        let threads: Vec<_> = (0..12).map(|i| send((i % 3, i / 3))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut texts = std::collections::BTreeSet::new();
    for (model, prompt, response) in responses {
        let want = complete(&models[model].1, &prompts[prompt], &greedy(20)).text;
        assert_eq!((&response["model"], &response["choices"][0]["text"]), (&json!(models[model].0), &json!(want)));
        texts.insert(want);
    }
    assert!(texts.len() > 8, "the adapters change the texts: {texts:?}");
    // A prompt that another model has computed is computed again.
    let prompt = "Say wolf 4 times, and cloud 5 times.";
    for (name, lm) in models.iter().rev() {
        let body = json!({"model": name, "prompt": prompt, "max_tokens": 20, "temperature": 0});
        let want = complete(lm, prompt, &greedy(20)).text;
        assert_eq!(server.ok(COMPLETIONS, &body)["choices"][0]["text"], want, "{name}");
    }
    let (status, list) = received(server.send("GET /v1/models", ""));
    let cards: Vec<(&Value, &Value)> =
        list["data"].as_array().unwrap().iter().map(|card| (&card["id"], &card["parent"])).collect();
    let (tiny, none) = (json!("tiny"), Value::Null);
    assert_eq!((status, cards), (200, vec![(&tiny, &none), (&json!("first"), &tiny), (&json!("second"), &tiny)]));
    let (status, error) = server.post(COMPLETIONS, &json!({"model": "third", "prompt": "Hi"}));
    assert_eq!((status, &error["error"]["code"]), (404, &json!("model_not_found")));
    let names = "this server has \"tiny\", \"first\", \"second\"";
    assert!(error["error"]["message"].as_str().unwrap().contains(names), "{error}");
}

/// Adds embedding layers of more rows to an adapter.
fn add_embeddings(adapter: &Path, base: &Path) {
    let load = |path: PathBuf| candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    let mut tensors = load(adapter.join("adapter_model.safetensors"));
    let of_base = load(base.join("model.safetensors"));
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        let table = &of_base[name];
        let rows = (table.narrow(0, 0, 3).unwrap() * -1.0).unwrap();
        let table = candle_core::Tensor::cat(&[&(table * 1.5).unwrap(), &rows], 0).unwrap();
        tensors.insert(format!("base_model.model.{name}"), table);
    }
    candle_core::safetensors::save(&tensors, adapter.join("adapter_model.safetensors")).unwrap();
}

#[test]
fn an_adapter_with_embeddings_computes_as_its_merged_model() {
    let folder = tempfile::tempdir().unwrap();
    let model = support::export(folder.path(), 1);
    let [path, _] = two_adapters(folder.path());
    let base = Lm::load(&model, None, DType::F32, Device::Cpu).unwrap();
    let score = |lm: &Lm| format!("{:?}", lm.score("Say wolf 4 times.").unwrap());
    let [before, without] = [score(&base), score(&base.with_adapter(Some(&path)).unwrap())];
    add_embeddings(&path, &model);
    let own = Lm::load(&model, Some(&path), DType::F32, Device::Cpu).unwrap();
    let on_base = base.with_adapter(Some(&path)).unwrap();
    assert_eq!(score(&own), score(&on_base));
    assert!(![&before, &without].contains(&&score(&own)), "the embeddings change the scores");
    assert_eq!(score(&base), before, "the base model keeps its embeddings");
    let n_tokens = |lm: &Lm| lm.engine().model().config().vocab_size();
    assert_eq!(n_tokens(&own), n_tokens(&base) + 3);
    let merged = folder.path().join("merged");
    fs::create_dir(&merged).unwrap();
    let source = candlewick_model::MergedModel::open(&model, Some(&path)).unwrap();
    let folders: Vec<&Path> = source.folders().iter().map(PathBuf::as_path).collect();
    let auxiliary_files = AuxiliaryFiles { folders: &folders, ..AuxiliaryFiles::default() };
    let (dtype, shard_bytes, expert_tensors) = (Some(DType::F32), DEFAULT_SHARD_BYTES, ExpertTensors::default());
    let export = candlewick_model::SafetensorsExport { auxiliary_files, dtype, shard_bytes, expert_tensors };
    export.write(&source, &merged, &|_, _| ()).unwrap();
    let merged = Lm::load(&merged, None, DType::F32, Device::Cpu).unwrap();
    let values = |lm: &Lm| lm.score("Say wolf 4 times.").unwrap();
    let (a, b) = (format!("{:.4?}", values(&own)), format!("{:.4?}", values(&merged)));
    assert_eq!(a, b);
}

#[test]
fn an_adapter_shares_the_weights_of_its_base() {
    let folder = tempfile::tempdir().unwrap();
    let model = support::export(folder.path(), 1);
    let base = Lm::load(&model, None, DType::F32, Device::Cpu).unwrap();
    let before = base.score("Say wolf 4 times.").unwrap();
    for path in two_adapters(folder.path()) {
        let shared = base.with_adapter(Some(&path)).unwrap();
        let own = Lm::load(&model, Some(&path), DType::F32, Device::Cpu).unwrap();
        let bytes = |lm: &Lm| lm.engine().store().device_bytes().weights;
        assert!(bytes(&shared) * 4 < bytes(&base) && bytes(&own) > bytes(&base), "{} {}", bytes(&shared), bytes(&own));
        let [a, b] = [&shared, &own].map(|lm| format!("{:?}", lm.score("Say wolf 4 times.").unwrap()));
        assert_eq!(a, b);
        assert_ne!(a, format!("{before:?}"));
    }
    assert_eq!(format!("{:?}", base.score("Say wolf 4 times.").unwrap()), format!("{before:?}"));
}
