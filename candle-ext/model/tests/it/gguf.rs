//! GGUF files compared with those of llama.cpp's converter and quantizer, and with candle-transformers' readers.
//!
//! tests/reference/gguf_headers.py writes the fixture. Weights follow from the names of the tensors, here and there.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use ::candle_transformers::models::{quantized_llama, quantized_qwen2, quantized_qwen3};
use candle_core::quantized::gguf_file::{Content, Value as Entry};
use candle_core::{DType, Device, Tensor};
use candlewick_model::{
    Config, GgufExport, GgufFile, GgufType, HubTensor, MergedModel, Model, ModelError, ParamSpec, ParamValues,
};
use candlewick_text::tokenizer::{GgufTokenType, GgufVocabulary};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::tiny::{Tiny, fixture, relative_error};

/// Values that follow from a tensor's name.
struct Named;

impl ParamValues for Named {
    fn value(&self, param: &ParamSpec) -> Result<Tensor, ModelError> {
        let width: usize = param.shape[1..].iter().product();
        let whole = vec![HubTensor { name: param.name.clone(), rows: 0..param.shape[0] }];
        let tensors = param.hub.as_ref().map_or(&whole, |hub| &hub.tensors);
        let values: Vec<f32> =
            tensors.iter().flat_map(|tensor| values(&tensor.name, tensor.rows.len() * width)).collect();
        Ok(Tensor::from_vec(values, param.shape.as_slice(), &Device::Cpu)?)
    }

    fn dtype(&self) -> Option<DType> {
        Some(DType::F32)
    }
}

