//! llama.cpp's graph of exported files compared with the model, and of damaged files.

use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Tensor};
use candlewick_model::{Config, GgufExport, GgufType, MergedModel, Model, ModelError, ParamSpec, ParamValues};
use candlewick_text::tokenizer::{GgufTokenType, GgufVocabulary};
use serde_json::{Value, json};

use super::*;

/// Values that follow from a parameter's name. Norms are about 1.
struct Noise;

impl ParamValues for Noise {
    fn value(&self, param: &ParamSpec) -> std::result::Result<Tensor, ModelError> {
        let key = param.name.bytes().fold(1u32, |key, byte| key.wrapping_mul(31).wrapping_add(u32::from(byte)));
        let noise = |i: u32| {
            let bits = (i ^ key).wrapping_mul(2_654_435_761);
            (bits ^ (bits >> 15)) as f32 / u32::MAX as f32 - 0.5
        };
        let (offset, scale) = if param.name.ends_with("norm.weight") { (1.0, 0.5) } else { (0.0, 0.6) };
        let values: Vec<f32> = (0..param.numel() as u32).map(|i| offset + scale * noise(i)).collect();
        Ok(Tensor::from_vec(values, param.shape.as_slice(), &Device::Cpu)?)
    }

    fn dtype(&self) -> Option<DType> {
        Some(DType::F32)
    }
}

/// Returns the config of a model of the GGUF fixtures.
fn config(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/gguf.json");
    let recorded: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    recorded["models"][name]["config"].clone()
}

/// An exported file, and the logits of its source.
struct ExportedFile {
    folder: tempfile::TempDir,
    source: PromptLogits,
}

impl ExportedFile {
    fn new(config: Value, file_type: GgufType) -> Self {
        let model = Model::new(Config::from_json(config).unwrap(), None).unwrap();
        let n_tokens = model.config().vocab_size();
        let model = MergedModel::new(model, Box::new(Noise), None, Vec::new());
        let vocabulary = GgufVocabulary {
            model: "gpt2",
            pre: "qwen2",
            tokens: (0..n_tokens).map(|i| format!("t{i}")).collect(),
            types: vec![GgufTokenType::Normal; n_tokens],
            scores: None,
            merges: Vec::new(),
            special_ids: Vec::new(),
            adds_bos: false,
            adds_eos: false,
            adds_space_prefix: None,
            chat_templates: Vec::new(),
        };
        let this = Self {
            folder: tempfile::tempdir().unwrap(),
            source: PromptLogits::of(&model, None, &Device::Cpu, &|_, _| ()).unwrap(),
        };
        let export = GgufExport { name: "tiny", vocabulary: &vocabulary, file_type };
        export.write(&model, &this.path(), &|_, _| ()).unwrap();
        this
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("tiny.gguf")
    }

    /// Returns the larger relative norm, of the logits and of the routers.
    fn relative(&self) -> Result<f64> {
        let difference = self.source.compare_gguf(&self.path(), &Device::Cpu, &|_, _| ())?;
        Ok(difference.routing.map_or(difference.relative, |routing| larger(difference.relative, routing.relative)))
    }

    /// Changes the bytes of the file.
    fn edit(&self, change: impl FnOnce(&mut [u8])) {
        let mut bytes = std::fs::read(self.path()).unwrap();
        change(&mut bytes);
        std::fs::write(self.path(), bytes).unwrap();
    }

    /// Changes the bytes of a tensor.
    fn edit_tensor(&self, name: &str, change: impl FnOnce(&mut [u8])) {
        let content = Content::read(&mut std::fs::File::open(self.path()).unwrap()).unwrap();
        let info = &content.tensor_infos[name];
        let start = (content.tensor_data_offset + info.offset) as usize;
        let n_bytes = info.shape.elem_count() / info.ggml_dtype.block_size() * info.ggml_dtype.type_size();
        self.edit(|bytes| change(&mut bytes[start..start + n_bytes]));
    }
}

/// Returns the position of a text that is in the file once.
fn find(bytes: &[u8], text: &str) -> usize {
    let mut places = bytes.windows(text.len()).enumerate().filter(|(_, window)| *window == text.as_bytes());
    let place = places.next().unwrap().0;
    assert!(places.next().is_none(), "{text} is there twice");
    place
}

/// Returns the config of a model with wider heads and a long context.
fn long_config(name: &str, fields: &Value) -> Value {
    let mut config = config(name);
    let long =
        json!({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 131_072});
    for fields in [&long, fields] {
        config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    }
    config
}

/// Returns the config of a small Llama with the scaling of Llama 3.2.
fn llama_3_2() -> Value {
    let scaling = json!({
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    });
    long_config("llama3", &json!({"rope_theta": 5e5, "rope_scaling": scaling}))
}

/// Returns the config of a small Qwen3 with the scaling of its model card.
fn qwen3_yarn() -> Value {
    let scaling = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768});
    long_config("qwen3", &json!({"rope_theta": 1e6, "rope_scaling": scaling}))
}

