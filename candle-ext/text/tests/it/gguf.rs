//! Vocabularies for GGUF files, of the tokenizers of the fixtures.

use std::path::Path;

use candlewick_text::tokenizer::{GgufTokenType, GgufVocabulary, Tokenizer};
use serde_json::{Value as Json, json};

fn folder(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat").join(name)
}

fn vocabulary(name: &str) -> GgufVocabulary {
    let tokenizer = Tokenizer::from_directory(folder(name)).unwrap();
    tokenizer.gguf_vocabulary(tokenizer.min_embedding_rows() as usize + 3).unwrap()
}

/// Returns a tokenizer whose tokenizer.json is changed.
fn changed(name: &str, change: impl FnOnce(&mut Json)) -> Tokenizer {
    let copy = tempfile::tempdir().unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(folder(name).join(file), copy.path().join(file)).unwrap();
    }
    let path = copy.path().join("tokenizer.json");
    let mut json: Json = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut json);
    std::fs::write(&path, json.to_string()).unwrap();
    Tokenizer::from_directory(copy.path()).unwrap()
}

#[test]
fn the_split_rule_has_llama_cpps_name() {
    for (name, want) in [("smollm2", "smollm"), ("llama3_2", "llama-bpe"), ("qwen2_5", "qwen2"), ("qwen3", "qwen2")] {
        let found = vocabulary(name);
        assert_eq!((found.model, found.pre), ("gpt2", want), "{name}");
    }
    let without = changed("llama3", |json| json["model"]["ignore_merges"] = json!(false));
    assert_eq!(without.gguf_vocabulary(200_000).unwrap().pre, "smaug-bpe");
    let gpt2 = changed("smollm2", |json| json["pre_tokenizer"] = json["pre_tokenizer"]["pretokenizers"][1].clone());
    assert_eq!(gpt2.gguf_vocabulary(200_000).unwrap().pre, "gpt-2");
}

#[test]
fn tokens_types_and_merges_are_those_of_the_tokenizer() {
    let tokenizer = Tokenizer::from_directory(folder("qwen3")).unwrap();
    let found = vocabulary("qwen3");
    let n_rows = tokenizer.min_embedding_rows() as usize;
    assert_eq!(found.tokens[n_rows], format!("[PAD{n_rows}]"));
    assert_eq!(found.types[n_rows], GgufTokenType::Unused);
    let kind = |token: &str| found.types[tokenizer.token_to_id(token).unwrap() as usize];
    assert_eq!(kind("<|im_start|>"), GgufTokenType::Control);
    assert_eq!(kind("<think>"), GgufTokenType::UserDefined);
    assert_eq!(kind("a"), GgufTokenType::Normal);
    assert!(found.merges.iter().all(|merge| merge.split(' ').count() == 2) && found.merges.len() > 100);
    assert_eq!(found.scores, None);
    assert!(found.special_ids.contains(&("eos", tokenizer.token_to_id("<|im_end|>").unwrap())));
    assert_eq!(found.chat_templates[0].0, "default");
}

#[test]
fn bos_is_added_where_the_post_processor_adds_it() {
    assert!(vocabulary("llama3_2").adds_bos);
    assert!(!vocabulary("qwen3").adds_bos && !vocabulary("smollm2").adds_bos);
}

#[test]
fn sentence_pieces_have_scores_in_the_order_of_the_merges() {
    let folder = tempfile::tempdir().unwrap();
    let model = json!({
        "type": "BPE", "dropout": null, "unk_token": "<unk>", "byte_fallback": true, "fuse_unk": true,
        "vocab": {"<unk>": 0, "<s>": 1, "<0x0A>": 2, "\u{2581}a": 3, "ab": 4, "a": 5, "b": 6, "\u{2581}": 7},
        "merges": [["\u{2581}", "a"], ["a", "b"]],
    });
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "pre_tokenizer": null,
        "normalizer": {"type": "Prepend", "prepend": "\u{2581}"}, "post_processor": null, "decoder": null, "model": model,
    });
    std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
    std::fs::write(folder.path().join("tokenizer_config.json"), "{\"unk_token\": \"<unk>\"}").unwrap();
    let found = Tokenizer::from_directory(folder.path()).unwrap().gguf_vocabulary(8).unwrap();
    assert_eq!((found.model, found.pre, found.adds_space_prefix), ("llama", "default", Some(true)));
    let scores = found.scores.unwrap();
    assert!(scores[3] > scores[4], "{scores:?}");
    assert_eq!((found.types[0], found.types[2]), (GgufTokenType::Unknown, GgufTokenType::Byte));
    assert!(found.merges.is_empty());
}

#[test]
fn a_tokenizer_that_llama_cpp_does_not_have_is_refused() {
    let unknown =
        changed("qwen3", |json| json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!(r"\w+"));
    let error = unknown.gguf_vocabulary(100_000).unwrap_err().to_string();
    assert!(error.contains("llama.cpp does not have the pre_tokenizer") && error.contains(r"\\w+"), "{error}");
    let few_rows = Tokenizer::from_directory(folder("qwen3")).unwrap().gguf_vocabulary(10).unwrap_err().to_string();
    assert!(few_rows.contains("embedding has 10 rows"), "{few_rows}");
}
