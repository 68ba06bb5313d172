//! Model folders: bit-equal round trips, and errors for malformed folders.

use std::{
    fs,
    path::{Path, PathBuf},
};

use candle_core::{DType, Device, Result, Tensor};
use candlewick_model::{
    Config, Model, ParamSpec,
    checkpoint::{AuxiliaryFiles, Checkpoint, CheckpointExport, ExpertTensors},
};
use serde_json::{Value, json};

use crate::tiny::fixture;

struct Source {
    model: Model,
    checkpoint: Checkpoint,
}

impl Source {
    fn open(name: &str) -> Self {
        let model = Model::new(Config::read(&fixture(name)).unwrap(), None).unwrap();
        Self { model, checkpoint: Checkpoint::open(&fixture(name)).unwrap() }
    }

    fn read(&self, param: &ParamSpec, dtype: DType) -> Tensor {
        self.checkpoint.tensor(&param.name, &param.shape, dtype, &Device::Cpu).unwrap()
    }

    fn save(&self, folder: &Path, dtype: DType, shard_bytes: u64) {
        let config = self.model.config();
        let export = CheckpointExport {
            folder,
            config,
            auxiliary_files: AuxiliaryFiles::default(),
            dtype,
            shard_bytes,
            expert_tensors: ExpertTensors::Separate,
        };
        export.save(self.model.base_params(), |param| Ok(self.read(param, DType::F32))).unwrap();
    }
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    let exact = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
    exact.to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

/// Returns the kilobytes of a mapped file that are in this process's memory.
#[cfg(target_os = "linux")]
fn resident_kilobytes(file: &Path) -> usize {
    let maps = fs::read_to_string("/proc/self/smaps").unwrap();
    let of_file = maps.lines().skip_while(|line| !line.ends_with(file.to_str().unwrap()));
    let rss = of_file.skip(1).find_map(|line| line.strip_prefix("Rss:")).unwrap();
    rss.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
#[cfg(target_os = "linux")]
fn pages_of_a_tensor_leave_the_memory_once_it_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let large = Tensor::zeros((1 << 20, 4), DType::F32, &Device::Cpu).unwrap();
    candle_core::safetensors::save(&[("large", large)].into(), &path).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    for _ in 0..2 {
        let read = checkpoint.tensor("large", &[1 << 20, 4], DType::F32, &Device::Cpu).unwrap();
        assert_eq!(read.elem_count(), 4 << 20);
        assert!(resident_kilobytes(&path) < 1024, "{} KiB", resident_kilobytes(&path));
    }
}

/// A bias of NaN would neither select nor refuse an expert, and so would change outputs silently.
#[test]
fn an_expert_bias_that_is_no_number_is_refused() {
    let source = Source::open("dots1");
    let bias = source.model.base_params().find(|param| param.is_buffer()).unwrap();
    let mut tensors = candle_core::safetensors::load(fixture("dots1").join("model.safetensors"), &Device::Cpu).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for (value, is_read) in [(f32::NEG_INFINITY, true), (f32::NAN, false)] {
        let mut values: Vec<f32> = vec![0.0; bias.numel()];
        values[1] = value;
        tensors.insert(bias.name.clone(), Tensor::new(values, &Device::Cpu).unwrap());
        candle_core::safetensors::save(&tensors, folder.path().join("model.safetensors")).unwrap();
        let read = Checkpoint::open(folder.path()).unwrap().param(bias, DType::F32, &Device::Cpu);
        assert_eq!(read.is_ok(), is_read, "{value}");
        if let Err(error) = read {
            let error = error.to_string();
            assert!(error.contains(&bias.name) && error.contains("has NaN") && error.contains("download"), "{error}");
        }
    }
}

#[test]
fn a_sharded_checkpoint_is_read_back_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["llama", "mistral", "qwen2"] {
        let source = Source::open(name);
        for (dtype, shard_bytes) in [(DType::F32, 3000), (DType::BF16, 1), (DType::F16, 1 << 30)] {
            let target = folder.path().join("out");
            source.save(&target, dtype, shard_bytes);
            let again = Checkpoint::open(&target).unwrap();
            assert!(again.check(source.model.base_params()).unwrap().is_empty());
            let config = Config::read(&target).unwrap();
            assert_eq!(config.dtype(), Some(dtype));
            for param in source.model.base_params() {
                let want = source.read(param, DType::F32).to_dtype(dtype).unwrap();
                let got = again.tensor(&param.name, &param.shape, dtype, &Device::Cpu).unwrap();
                assert_eq!(got.dtype(), dtype);
                assert_eq!(bits(&got), bits(&want), "{} as {dtype:?}", param.name);
            }
        }
    }
}