#[test]
fn llama_cpps_graph_of_a_file_has_the_logits_of_the_model() {
    let models =
        ["llama", "llama3", "linear", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "yarn"];
    for (file_type, bound) in [(GgufType::F32, 1e-5), (GgufType::Bf16, 0.03), (GgufType::Q8_0, 0.1)] {
        for name in models {
            let relative = ExportedFile::new(config(name), file_type).relative().unwrap();
            assert!(relative < bound, "{name}, {file_type}: {relative:.2e}");
        }
    }
}

#[test]
fn llama_cpps_graph_has_the_logits_of_the_model_at_long_distances() {
    for config in [llama_3_2(), qwen3_yarn(), long_config("qwen2", &json!({"rope_theta": 1e6}))] {
        let relative = ExportedFile::new(config.clone(), GgufType::F32).relative().unwrap();
        // A tenth of the tolerance of f32.
        assert!(relative < 1e-4, "{config}: {relative:.2e}");
    }
}

/// Checks that a changed f32 file is an error, or has other logits than rounding explains.
#[track_caller]
fn check_damage(name: &str, damage: impl FnOnce(&ExportedFile)) {
    check_damage_of(config(name), damage);
}

#[track_caller]
fn check_damage_of(config: Value, damage: impl FnOnce(&ExportedFile)) {
    let file = ExportedFile::new(config.clone(), GgufType::F32);
    damage(&file);
    let relative = file.relative().unwrap_or(f64::INFINITY);
    // Ten times the tolerance of f32.
    assert!(relative > 0.01, "{config}: {relative:.2e}");
}

/// Replaces a text of the file by one of the same length.
fn replace(file: &ExportedFile, [from, to]: [&str; 2]) {
    assert_eq!(from.len(), to.len());
    file.edit(|bytes| {
        let place = find(bytes, from);
        bytes[place..place + to.len()].copy_from_slice(to.as_bytes());
    });
}

fn swap_names(file: &ExportedFile, [a, b]: [&str; 2]) {
    file.edit(|bytes| {
        let [place_a, place_b] = [a, b].map(|name| find(bytes, name));
        bytes[place_a..place_a + a.len()].copy_from_slice(b.as_bytes());
        bytes[place_b..place_b + b.len()].copy_from_slice(a.as_bytes());
    });
}

#[test]
fn swapped_tensors_have_other_logits() {
    check_damage("llama", |file| swap_names(file, ["blk.0.ffn_up.weight", "blk.1.ffn_up.weight"]));
    check_damage("llama", |file| swap_names(file, ["blk.0.attn_k.weight", "blk.0.attn_v.weight"]));
    check_damage("qwen3", |file| swap_names(file, ["blk.0.attn_output.weight", "blk.1.attn_output.weight"]));
    check_damage("qwen2_moe", |file| swap_names(file, ["blk.0.ffn_gate_exps.weight", "blk.1.ffn_gate_exps.weight"]));
}

/// Rows of a head in the order of Hugging Face.
#[test]
fn unpermuted_rows_of_a_llama_have_other_logits() {
    for module in ["attn_q", "attn_k"] {
        check_damage("linear", |file| {
            file.edit_tensor(&format!("blk.1.{module}.weight"), |bytes| {
                let (n_row, n_head) = (64 * 4, 16 * 64 * 4);
                for head in bytes.chunks_mut(n_head) {
                    let pairs = head.to_vec();
                    for (i, row) in pairs.chunks(n_row).enumerate() {
                        let to = i / 2 + 8 * (i % 2);
                        head[to * n_row..(to + 1) * n_row].copy_from_slice(row);
                    }
                }
            });
        });
    }
}

#[test]
fn wrong_scaling_of_rope_has_other_logits() {
    check_damage_of(llama_3_2(), |file| replace(file, ["rope_freqs.weight", "rope_freqz.weight"]));
    check_damage_of(llama_3_2(), |file| file.edit_tensor("rope_freqs.weight", |bytes| scale(bytes, 0.5)));
    check_damage_of(llama_3_2(), |file| file.edit_tensor("rope_freqs.weight", |bytes| bytes.rotate_left(64)));
    let renamed = [
        ("rope.scaling.type", "rope.scaling.typo"),
        ("rope.scaling.factor", "rope.scaling.fac_or"),
        ("rope.scaling.original_context_length", "rope.scaling.original_context_lenght"),
    ];
    for (key, other) in renamed {
        check_damage_of(qwen3_yarn(), |file| replace(file, [key, other]));
    }
    check_damage("linear", |file| replace(file, ["rope.scaling.factor", "rope.scaling.fac_or"]));
}

/// Multiplies f32 values.
fn scale(bytes: &mut [u8], by: f32) {
    for value in bytes.chunks_exact_mut(4) {
        let scaled = f32::from_le_bytes([value[0], value[1], value[2], value[3]]) * by;
        value.copy_from_slice(&scaled.to_le_bytes());
    }
}

