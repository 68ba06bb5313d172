//! Upcycled checkpoints: the function of the dense model, megatron-core's layout, and errors.

use std::{collections::HashMap, fs, path::Path};

use candle_core::{DType, Device, Tensor};
use candlewick_model::{
    Config, Model, MoeLayerFreq, ParamSpec, UpcycledExperts, UpcycledRouter, Upcycling, UpcyclingOutput,
    checkpoint::{AuxiliaryFiles, Checkpoint, CheckpointExport, ExpertTensors},
};
use candlewick_ops::ScoreFunction;
use serde_json::{Map, Value, json};

use crate::tiny::{Reference, Tiny, assert_close, fixture};

fn experts([n_experts, top_k, granularity]: [usize; 3]) -> UpcycledExperts {
    let layer_freq = MoeLayerFreq::Every(1);
    UpcycledExperts { n_experts, top_k, granularity, layer_freq, router: UpcycledRouter::default() }
}

/// Copies a fixture and replaces keys of its config.json.
fn dense(root: &Path, name: &str, keys: Value) -> std::path::PathBuf {
    let folder = root.join(format!("dense-{name}"));
    fs::create_dir_all(&folder).unwrap();
    fs::copy(fixture(name).join("model.safetensors"), folder.join("model.safetensors")).unwrap();
    let mut config: Map<String, Value> = read_json(&fixture(name).join("config.json"));
    config.extend(keys.as_object().unwrap().clone());
    fs::write(folder.join("config.json"), Value::Object(config).to_string()).unwrap();
    folder
}

fn read_json(path: &Path) -> Map<String, Value> {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn upcycle(dense: &Path, output: &Path, sizes: [usize; 3], dtype: Option<DType>) {
    let upcycling = Upcycling::open(dense, experts(sizes), 7).unwrap();
    let report = upcycling.write(&UpcyclingOutput { folder: output, dtype, shard_bytes: 4000 }, &|_, _| ()).unwrap();
    assert!(report.n_params > 0 && report.expert_size > 0);
    let written = Checkpoint::open(output).unwrap().n_bytes() as u64;
    assert_eq!(upcycling.n_bytes(dtype), written);
}

/// Compares the logits of upcycled models with those of the dense model. Weights keep the dense model's dtype, so the
/// factors of granularities that are powers of two must not round them.
#[track_caller]
fn check_logits(name: &str, keys: Value, family: &str) {
    let root = tempfile::tempdir().unwrap();
    let dense = dense(root.path(), name, keys);
    let reference = Reference::load(name);
    let want = Tiny::load(dense.to_str().unwrap()).logits(&reference.ids, &reference.lengths);
    for (sizes, dtype) in [
        ([4, 1, 1], None),
        ([3, 2, 1], None),
        ([6, 2, 2], None),
        ([8, 4, 4], None),
        ([16, 8, 4], None),
        ([10, 5, 5], Some(DType::F32)),
    ] {
        let output = root.path().join(format!("{sizes:?}"));
        upcycle(&dense, &output, sizes, dtype);
        let tiny = Tiny::load(output.to_str().unwrap());
        assert_eq!(tiny.model.config().family().model_type(), family);
        assert_close(&format!("{name} {sizes:?}"), &tiny.logits(&reference.ids, &reference.lengths), &want);
    }
}

#[test]
fn a_llama_becomes_a_mixtral_with_its_logits() {
    check_logits("llama3", json!({}), "mixtral");
}

#[test]
fn a_mistral_becomes_a_mixtral_with_its_logits() {
    check_logits("mistral", json!({}), "mixtral");
}

#[test]
fn a_qwen2_becomes_a_qwen2_moe_with_a_shared_expert_and_its_logits() {
    check_logits("qwen2", json!({}), "qwen2_moe");
}

#[test]
fn a_qwen2_with_a_window_in_one_layer_keeps_it() {
    let window = json!({
        "use_sliding_window": true, "sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"],
    });
    check_logits("qwen2", window, "qwen2_moe");
}

