//! The layouts of tokenizer folders, and errors for malformed ones.

use std::path::Path;

use candlewick_text::conversation::{Conversation, Message};
use candlewick_text::render::{TextSpecialTokens, render_text};
use candlewick_text::template::AddGenerationPrompt;
use candlewick_text::tokenizer::{SpecialTokens, Tokenizer};
use serde::Deserialize;
use serde_json::{Value as Json, json};
use tempfile::TempDir;

/// Returns a word-level tokenizer: `<s>` 0, `</s>` 1, `<unk>` 2, `hello` 3, `world` 4, `<pad>` 5.
fn tokenizer_json() -> Json {
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false,
               "rstrip": false, "normalized": false, "special": true})
    };
    json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null,
                    "pad_id": 5, "pad_type_id": 0, "pad_token": "<pad>"},
        "added_tokens": [special(0, "<s>"), special(1, "</s>"), special(2, "<unk>"), special(5, "<pad>")],
        "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}},
        "decoder": null,
        "model": {"type": "WordLevel", "unk_token": "<unk>",
                  "vocab": {"<s>": 0, "</s>": 1, "<unk>": 2, "hello": 3, "world": 4, "<pad>": 5}},
    })
}

fn folder(files: &[(&str, Json)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "tokenizer.json", &tokenizer_json().to_string());
    for (name, content) in files {
        match content {
            Json::String(text) => write(folder.path(), name, text),
            object => write(folder.path(), name, &object.to_string()),
        }
    }
    folder
}

fn write(folder: &Path, name: &str, content: &str) {
    let path = folder.join(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, content).unwrap();
}

fn load(files: &[(&str, Json)]) -> Tokenizer {
    Tokenizer::from_directory(folder(files).path()).unwrap()
}

#[track_caller]
fn refused(files: &[(&str, Json)], want: &[&str]) {
    let error = Tokenizer::from_directory(folder(files).path()).unwrap_err().to_string();
    assert!(want.iter().all(|part| error.contains(part)), "{error}");
}

#[test]
fn special_tokens_come_as_text_or_as_added_tokens() {
    let added = json!({"__type": "AddedToken", "content": "</s>", "lstrip": false, "special": true});
    let tokenizer = load(&[
        ("tokenizer_config.json", json!({"bos_token": "<s>", "eos_token": added, "unk_token": null})),
        ("special_tokens_map.json", json!({"unk_token": "<unk>", "pad_token": {"content": "<pad>"}})),
    ]);
    assert_eq!(tokenizer.bos().unwrap().id, 0);
    assert_eq!(tokenizer.eos().unwrap().text, "</s>");
    assert_eq!(tokenizer.pad().unwrap().id, 5);
    assert_eq!(tokenizer.unk(), None, "null in the newer file is the last word");
    assert!(tokenizer.is_special(5) && !tokenizer.is_special(3));
}

#[test]
fn pad_is_eos_where_none_is_named() {
    let tokenizer = load(&[("tokenizer_config.json", json!({"eos_token": "</s>"}))]);
    assert_eq!(tokenizer.pad(), tokenizer.eos());
    assert_eq!(load(&[]).pad(), None);
}

#[test]
fn every_id_that_ends_a_generation_is_known() {
    let tokenizer = load(&[
        ("tokenizer_config.json", json!({"eos_token": "</s>"})),
        ("generation_config.json", json!({"eos_token_id": [2, 5]})),
        ("config.json", json!({"eos_token_id": 4})),
    ]);
    assert_eq!(tokenizer.eos_ids().iter().copied().collect::<Vec<_>>(), [1, 2, 4, 5]);
}

#[test]
fn ids_come_with_and_without_specials_and_back() {
    let tokenizer = load(&[("tokenizer_config.json", json!({"bos_token": "<s>"}))]);
    let text = "hello world hello";
    assert_eq!(tokenizer.encode(text, SpecialTokens::Exclude).unwrap(), [3, 4, 3], "never truncated or padded");
    assert_eq!(tokenizer.encode(text, SpecialTokens::Include).unwrap(), [0, 3, 4, 3]);
    assert_eq!(tokenizer.decode(&[0, 3, 4], SpecialTokens::Exclude).unwrap(), "hello world");
    assert_eq!(tokenizer.decode(&[0, 3, 4], SpecialTokens::Include).unwrap(), "<s> hello world");
    let encoded = tokenizer.encode_with_offsets(text).unwrap();
    assert_eq!(encoded.offsets, [0..5, 5..11, 11..17], "a dropped space counts to what follows");
    assert_eq!((tokenizer.vocab_size(), tokenizer.min_embedding_rows()), (6, 6));
    assert_eq!(tokenizer.token_to_id("world"), Some(4));
    assert_eq!(tokenizer.id_to_token(9), None);
}