/// Swaps the first expert's part of a tensor with the second's.
fn swap_experts(bytes: &mut [u8], n_experts: usize) {
    let n = bytes.len() / n_experts;
    let (first, rest) = bytes.split_at_mut(n);
    first.swap_with_slice(&mut rest[..n]);
}

#[test]
fn swapped_experts_have_other_logits() {
    for (name, n_experts) in [("mixtral", 3), ("qwen2_moe", 4), ("qwen3_moe", 4)] {
        for module in ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_inp"] {
            check_damage(name, |file| {
                file.edit_tensor(&format!("blk.1.{module}.weight"), |bytes| swap_experts(bytes, n_experts));
            });
        }
        check_damage(name, |file| swap_names(file, ["blk.0.ffn_gate_inp.weight", "blk.1.ffn_gate_inp.weight"]));
        // A router that selects one expert for all tokens, with the weights of the others unchanged.
        check_damage(name, |file| {
            file.edit_tensor("blk.1.ffn_gate_inp.weight", |bytes| {
                let n = bytes.len() / n_experts;
                scale(&mut bytes[..n], 50.0);
            });
        });
    }
}

#[test]
fn wrong_metadata_have_other_logits() {
    let keys: [(&str, &str, [u8; 4]); 8] = [
        ("linear", "llama.rope.freq_base", 5e5f32.to_le_bytes()),
        ("linear", "llama.rope.scaling.factor", 4f32.to_le_bytes()),
        ("linear", "llama.attention.layer_norm_rms_epsilon", 0.3f32.to_le_bytes()),
        ("linear", "llama.attention.head_count", 2u32.to_le_bytes()),
        ("linear", "llama.attention.head_count_kv", 4u32.to_le_bytes()),
        ("linear", "llama.block_count", 1u32.to_le_bytes()),
        ("yarn", "qwen3.rope.scaling.original_context_length", 4096u32.to_le_bytes()),
        ("mixtral", "llama.expert_used_count", 1u32.to_le_bytes()),
    ];
    for (name, key, value) in keys {
        check_damage(name, |file| {
            file.edit(|bytes| {
                // The length before a key distinguishes it from longer keys. A type of 4 bytes follows it.
                let mut found = (key.len() as u64).to_le_bytes().to_vec();
                found.extend(key.as_bytes());
                let place = bytes.windows(found.len()).position(|window| window == found).unwrap() + found.len() + 4;
                bytes[place..place + 4].copy_from_slice(&value);
            });
        });
    }
}

#[test]
fn another_layout_of_blocks_has_other_logits() {
    let file = ExportedFile::new(config("qwen2"), GgufType::Q8_0);
    let sound = file.relative().unwrap();
    assert!(sound < 0.1, "{sound:.2e}");
    // The scale after the elements, as the format does not have it.
    file.edit_tensor("blk.0.ffn_down.weight", |bytes| bytes.chunks_mut(34).for_each(|block| block.rotate_left(2)));
    let damaged = file.relative().unwrap();
    assert!(damaged.is_nan() || damaged > 0.2, "{damaged:.2e}");
}

fn two_tokens(logits: Vec<Vec<f32>>) -> PromptLogits {
    PromptLogits { prompts: PackedPrompts::new(vec![vec![0, 1]], 2), logits, experts: BTreeMap::new() }
}

#[track_caller]
fn check_difference(found: [[f32; 2]; 2], want: LogitsDifference) {
    let source = two_tokens(vec![vec![1.0, 3.0], vec![6.0, 4.0]]);
    let difference = source.compare(&Tensor::new(&found, &Device::Cpu).unwrap()).unwrap();
    assert_eq!(format!("{difference:?}"), format!("{want:?}"));
}

#[test]
fn a_difference_ignores_a_shift_and_sees_a_swap_and_a_nan() {
    let same = LogitsDifference { n_positions: 2, n_same_top: 2, largest: 0.0, relative: 0.0, routing: None };
    check_difference([[1.0, 3.0], [8.0, 6.0]], same);
    check_difference(
        [[3.0, 1.0], [6.0, 4.0]],
        LogitsDifference { n_same_top: 1, largest: 2.0, relative: 2f64.sqrt(), ..same },
    );
    check_difference(
        [[f32::NAN, 3.0], [6.0, 4.0]],
        LogitsDifference { n_same_top: 1, largest: f64::NAN, relative: f64::NAN, ..same },
    );
}

#[test]
fn logits_of_another_shape_are_an_error() {
    let source = two_tokens(vec![vec![1.0, 3.0]; 2]);
    for shape in [(2, 1), (1, 2), (2, 3)] {
        let found = Tensor::zeros(shape, candle_core::DType::F32, &Device::Cpu).unwrap();
        let problem = source.compare(&found).unwrap_err().to_string();
        assert!(problem.contains("of [2, 2]"), "{problem}");
    }
}
