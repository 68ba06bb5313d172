//! llama.cpp's graph of exported files compared with the model, and of damaged files.

use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Tensor};
use candlewick_model::{Config, GgufExport, GgufType, MergedModel, Model, ModelError, ParamSpec, ParamValues};
use candlewick_text::tokenizer::{GgufTokenType, GgufVocabulary};
use serde_json::Value;

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

    fn relative(&self) -> Result<f64> {
        Ok(self.source.compare_gguf(&self.path(), &Device::Cpu, &|_, _| ())?.relative)
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

#[test]
fn llama_cpps_graph_of_a_file_has_the_logits_of_the_model() {
    let models =
        ["llama", "llama3", "linear", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "yarn"];
    for (file_type, bound) in [(GgufType::F32, 1e-5), (GgufType::Bf16, 0.03)] {
        for name in models {
            let relative = ExportedFile::new(config(name), file_type).relative().unwrap();
            // Rounding may select other experts.
            let is_exact = file_type == GgufType::F32 || config(name).get("num_experts_per_tok").is_none();
            assert!(relative < if is_exact { bound } else { 1.0 }, "{name}, {file_type}: {relative:.2e}");
        }
    }
}

/// Checks that a changed f32 file is an error, or has other logits than rounding explains.
#[track_caller]
fn check_damage(name: &str, damage: impl FnOnce(&ExportedFile)) {
    let file = ExportedFile::new(config(name), GgufType::F32);
    damage(&file);
    let relative = file.relative().unwrap_or(f64::INFINITY);
    // Ten times the tolerance of f32.
    assert!(relative > 0.01, "{name}: {relative:.2e}");
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

#[track_caller]
fn check_difference(found: [[f32; 2]; 2], want: LogitsDifference) {
    let source =
        PromptLogits { prompts: ComparedPrompts(vec![vec![0, 1]]), logits: vec![vec![1.0, 3.0], vec![6.0, 4.0]] };
    let difference = source.compare(&Tensor::new(&found, &Device::Cpu).unwrap()).unwrap();
    assert_eq!(format!("{difference:?}"), format!("{want:?}"));
}

#[test]
fn a_difference_ignores_a_shift_and_sees_a_swap_and_a_nan() {
    let same = LogitsDifference { n_positions: 2, n_same_top: 2, largest: 0.0, relative: 0.0 };
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
    let source = PromptLogits { prompts: ComparedPrompts(vec![vec![0, 1]]), logits: vec![vec![1.0, 3.0]; 2] };
    for shape in [(2, 1), (1, 2), (2, 3)] {
        let found = Tensor::zeros(shape, candle_core::DType::F32, &Device::Cpu).unwrap();
        let problem = source.compare(&found).unwrap_err().to_string();
        assert!(problem.contains("of [2, 2]"), "{problem}");
    }
}