#[test]
fn shards_are_bounded_indexed_and_named_as_transformers_names_them() {
    let (folder, source) = (tempfile::tempdir().unwrap(), Source::open("llama"));
    let target = folder.path().join("out");
    source.save(&target, DType::F32, 6000);
    let index: Value = serde_json::from_slice(&fs::read(target.join("model.safetensors.index.json")).unwrap()).unwrap();
    let map = index["weight_map"].as_object().unwrap();
    assert_eq!(map.len(), source.model.base_params().count());
    let shards = map.values().map(|v| v.as_str().unwrap()).collect::<std::collections::BTreeSet<_>>();
    assert!(shards.len() > 2);
    for (i, shard) in shards.iter().enumerate() {
        assert_eq!(**shard, format!("model-{:05}-of-{:05}.safetensors", i + 1, shards.len()));
        assert!(fs::metadata(target.join(shard)).unwrap().len() < 6000 + 2000, "a header and the tensors");
    }
    let export = CheckpointExport {
        folder: &target,
        config: source.model.config(),
        auxiliary_files: AuxiliaryFiles::default(),
        dtype: DType::F32,
        shard_bytes: 6000,
        expert_tensors: ExpertTensors::Separate,
    };
    assert_eq!(index["metadata"]["total_size"], export.n_bytes(source.model.base_params()));
}

#[test]
fn tied_weights_are_written_once_and_configs_keep_their_keys() {
    let (folder, source) = (tempfile::tempdir().unwrap(), Source::open("llama3"));
    let target = folder.path().join("out");
    source.save(&target, DType::BF16, 1 << 30);
    assert!(Checkpoint::open(&target).unwrap().names().all(|name| name != "lm_head.weight"));
    let json =
        |folder: &Path| -> Value { serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap() };
    assert_eq!(json(&target), json(&fixture("llama3")));
}

/// Returns the bits of each tensor of a checkpoint, by name.
fn contents(folder: &Path) -> std::collections::BTreeMap<String, (Vec<usize>, Vec<u32>)> {
    let tensors = candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu).unwrap();
    tensors.iter().map(|(name, tensor)| (name.clone(), (tensor.dims().to_vec(), bits(tensor)))).collect()
}

/// Returns the folder that transformers wrote with `save_original_format=False`.
fn fused_fixture(name: &str) -> PathBuf {
    if name == "qwen3_moe" { fixture(name) } else { fixture("fused").join(name) }
}

#[test]
fn experts_are_written_as_on_the_hub_or_fused_as_in_transformers() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["qwen3_moe", "mixtral", "qwen2_moe", "olmoe", "dots1", "glm4_moe"] {
        let source = Source::open(name);
        let of_transformers = Checkpoint::open(&fused_fixture(name)).unwrap();
        assert!(of_transformers.check(source.model.base_params()).unwrap().is_empty(), "{name}");
        let value = |param: &ParamSpec| Ok(source.checkpoint.param(param, DType::F32, &Device::Cpu).unwrap());
        let [separate, fused] = [ExpertTensors::Separate, ExpertTensors::Fused].map(|expert_tensors| {
            let target = folder.path().join(format!("{name}-{expert_tensors:?}"));
            let export = CheckpointExport {
                folder: &target,
                config: source.model.config(),
                auxiliary_files: AuxiliaryFiles::default(),
                dtype: DType::F32,
                shard_bytes: 1 << 30,
                expert_tensors,
            };
            export.save(source.model.base_params(), value).unwrap();
            let again = Checkpoint::open(&target).unwrap();
            assert!(again.check(source.model.base_params()).unwrap().is_empty());
            for param in source.model.base_params() {
                let want = bits(&value(param).unwrap());
                for checkpoint in [&again, &of_transformers] {
                    assert_eq!(
                        bits(&checkpoint.param(param, DType::F32, &Device::Cpu).unwrap()),
                        want,
                        "{}",
                        param.name
                    );
                }
            }
            contents(&target)
        });
        assert!(separate.len() > fused.len());
        assert_eq!(contents(&fused_fixture(name)), fused, "{name}");
        if name != "qwen3_moe" {
            assert_eq!(contents(&fixture(name)), separate, "{name}");
        }
    }
}