#[test]
fn a_qwen3_becomes_a_qwen3_moe_with_its_logits() {
    check_logits("qwen3", json!({"use_sliding_window": false, "layer_types": null}), "qwen3_moe");
    let window = json!({"layer_types": ["sliding_attention", "sliding_attention"]});
    check_logits("qwen3", window, "qwen3_moe");
}

/// The weights of a token sum to 1 with every score function. The biases are zeros, under the Hub's name of the router.
#[test]
fn other_score_functions_keep_the_logits_of_the_dense_model() {
    for (name, module) in [("mistral", "block_sparse_moe"), ("qwen2", "mlp")] {
        let reference = Reference::load(name);
        let want = Tiny::load(name).logits(&reference.ids, &reference.lengths);
        for score in [ScoreFunction::Sigmoid, ScoreFunction::SqrtSoftplus] {
            let root = tempfile::tempdir().unwrap();
            let router = UpcycledRouter { score, expert_bias: true };
            let upcycling =
                Upcycling::open(&fixture(name), UpcycledExperts { router, ..experts([8, 4, 2]) }, 7).unwrap();
            let output = UpcyclingOutput { folder: root.path(), dtype: None, shard_bytes: 1 << 20 };
            upcycling.write(&output, &|_, _| ()).unwrap();
            let tiny = Tiny::load(root.path().to_str().unwrap());
            let moe = tiny.model.config().moe().unwrap();
            assert_eq!((moe.router.score, moe.expert_bias), (score, true));
            assert_close(&format!("{name} {score:?}"), &tiny.logits(&reference.ids, &reference.lengths), &want);
            let tensors = candle_core::safetensors::load(root.path().join("model.safetensors"), &Device::Cpu).unwrap();
            let bias = &tensors[&format!("model.layers.0.{module}.gate.e_score_correction_bias")];
            assert_eq!((bias.dims(), bias.dtype()), (&[8][..], DType::F32));
        }
    }
    let refused = |router, sizes| {
        let experts = UpcycledExperts { router, ..experts(sizes) };
        Upcycling::open(&fixture("mistral"), experts, 7).map(drop).unwrap_err().to_string()
    };
    let sigmoid = UpcycledRouter { score: ScoreFunction::Sigmoid, expert_bias: false };
    assert!(refused(sigmoid, [4, 1, 1]).contains("sigmoid scores need num_experts_per_tok of at least 2"));
    let softmax = UpcycledRouter { score: ScoreFunction::Softmax, expert_bias: true };
    assert!(refused(softmax, [4, 2, 1]).contains("expert biases need the router score function sigmoid"));
}

/// Dense layers keep the MLPs of the dense model. Qwen's families have keys for them.
#[test]
fn a_pattern_of_layers_keeps_the_logits_of_the_dense_model() {
    for (name, family, sizes) in
        [("mistral", "mixtral", [8, 2, 1]), ("qwen2", "qwen2_moe", [8, 4, 2]), ("qwen3", "qwen3_moe", [8, 4, 2])]
    {
        let root = tempfile::tempdir().unwrap();
        let keys = if name == "qwen3" { json!({"use_sliding_window": false, "layer_types": null}) } else { json!({}) };
        let folder = dense(root.path(), name, keys);
        let reference = Reference::load(name);
        let dense = Tiny::load(folder.to_str().unwrap());
        let n_layers = dense.model.config().n_layers();
        let pattern: Vec<bool> = (0..n_layers).map(|layer_idx| layer_idx == n_layers - 1).collect();
        for layer_freq in [MoeLayerFreq::Every(2), MoeLayerFreq::Pattern(pattern.clone())] {
            let want = match &layer_freq {
                MoeLayerFreq::Every(n) => (0..n_layers).map(|layer_idx| layer_idx % n == 0).collect(),
                MoeLayerFreq::Pattern(pattern) => pattern.clone(),
            };
            let output = root.path().join(format!("{layer_freq:?}"));
            let experts = UpcycledExperts { layer_freq, ..experts(sizes) };
            let upcycling = Upcycling::open(&folder, experts, 7).unwrap();
            let files = UpcyclingOutput { folder: &output, dtype: None, shard_bytes: 1 << 20 };
            let report = upcycling.write(&files, &|_, _| ()).unwrap();
            let tiny = Tiny::load(output.to_str().unwrap());
            let config = tiny.model.config();
            let n_moe_layers = want.iter().filter(|has_experts| **has_experts).count();
            assert_eq!((config.family().model_type(), &config.moe().unwrap().layers), (family, &want));
            assert_eq!((report.n_moe_layers, report.n_layers), (n_moe_layers, n_layers));
            let warning = config.transformers_warning();
            assert_eq!(warning.is_some(), family == "mixtral");
            assert!(warning.is_none_or(|warning| warning.contains("moe_layer_freq") && warning.contains("at random")));
            let what = format!("{name} {want:?}");
            let [found, want] = [&tiny, &dense].map(|tiny| tiny.logits(&reference.ids, &reference.lengths));
            assert_close(&what, &found, &want);
        }
    }
    let sliced = UpcycledExperts { layer_freq: MoeLayerFreq::Every(2), ..experts([8, 4, 2]) };
    let message = Upcycling::open(&fixture("mistral"), sliced, 7).map(drop).unwrap_err().to_string();
    assert!(message.starts_with("--moe-layer-freq: Mixtral has one width"), "{message}");
    assert!(message.contains("use --granularity 1"), "{message}");
}