/// Returns numbers from -0.5 to 0.5, exact in f32.
fn values(name: &str, n: usize) -> impl Iterator<Item = f32> {
    let key = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |key, byte| (key ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    (0..n as u64).map(move |index| {
        let bits = (index + (key & 0xffff_ffff)).wrapping_mul(2_654_435_761) as u32 >> 16;
        (f64::from(bits) / 65536.0 - 0.5) as f32
    })
}

fn recorded() -> Value {
    serde_json::from_slice(&std::fs::read(fixture("gguf.json")).unwrap()).unwrap()
}

fn model(config: &Value) -> MergedModel {
    let model = Model::new(Config::from_json(config.clone()).unwrap(), None).unwrap();
    MergedModel::new(model, Box::new(Named), None, Vec::new())
}

fn vocabulary(n: usize) -> GgufVocabulary {
    GgufVocabulary {
        model: "gpt2",
        pre: "qwen2",
        tokens: (0..n).map(|i| format!("t{i}")).collect(),
        types: vec![GgufTokenType::Normal; n],
        scores: None,
        merges: vec!["t 1".to_owned()],
        special_ids: vec![("eos", 2)],
        adds_bos: false,
        adds_eos: false,
        adds_space_prefix: None,
        chat_templates: vec![
            ("default".to_owned(), "{{ a }}".to_owned()),
            ("tool_use".to_owned(), "{{ b }}".to_owned()),
        ],
    }
}

fn write(config: &Value, file_type: GgufType, path: &Path) {
    let vocabulary = vocabulary(config["vocab_size"].as_u64().unwrap() as usize);
    GgufExport { name: "tiny", vocabulary: &vocabulary, file_type }.write(&model(config), path, &|_, _| ()).unwrap();
}

/// Returns metadata and tensors in the form of the fixture.
fn contents(path: &Path) -> (BTreeMap<String, Value>, BTreeMap<String, Value>) {
    let bytes = std::fs::read(path).unwrap();
    let content = Content::read(&mut File::open(path).unwrap()).unwrap();
    let entry = |entry: &Entry| match entry {
        Entry::U32(x) => json!(x),
        Entry::F32(x) => json!(f64::from(*x)),
        Entry::String(text) => json!(text),
        other => json!(format!("{other:?}")),
    };
    let metadata = content.metadata.iter().map(|(key, value)| (key.clone(), entry(value))).collect();
    let tensors = content.tensor_infos.iter().map(|(name, info)| {
        let n_bytes = info.shape.elem_count() / info.ggml_dtype.block_size() * info.ggml_dtype.type_size();
        let start = (content.tensor_data_offset + info.offset) as usize;
        let hash = Sha256::digest(&bytes[start..start + n_bytes]);
        let hash: String = hash.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let kind = kind(info.ggml_dtype);
        (name.clone(), json!({"shape": info.shape.dims(), "type": kind, "sha256": hash}))
    });
    (metadata, tensors.collect())
}

/// Returns llama.cpp's name of a type: Q4_K for candle's Q4K.
fn kind(dtype: candle_core::quantized::GgmlDType) -> String {
    let name = format!("{dtype:?}");
    name.strip_suffix('K').map(|bits| format!("{bits}_K")).unwrap_or(name)
}

#[test]
fn files_equal_those_of_llama_cpps_converter() {
    let folder = tempfile::tempdir().unwrap();
    for (name, reference) in recorded()["models"].as_object().unwrap() {
        for file_type in [GgufType::F16, GgufType::Q8_0] {
            let path = folder.path().join(format!("{name}-{file_type}.gguf"));
            write(&reference["config"], file_type, &path);
            let (metadata, tensors) = contents(&path);
            let wanted = &reference[file_type.name()];
            for (key, want) in wanted["metadata"].as_object().unwrap() {
                assert_eq!(metadata.get(key), Some(want), "{name}: {key}");
            }
            let wanted = wanted["tensors"].as_object().unwrap();
            assert!(
                tensors.keys().eq(wanted.keys().collect::<std::collections::BTreeSet<_>>()),
                "{name}: {:?}",
                tensors.keys()
            );
            for (tensor, want) in wanted {
                // The converter computes them in another order.
                let is_computed = tensor == "rope_freqs.weight";
                let found = &tensors[tensor];
                let equal = if is_computed { found["shape"] == want["shape"] } else { found == want };
                assert!(equal, "{name}, {file_type}: {tensor} is {found}, llama.cpp's {want}");
            }
        }
    }
}

#[test]
fn types_of_q4_k_m_are_those_of_llama_cpps_quantizer() {
    let folder = tempfile::tempdir().unwrap();
    for (name, reference) in recorded()["mixtures"].as_object().unwrap() {
        let path = folder.path().join(format!("{name}.gguf"));
        write(&reference["config"], GgufType::Q4KM, &path);
        let (_, tensors) = contents(&path);
        let found: BTreeMap<&String, &Value> = tensors.iter().map(|(tensor, found)| (tensor, &found["type"])).collect();
        assert_eq!(json!(found), reference["types"], "{name}");
    }
}

/// The tolerance is that of f32: the file holds the values, and both sides add some tens of terms in different orders.
#[test]
fn candle_transformers_computes_the_logits_of_the_model() {
    let folder = tempfile::tempdir().unwrap();
    for (name, kind) in [("qwen2", QuantizedModel::Qwen2), ("qwen3", QuantizedModel::Qwen3)] {
        let recorded = &recorded()["models"][name]["config"];
        let path = folder.path().join(format!("{name}.gguf"));
        write(recorded, GgufType::F32, &path);
        let ids: Vec<u32> = (0..9).map(|i| (i * i * 7 + 3) % 50).collect();
        let theirs = candle_logits(&path, kind, &ids);
        let config = Config::from_json(recorded.clone()).unwrap();
        let tiny = Tiny::with_weights(Model::new(config, None).unwrap(), |param| Named.value(param).unwrap());
        let ours = tiny.logits(&Tensor::new(ids.as_slice(), &Device::Cpu).unwrap(), &[ids.len()]);
        let error = relative_error(&theirs, &ours);
        assert!(error < 1e-5, "{name}: relative error {error:.2e}");
    }
}

#[test]
fn candle_transformers_rotates_llamas_heads_as_the_model_does() {
    let mut config = recorded()["models"]["llama"]["config"].clone();
    config["attention_bias"] = json!(false);
    config["mlp_bias"] = json!(false);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("llama.gguf");
    write(&config, GgufType::F32, &path);
    let config = Config::from_json(config).unwrap();
    let ids = [3u32, 10, 31, 16, 15];
    let tiny = Tiny::with_weights(Model::new(config, None).unwrap(), |param| Named.value(param).unwrap());
    let ours = tiny.logits(&Tensor::new(&ids, &Device::Cpu).unwrap(), &[ids.len()]);
    let error = relative_error(&candle_logits(&path, QuantizedModel::Llama, &ids), &ours);
    assert!(error < 1e-5, "relative error {error:.2e}");
}

/// A quantized model of candle-transformers.
#[derive(Clone, Copy)]
enum QuantizedModel {
    Llama,
    Qwen2,
    Qwen3,
}

/// Returns the logits of the token at a position.
type Forward = Box<dyn FnMut(&Tensor, usize) -> candle_core::Result<Tensor>>;

/// Returns candle-transformers' logits [t, v], one token at a time.
fn candle_logits(path: &Path, kind: QuantizedModel, ids: &[u32]) -> Tensor {
    let mut file = File::open(path).unwrap();
    let mut content = Content::read(&mut file).unwrap();
    // quantized_qwen3 rounds its RoPE to f16 otherwise.
    content.metadata.insert("general.dtype".to_owned(), Entry::U32(0));
    let mut forward: Forward = match kind {
        QuantizedModel::Llama => {
            let mut model = quantized_llama::ModelWeights::from_gguf(content, &mut file, &Device::Cpu).unwrap();
            Box::new(move |ids, position| model.forward(ids, position))
        }
        QuantizedModel::Qwen2 => {
            let mut model = quantized_qwen2::ModelWeights::from_gguf(content, &mut file, &Device::Cpu).unwrap();
            Box::new(move |ids, position| model.forward(ids, position))
        }
        QuantizedModel::Qwen3 => {
            let mut model = quantized_qwen3::ModelWeights::from_gguf(content, &mut file, &Device::Cpu).unwrap();
            Box::new(move |ids, position| model.forward(ids, position))
        }
    };
    let rows = ids.iter().enumerate().map(|(position, id)| {
        let ids = Tensor::new(&[[*id]], &Device::Cpu).unwrap();
        forward(&ids, position).unwrap().flatten_all().unwrap()
    });
    Tensor::stack(&rows.collect::<Vec<_>>(), 0).unwrap()
}

#[test]
fn chat_templates_and_special_tokens_are_in_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    write(&recorded()["models"]["qwen2"]["config"], GgufType::Bf16, &path);
    let content = Content::read(&mut File::open(&path).unwrap()).unwrap();
    let text = |key: &str| content.metadata[key].to_string().unwrap().clone();
    assert_eq!(text("tokenizer.chat_template"), "{{ a }}");
    assert_eq!(text("tokenizer.chat_template.tool_use"), "{{ b }}");
    assert_eq!(content.metadata["tokenizer.ggml.eos_token_id"].to_u32().unwrap(), 2);
    assert!(!content.metadata["tokenizer.ggml.add_bos_token"].to_bool().unwrap());
    assert_eq!(content.metadata["general.file_type"].to_u32().unwrap(), 32);
}