#[test]
fn expert_biases_stay_in_f32_in_a_checkpoint_in_bf16() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["dots1", "glm4_moe"] {
        let (source, target) = (Source::open(name), folder.path().join(name));
        // Biases that bf16 would round.
        let value = |param: &ParamSpec| {
            let value = source.checkpoint.param(param, DType::F32, &Device::Cpu).unwrap();
            if param.is_buffer() { value.affine(1.0, 1.0 / 3.0) } else { Ok(value) }
        };
        let export = CheckpointExport {
            folder: &target,
            config: source.model.config(),
            auxiliary_files: AuxiliaryFiles::default(),
            dtype: DType::BF16,
            shard_bytes: 1 << 30,
            expert_tensors: ExpertTensors::Separate,
        };
        export.save(source.model.base_params(), value).unwrap();
        let on_disk = candle_core::safetensors::load(target.join("model.safetensors"), &Device::Cpu).unwrap();
        let again = Checkpoint::open(&target).unwrap();
        let mut n_biases = 0;
        for param in source.model.base_params().filter(|param| param.is_buffer()) {
            assert!(param.name.ends_with("e_score_correction_bias"), "{}", param.name);
            assert_eq!(on_disk[&param.name].dtype(), DType::F32, "{}", param.name);
            let want = value(param).unwrap();
            assert_ne!(bits(&want), bits(&want.to_dtype(DType::BF16).unwrap()));
            assert_eq!(bits(&again.param(param, DType::F32, &Device::Cpu).unwrap()), bits(&want));
            n_biases += 1;
        }
        let n_in_f32 = on_disk.values().filter(|tensor| tensor.dtype() == DType::F32).count();
        assert_eq!((n_biases, n_in_f32), (2, 2), "{name}");
    }
}

#[test]
fn companions_are_copied_from_the_first_folder_that_has_them() {
    let (folder, source) = (tempfile::tempdir().unwrap(), Source::open("qwen2"));
    let (a, b, target) = (folder.path().join("a"), folder.path().join("b"), folder.path().join("out"));
    for (dir, name) in [(&a, "tokenizer.json"), (&b, "tokenizer.json"), (&b, "generation_config.json"), (&b, "x.py")] {
        fs::create_dir_all(dir).unwrap();
        fs::write(dir.join(name), dir.to_str().unwrap()).unwrap();
    }
    let export = CheckpointExport {
        folder: &target,
        config: source.model.config(),
        auxiliary_files: AuxiliaryFiles { folders: &[&a, &b], chat_template: None, files: &[] },
        dtype: DType::F32,
        shard_bytes: 1 << 30,
        expert_tensors: ExpertTensors::Separate,
    };
    export.save(source.model.base_params(), |param| Ok(source.read(param, DType::F32))).unwrap();
    assert_eq!(fs::read_to_string(target.join("tokenizer.json")).unwrap(), a.to_str().unwrap());
    assert!(target.join("generation_config.json").is_file() && !target.join("x.py").exists());

    fs::write(a.join("chat_template.json"), "{}").unwrap();
    let auxiliary_files = AuxiliaryFiles { folders: &[&a], chat_template: Some("{{ messages }}"), files: &[] };
    let export = CheckpointExport { auxiliary_files, ..export };
    export.save(source.model.base_params(), |param| Ok(source.read(param, DType::F32))).unwrap();
    assert_eq!(fs::read_to_string(target.join("chat_template.jinja")).unwrap(), "{{ messages }}");
    assert!(!target.join("chat_template.json").exists(), "the template of the folder is not the one trained with");
}

/// A model folder must not carry `/etc/shadow` into an export; in the Hub's cache every file is a link.
#[test]
fn a_companion_may_be_a_link_within_its_folder_or_into_the_hubs_cache() {
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name);
    let snapshot = path("models--a--b/snapshots/0123");
    for folder in [&snapshot, &path("models--a--b/blobs"), &path("plain")] {
        fs::create_dir_all(folder).unwrap();
    }
    for file in ["models--a--b/blobs/abc", "plain/real.json", "secret"] {
        fs::write(path(file), "{}").unwrap();
    }
    let check = |folder: &Path, target: &str| {
        let link = folder.join("vocab.json");
        let _ = fs::remove_file(&link);
        std::os::unix::fs::symlink(target, link).unwrap();
        AuxiliaryFiles { folders: &[folder], chat_template: None, files: &[] }
            .check()
            .map_err(|error| error.to_string())
    };
    assert_eq!(check(&snapshot, "../../blobs/abc"), Ok(()));
    assert_eq!(check(&path("plain"), "real.json"), Ok(()));
    for (folder, target) in [(path("plain"), "../secret"), (snapshot, "../../../secret")] {
        let said = check(&folder, target).unwrap_err();
        assert!(said.contains("vocab.json") && said.contains("outside of its folder"), "{said}");
    }
}