#[test]
fn upcycled_logits_equal_those_of_transformers_dense_model() {
    let root = tempfile::tempdir().unwrap();
    for name in ["llama3", "mistral", "qwen2"] {
        let output = root.path().join(name);
        upcycle(&fixture(name), &output, [8, 4, 2], None);
        let reference = Reference::load(name);
        let logits = Tiny::load(output.to_str().unwrap()).logits(&reference.ids, &reference.lengths);
        assert_close(name, &logits, reference.get("logits"));
    }
}

/// Writes a model of one layer whose MLP is the dense one of the megatron fixture.
fn megatron_dense(folder: &Path, fixture: &HashMap<String, Tensor>) {
    let config = json!({
        "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "vocab_size": 8,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    });
    let model = Model::new(Config::from_json(config).unwrap(), None).unwrap();
    let config = model.config();
    let export = CheckpointExport {
        folder,
        config,
        auxiliary_files: AuxiliaryFiles::default(),
        dtype: DType::F32,
        shard_bytes: 1 << 30,
        expert_tensors: ExpertTensors::Separate,
    };
    let value = |param: &ParamSpec| match param.name.strip_prefix("model.layers.0.mlp.") {
        Some("gate_proj.weight") => fixture["dense.fc1"].narrow(0, 0, 20),
        Some("up_proj.weight") => fixture["dense.fc1"].narrow(0, 20, 20),
        Some("down_proj.weight") => Ok(fixture["dense.fc2"].clone()),
        _ => Tensor::zeros(param.shape.as_slice(), DType::F32, &Device::Cpu),
    };
    export.save(model.base_params(), value).unwrap();
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// Returns the common factor between two tensors; the test fails if there is none.
#[track_caller]
fn ratio(what: &str, ours: &Tensor, theirs: &Tensor) -> f64 {
    let ratio = f64::from(values(ours)[0]) / f64::from(values(theirs)[0]);
    assert_close(what, ours, &theirs.affine(ratio, 0.0).unwrap());
    ratio
}

#[test]
fn experts_are_megatrons_slices_and_their_factors_multiply_to_megatrons() {
    let theirs = candle_core::safetensors::load(fixture("upcycling.safetensors"), &Device::Cpu).unwrap();
    let root = tempfile::tempdir().unwrap();
    let dense = root.path().join("dense");
    megatron_dense(&dense, &theirs);
    for sizes @ [n_experts, _, granularity] in [[3, 2, 1], [6, 2, 2], [4, 4, 2], [8, 4, 4], [10, 5, 5]] {
        let of_megatron = |name: &str| &theirs[&format!("g{granularity}_e{n_experts}.{name}")];
        let output = root.path().join(format!("{sizes:?}"));
        upcycle(&dense, &output, sizes, None);
        let ours = Checkpoint::open(&output).unwrap();
        let read = |name: &str, shape: [usize; 2]| {
            ours.tensor(&format!("model.layers.0.mlp.{name}.weight"), &shape, DType::F32, &Device::Cpu).unwrap()
        };
        let f = 20 / granularity;
        for i in 0..n_experts {
            let (fc1, fc2) = (of_megatron("fc1").get(i).unwrap(), of_megatron("fc2").get(i).unwrap());
            let of = |name: &str, shape, want: &Tensor| {
                ratio(&format!("{name} {i} of {sizes:?}"), &read(&format!("experts.{i}.{name}"), shape), want)
            };
            let factors = [
                of("gate_proj", [f, 16], &fc1.narrow(0, 0, f).unwrap()),
                of("up_proj", [f, 16], &fc1.narrow(0, f, f).unwrap()),
                of("down_proj", [16, f], &fc2),
            ];
            assert!((factors.iter().product::<f64>() - 1.0).abs() < 1e-5, "{factors:?}");
            let scale = of_megatron("scale").to_scalar::<f32>().unwrap();
            assert!((factors[0] * f64::from(scale) - 1.0).abs() < 1e-5, "the gate keeps its values");
        }
        let rows = read("gate", [n_experts, 16]).to_vec2::<f32>().unwrap();
        let their_rows = of_megatron("router").to_vec2::<f32>().unwrap();
        for (i, j) in (0..n_experts).flat_map(|i| (0..n_experts).map(move |j| (i, j))) {
            assert_eq!(rows[i] == rows[j], their_rows[i] == their_rows[j], "rows {i} and {j} of {sizes:?}");
        }
    }
}

#[test]
fn values_of_the_router_depend_on_the_seed_and_have_the_models_deviation() {
    let root = tempfile::tempdir().unwrap();
    let router = |seed: u64| {
        let output = root.path().join(seed.to_string());
        let upcycling = Upcycling::open(&fixture("qwen2"), experts([64, 2, 1]), seed).unwrap();
        let settings = UpcyclingOutput { folder: &output, dtype: Some(DType::F32), shard_bytes: 1 << 30 };
        upcycling.write(&settings, &|_, _| ()).unwrap();
        let checkpoint = Checkpoint::open(&output).unwrap();
        values(&checkpoint.tensor("model.layers.0.mlp.gate.weight", &[64, 16], DType::F32, &Device::Cpu).unwrap())
    };
    let (one, two) = (router(1), router(2));
    assert_ne!(one, two);
    let deviation = (one.iter().map(|x| x * x).sum::<f32>() / one.len() as f32).sqrt();
    assert!((deviation / 0.2 - 1.0).abs() < 0.1, "{deviation}, want initializer_range 0.2");
}

#[test]
fn a_config_names_every_value_that_the_family_of_experts_would_default_otherwise() {
    let root = tempfile::tempdir().unwrap();
    let folder = dense(root.path(), "llama3", json!({"rope_theta": null, "my_key": [1]}));
    fs::write(folder.join("generation_config.json"), "{\"top_p\": 0.5}").unwrap();
    fs::write(folder.join("tokenizer.json"), "{}").unwrap();
    let output = root.path().join("out");
    upcycle(&folder, &output, [6, 2, 2], None);
    let config = read_json(&output.join("config.json"));
    for (key, value) in [
        ("architectures", json!(["MixtralForCausalLM"])),
        ("model_type", json!("mixtral")),
        ("num_local_experts", json!(6)),
        ("num_experts_per_tok", json!(2)),
        ("intermediate_size", json!(10)),
        ("rope_theta", json!(10000.0)),
        ("sliding_window", json!(null)),
        ("rms_norm_eps", json!(1e-6)),
        ("tie_word_embeddings", json!(true)),
        ("router_aux_loss_coef", json!(0.001)),
        ("torch_dtype", json!("bfloat16")),
        ("my_key", json!([1])),
    ] {
        assert_eq!(config[key], value, "{key}");
    }
    assert!(output.join("generation_config.json").is_file() && output.join("tokenizer.json").is_file());
    let shards: Vec<_> = fs::read_dir(&output).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(shards.iter().filter(|name| name.to_string_lossy().starts_with("model-0")).count() > 2, "{shards:?}");
}

#[track_caller]
fn refused(name: &str, keys: Value, sizes: [usize; 3], phrases: &[&str]) {
    let root = tempfile::tempdir().unwrap();
    let error = Upcycling::open(&dense(root.path(), name, keys), experts(sizes), 0).map(drop).unwrap_err().to_string();
    phrases.iter().for_each(|phrase| assert!(error.contains(phrase), "{phrase:?} is not in {error:?}"));
}

#[test]
fn sizes_that_do_not_divide_are_refused_with_the_rule() {
    let of = |sizes, phrases: &[&str]| refused("mistral", json!({}), sizes, phrases);
    of([4, 5, 1], &["num_experts_per_tok 5", "between 1 and num_experts 4"]);
    of([4, 0, 1], &["num_experts_per_tok 0"]);
    of([4, 2, 0], &["granularity 0"]);
    of([6, 3, 3], &["--granularity 3: the dense MLP's intermediate_size 20 cannot be divided into 3 equal slices"]);
    of([6, 4, 4], &["--granularity 4: --num-experts 6 is not a multiple of 4"]);
    of([8, 2, 4], &["--granularity 4: --num-experts-per-tok 2 is not a multiple of 4: a token uses whole copies"]);
    of([1024, 2, 1], &["num_experts 1024 must be at most 512"]);
    let root = tempfile::tempdir().unwrap();
    let router = UpcycledRouter { expert_bias: true, ..UpcycledRouter::default() };
    let biased = UpcycledExperts { router, ..experts([4, 2, 1]) };
    let error =
        Upcycling::open(&dense(root.path(), "mistral", json!({})), biased, 0).map(drop).unwrap_err().to_string();
    assert!(error.contains("expert biases need the router score function sigmoid or sqrtsoftplus"), "{error}");
    // The options are at fault, and not the config of the dense model.
    assert!(!error.contains("config.json"), "{error}");
}

/// The option is at fault, and not the config of the dense model.
#[test]
fn a_list_of_layers_with_another_length_names_the_option() {
    for (layers, phrase) in [
        (vec![true, false, true], "the list has 3 entries, but the model has 2 layers"),
        (vec![false, false], "no layer has experts"),
    ] {
        let experts = UpcycledExperts { layer_freq: MoeLayerFreq::Pattern(layers), ..experts([4, 2, 1]) };
        let error = Upcycling::open(&fixture("mistral"), experts, 0).map(drop).unwrap_err().to_string();
        assert!(error.starts_with("--moe-layer-freq: ") && error.contains(phrase), "{error}");
        assert!(!error.contains("config.json"), "{error}");
    }
}

#[test]
fn models_without_a_family_of_experts_are_refused() {
    let sizes = [4, 2, 1];
    refused("llama", json!({}), sizes, &["mlp_bias", "experts have no biases"]);
    refused("llama3", json!({"attention_bias": true}), sizes, &["attention_bias", "Mixtral"]);
    refused("qwen3", json!({}), sizes, &["sliding_window", "Qwen3Moe", "in all layers or in none"]);
    refused("mixtral", json!({}), sizes, &["Mixtral is a mixture of experts already"]);
    refused("dots1", json!({}), sizes, &["Dots1 is a mixture of experts already"]);
}

#[test]
fn an_output_folder_with_files_is_refused() {
    let root = tempfile::tempdir().unwrap();
    fs::write(root.path().join("notes.txt"), "mine").unwrap();
    let upcycling = Upcycling::open(&fixture("mistral"), experts([4, 2, 1]), 0).unwrap();
    let output = UpcyclingOutput { folder: root.path(), dtype: None, shard_bytes: 1 << 30 };
    assert!(upcycling.write(&output, &|_, _| ()).unwrap_err().to_string().contains("not empty"));
    assert_eq!(fs::read_to_string(root.path().join("notes.txt")).unwrap(), "mine");
}