/// Values outside of f16, and values that are not finite. 32 equal elements of a K-quant are no error.
#[test]
fn a_value_that_a_type_cannot_hold_is_refused() {
    struct Constant(f32);
    impl ParamValues for Constant {
        fn value(&self, param: &ParamSpec) -> Result<Tensor, ModelError> {
            Ok(Tensor::full(self.0, param.shape.as_slice(), &Device::Cpu)?)
        }
        fn dtype(&self) -> Option<DType> {
            None
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let config = recorded()["mixtures"]["odd"]["config"].clone();
    for (value, file_type, want) in [
        (7e4, GgufType::F16, "does not fit in f16"),
        (f32::NAN, GgufType::Q8_0, "not finite"),
        (1.0, GgufType::F16, ""),
        (0.7, GgufType::Q4KM, ""),
        (-0.7, GgufType::Q4KM, ""),
    ] {
        let model = Model::new(Config::from_json(config.clone()).unwrap(), None).unwrap();
        let model = MergedModel::new(model, Box::new(Constant(value)), None, Vec::new());
        let path = folder.path().join(format!("{value}.gguf"));
        let written =
            GgufExport { name: "tiny", vocabulary: &vocabulary(50), file_type }.write(&model, &path, &|_, _| ());
        let said = written.err().map_or(String::new(), |error| error.to_string());
        assert!(said.contains(want) && said.is_empty() == want.is_empty(), "{said}");
    }
}

#[test]
fn a_damaged_file_is_an_error_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("damaged.gguf");
    write(&recorded()["models"]["qwen2"]["config"], GgufType::Q8_0, &path);
    let sound = std::fs::read(&path).unwrap();
    let place_of = |text: &str| sound.windows(text.len()).position(|window| window == text.as_bytes()).unwrap();
    let put = |place: usize, bytes: &[u8]| {
        let mut damaged = sound.clone();
        damaged[place..place + bytes.len()].copy_from_slice(bytes);
        damaged
    };
    // Two dims of 8 bytes, the type and the offset follow the name and the number of dims.
    let dims = place_of("blk.0.ffn_up.weight") + "blk.0.ffn_up.weight".len() + 4;
    let most = u64::MAX.to_le_bytes();
    let damages = [
        ("empty", Vec::new()),
        ("half of the header", sound[..200].to_vec()),
        ("half of the data", sound[..sound.len() / 2].to_vec()),
        ("the magic number", put(0, b"GGML")),
        ("the version", put(4, &[9])),
        ("the number of tensors", put(8, &most)),
        ("the number of keys", put(16, &most)),
        ("the length of a key", put(24, &most)),
        ("a number of dims", put(dims - 4, &[200])),
        ("a dim beyond the file", put(dims, &most)),
        ("a row of half a block", put(dims, &[48])),
        ("an unknown type", put(dims + 16, &[99])),
        ("an offset outside", put(dims + 20, &most)),
    ];
    for (name, bytes) in damages {
        std::fs::write(&path, bytes).unwrap();
        let error = GgufFile::open(&path).err().unwrap_or_else(|| panic!("{name} is not found")).to_string();
        assert!(error.contains("damaged.gguf"), "{name}: {error}");
    }
}