#[test]
fn a_failed_write_leaves_the_old_folder() {
    let (folder, source) = (tempfile::tempdir().unwrap(), Source::open("qwen2"));
    let target = folder.path().join("out");
    source.save(&target, DType::F32, 1 << 30);
    let before = fs::read(target.join("model.safetensors")).unwrap();
    let mut n_asked = 0;
    let export = CheckpointExport {
        folder: &target,
        config: source.model.config(),
        auxiliary_files: AuxiliaryFiles::default(),
        dtype: DType::F16,
        shard_bytes: 1000,
        expert_tensors: ExpertTensors::Separate,
    };
    let fetch = |param: &ParamSpec| -> Result<Tensor> {
        n_asked += 1;
        if n_asked > 3 {
            let value = Tensor::full(7e4_f32, param.shape.as_slice(), &Device::Cpu)?;
            return Ok(value);
        }
        Ok(source.read(param, DType::F32))
    };
    let message = export.save(source.model.base_params(), fetch).unwrap_err().to_string();
    assert!(message.contains("float16") && message.contains("70000"), "{message}");
    assert_eq!(fs::read(target.join("model.safetensors")).unwrap(), before);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

/// Writes tensors to `folder`/`file` without any of the crate's checks.
fn write(folder: &Path, file: &str, tensors: Vec<(&str, Tensor)>) {
    let tensors = tensors.into_iter().map(|(name, t)| (name.to_string(), t)).collect();
    candle_core::safetensors::save(&tensors, folder.join(file)).unwrap();
}

fn zeros(shape: &[usize]) -> Tensor {
    Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap()
}

fn specs() -> Vec<ParamSpec> {
    let source = Source::open("llama3");
    source.model.units()[0].params.clone()
}

#[track_caller]
fn refused(folder: &Path, parts: &[&str]) {
    let checked = Checkpoint::open(folder).and_then(|checkpoint| checkpoint.check(&specs()));
    let message = checked.unwrap_err().to_string();
    for part in parts {
        assert!(message.contains(part), "`{message}` lacks `{part}`");
    }
}

#[test]
fn wrong_tensors_are_named_with_both_shapes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    refused(path, &["neither model.safetensors nor"]);
    refused(&path.join("none"), &["no such folder"]);
    fs::write(path.join("pytorch_model.bin"), "").unwrap();
    refused(path, &["pytorch_model.bin", "transformers"]);
    write(path, "model.safetensors", vec![("model.embed_tokens.weight", zeros(&[41, 16]))]);
    refused(path, &["model.safetensors", "model.embed_tokens.weight", "[41, 16]", "[40, 16]"]);
    let ids = zeros(&[40, 16]).to_dtype(DType::I64).unwrap();
    write(path, "model.safetensors", vec![("model.embed_tokens.weight", ids)]);
    refused(path, &["model.embed_tokens.weight", "I64", "BF16"]);
    write(path, "model.safetensors", vec![("embed_tokens.weight", zeros(&[40, 16]))]);
    refused(path, &["1 tensor is missing", "model.embed_tokens.weight"]);
    fs::write(path.join("model.safetensors"), b"\x40\0\0\0\0\0\0\0{").unwrap();
    refused(path, &["model.safetensors", "cut short"]);
}

#[test]
fn unused_tensors_are_reported_except_harmless_ones() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = vec![
        ("model.embed_tokens.weight", zeros(&[40, 16])),
        ("lm_head.weight", zeros(&[40, 16])),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", zeros(&[4])),
        ("model.extra", zeros(&[1])),
    ];
    write(folder.path(), "model.safetensors", tensors);
    let notes = Checkpoint::open(folder.path()).unwrap().check(&specs()).unwrap();
    assert_eq!(notes, ["1 tensor is not used: model.extra"]);
}

#[test]
fn an_index_must_name_files_that_have_its_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let index = |map: Value| {
        let text = json!({"metadata": {}, "weight_map": map}).to_string();
        fs::write(folder.path().join("model.safetensors.index.json"), text).unwrap();
    };
    write(folder.path(), "a.safetensors", vec![("model.embed_tokens.weight", zeros(&[40, 16])), ("x", zeros(&[1]))]);
    index(json!({"model.embed_tokens.weight": "b.safetensors"}));
    refused(folder.path(), &["index.json", "b.safetensors", "not in the folder"]);
    index(json!({"model.embed_tokens.weight": "../a.safetensors"}));
    refused(folder.path(), &["index.json", "../a.safetensors"]);
    index(json!({"model.embed_tokens.weight": "a.safetensors", "y": "a.safetensors"}));
    refused(folder.path(), &["index.json", "`y`", "a.safetensors"]);
    index(json!({"model.embed_tokens.weight": "a.safetensors"}));
    let notes = Checkpoint::open(folder.path()).unwrap().check(&specs()).unwrap();
    assert!(notes.is_empty(), "what the index leaves out is not there: {notes:?}");
}