/// Case of `tests/reference/add_bos_eos.py`.
#[derive(Deserialize)]
struct AddBosEos {
    tokenizer: String,
    add_bos_token: Option<bool>,
    add_eos_token: Option<bool>,
    ids: Vec<u32>,
    ids_if_given_false: Vec<u32>,
}

impl AddBosEos {
    /// Loads a copy of the tokenizer with the keys in tokenizer_config.json.
    fn load(&self) -> Tokenizer {
        let of = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat").join(&self.tokenizer);
        let copy = tempfile::tempdir().unwrap();
        std::fs::copy(of.join("tokenizer.json"), copy.path().join("tokenizer.json")).unwrap();
        let mut config: Json =
            serde_json::from_slice(&std::fs::read(of.join("tokenizer_config.json")).unwrap()).unwrap();
        config["add_bos_token"] = json!(self.add_bos_token);
        config["add_eos_token"] = json!(self.add_eos_token);
        write(copy.path(), "tokenizer_config.json", &config.to_string());
        Tokenizer::from_directory(copy.path()).unwrap()
    }
}

#[test]
fn add_bos_token_and_add_eos_token_of_the_config_change_nothing_as_in_transformers() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat/add_bos_eos.json");
    let cases: Vec<AddBosEos> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    assert_eq!(cases.len(), 45);
    for case in cases {
        let tokenizer = case.load();
        let name = format!("{} {:?} {:?}", case.tokenizer, case.add_bos_token, case.add_eos_token);
        assert_eq!(tokenizer.encode("Yes.", SpecialTokens::Include).unwrap(), case.ids, "{name}");
        assert_eq!(tokenizer.encode("Yes.", SpecialTokens::Exclude).unwrap(), case.ids_if_given_false, "{name}");
        let trained = |add_eos_token| {
            let specials = TextSpecialTokens { add_eos_token, ..TextSpecialTokens::default() };
            render_text(&tokenizer, "Yes.", specials).unwrap().ids
        };
        assert_eq!(trained(false), case.ids, "{name}");
        assert_eq!(trained(true), [case.ids.clone(), vec![tokenizer.eos().unwrap().id]].concat(), "{name}");
        if case.add_eos_token == Some(true) {
            let gguf = tokenizer.gguf_vocabulary(tokenizer.min_embedding_rows() as usize).unwrap();
            let adds_bos = case.ids != case.ids_if_given_false;
            assert_eq!((gguf.adds_bos, gguf.adds_eos), (adds_bos, false), "{name}");
        }
    }
}

fn render(tokenizer: &Tokenizer, name: Option<&str>, tools: bool) -> String {
    let template = tokenizer.chat_template(name).unwrap().unwrap();
    let mut chat = Conversation::new([Message::new("user", "x")]);
    chat.tools = tools.then(|| json!([]));
    template.render(&chat, AddGenerationPrompt::No).unwrap()
}

#[test]
fn a_chat_template_is_found_in_each_of_its_places() {
    assert!(load(&[]).chat_template(None).unwrap().is_none());
    let config = json!({"chat_template": "config {{ eos_token }}{{ pad_token }}", "eos_token": "</s>"});
    let json = ("chat_template.json", json!({"chat_template": "json"}));
    let jinja = ("chat_template.jinja", json!("jinja"));
    let config = ("tokenizer_config.json", config);
    assert_eq!(render(&load(std::slice::from_ref(&config)), None, false), "config </s></s>");
    assert_eq!(render(&load(&[config.clone(), json.clone()]), None, false), "json");
    assert_eq!(render(&load(&[config, json, jinja]), None, false), "jinja");
}

#[test]
fn named_templates_are_chosen_by_name_or_by_tools() {
    let named = json!({"chat_template": [
        {"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"},
        {"name": "rag", "template": "{{ documents }}"}]});
    let in_config = load(&[("tokenizer_config.json", named)]);
    let in_files = load(&[
        ("chat_template.jinja", json!("plain")),
        ("additional_chat_templates/tool_use.jinja", json!("tools")),
        ("additional_chat_templates/rag.jinja", json!("{{ documents }}")),
    ]);
    for tokenizer in [in_config, in_files] {
        assert_eq!(render(&tokenizer, None, false), "plain");
        assert_eq!(render(&tokenizer, None, true), "tools");
        assert_eq!(render(&tokenizer, Some("default"), true), "plain");
        assert_eq!(render(&tokenizer, Some("rag"), false), "None");
        let error = tokenizer.chat_template(Some("rug")).unwrap_err().to_string();
        assert!(error.contains("\"rug\"") && error.contains("default, "), "{error}");
    }
}

#[test]
fn a_broken_template_is_an_error_when_it_is_requested() {
    let tokenizer = load(&[("tokenizer_config.json", json!({"chat_template": "a\n{{ b"}))]);
    let error = tokenizer.chat_template(None).unwrap_err().to_string();
    assert!(error.contains("tokenizer_config.json (key `chat_template`), line 2"), "{error}");
}

#[test]
fn broken_folders_are_refused_with_file_and_reason() {
    let empty = tempfile::tempdir().unwrap();
    let error = |folder: &Path| Tokenizer::from_directory(folder).unwrap_err().to_string();
    assert!(error(empty.path()).contains("there is no tokenizer.json. Fix: "));
    write(empty.path(), "tokenizer.model", "");
    assert!(error(empty.path()).contains("(only tokenizer.model"));
    assert!(error(&empty.path().join("nowhere")).contains("the folder does not exist"));

    refused(&[("tokenizer.json", json!("{\"a\":"))], &["parse ", "tokenizer.json: EOF", "line 1"]);
    refused(&[("tokenizer.json", json!({"model": 3}))], &["parse ", "tokenizer.json: "]);
    refused(&[("tokenizer_config.json", json!([]))], &["tokenizer_config.json: expected a JSON object"]);
    refused(&[("tokenizer_config.json", json!({"chat_template": 3}))], &["`chat_template` is 3"]);
    refused(&[("tokenizer_config.json", json!({"eos_token": "<x>"}))], &["eos_token is \"<x>\"", "Fix: "]);
    refused(&[("config.json", json!({"eos_token_id": -1}))], &["config.json", "`eos_token_id` is -1"]);

    let folder = folder(&[]);
    std::fs::write(folder.path().join("tokenizer_config.json"), b"{\"a\": \"\xff\"}").unwrap();
    assert!(error(folder.path()).contains("tokenizer_config.json: not UTF-8 at byte 7"));
}

#[test]
fn a_special_token_of_a_wrong_type_is_refused() {
    for (key, value) in [("eos_token", json!(5)), ("bos_token", json!(["<s>"])), ("pad_token", json!({"id": 1}))] {
        let folder = folder(&[("tokenizer_config.json", json!({ key: value }))]);
        let error = Tokenizer::from_directory(folder.path()).unwrap_err().to_string();
        assert!(error.contains(key) && error.contains("expected a string"), "{error}");
    }
    let folder = folder(&[("tokenizer_config.json", json!({"eos_token": {"content": "</s>"}, "bos_token": null}))]);
    assert_eq!(Tokenizer::from_directory(folder.path()).unwrap().eos().unwrap().id, 1);
}

#[test]
fn a_tokenizer_file_that_never_ends_is_refused() {
    for name in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        let folder = folder(&[]);
        let _ = std::fs::remove_file(folder.path().join(name));
        std::os::unix::fs::symlink("/dev/zero", folder.path().join(name)).unwrap();
        let error = Tokenizer::from_directory(folder.path()).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("not a regular file"), "{error}");
    }
}

#[test]
fn files_that_make_the_tokenizers_crate_panic_are_refused() {
    let mut json = tokenizer_json();
    json["post_processor"]["special_tokens"] = json!({});
    refused(&[("tokenizer.json", json)], &["parse ", "tokenizer.json: "]);

    for content in ["", "x"] {
        let mut json = tokenizer_json();
        json["normalizer"] = json!({"type": "Replace", "pattern": {"Regex": ""}, "content": content});
        let Ok(tokenizer) = Tokenizer::from_directory(folder(&[("tokenizer.json", json)]).path()) else { continue };
        for text in ["hello", "", "é world"] {
            let _ = tokenizer.encode(text, SpecialTokens::Include);
            let _ = tokenizer.encode_with_offsets(text);
        }
    }
}

#[test]
fn the_stops_of_a_model_are_added_to_those_of_an_adapters_tokenizer() {
    let adapter = folder(&[("tokenizer_config.json", json!({"eos_token": "</s>"}))]);
    let model = folder(&[
        ("generation_config.json", json!({"eos_token_id": [4]})),
        ("config.json", json!({"eos_token_id": 5})),
    ]);
    let tokenizer = Tokenizer::from_directory(adapter.path()).unwrap().with_eos_ids_from(model.path()).unwrap();
    assert_eq!(tokenizer.eos_ids().iter().copied().collect::<Vec<_>>(), [1, 4, 5]);
}

#[test]
fn an_added_token_has_the_id_that_the_file_says() {
    let mut json = tokenizer_json();
    json["added_tokens"][3]["id"] = json!(5000);
    json["added_tokens"][3]["content"] = json!("<new>");
    refused(&[("tokenizer.json", json)], &["added token \"<new>\" has id 5000, and its place"]);
}

#[test]
fn a_pipe_is_no_tokenizer() {
    let folder = folder(&[]);
    let path = folder.path().join("tokenizer_config.json");
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    let error = Tokenizer::from_directory(folder.path()).unwrap_err().to_string();
    assert!(error.contains("it is a pipe, a device or a folder"), "{error}");
}
