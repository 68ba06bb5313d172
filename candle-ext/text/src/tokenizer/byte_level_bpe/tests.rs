//! The fast path compared with the tokenizers crate, on adversarial text.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::{Value as Json, json};

use super::super::{Encoding, SpecialTokens, Tokenizer};

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Added tokens: some contain others, and one is not normalized.
const ADDED: [(&str, bool); 8] = [
    ("<|a|>", false),
    ("<|a|>b", false),
    ("a|>", true),
    ("  ", true),
    ("   ", true),
    ("e\u{301}t", true),
    ("\u{3000}x ", false),
    (" <|c|> ", false),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn fixture(name: &str) -> PathBuf {
    root().join("candle-ext/text/tests/fixtures/chat").join(name)
}

/// Loads a tokenizer with changed steps.
fn changed(name: &str, changes: &[(&str, Json)]) -> Tokenizer {
    let mut json: Json = serde_json::from_slice(&std::fs::read(fixture(name).join("tokenizer.json")).unwrap()).unwrap();
    for (key, value) in changes {
        json[*key] = value.clone();
    }
    number_added_tokens(&mut json);
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
    Tokenizer::from_directory(folder.path()).unwrap()
}

/// Assigns ids after the vocabulary to added tokens that it lacks.
fn number_added_tokens(json: &mut Json) {
    let vocab = json["model"]["vocab"].as_object().unwrap().clone();
    let mut next = vocab.len();
    for token in json["added_tokens"].as_array_mut().unwrap() {
        let own = vocab.get(token["content"].as_str().unwrap());
        token["id"] = own.cloned().unwrap_or_else(|| json!(next));
        next += usize::from(own.is_none());
    }
}

fn bytes(add_prefix_space: bool, trim_offsets: bool, use_regex: bool) -> Json {
    json!({"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": trim_offsets,
           "use_regex": use_regex})
}

fn split(pattern: &str, behavior: &str) -> Json {
    json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": false})
}

fn sequence(steps: &[Json]) -> Json {
    json!({"type": "Sequence", "pretokenizers": steps})
}

fn added(tokens: &[(&str, bool)]) -> Json {
    let token = |(id, (content, normalized)): (usize, &(&str, bool))| {
        json!({"id": 9000 + id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": normalized, "special": false})
    };
    tokens.iter().enumerate().map(token).collect()
}

fn template() -> Json {
    json!({"type": "TemplateProcessing",
           "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
           "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
           "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}})
}

/// Loads every tokenizer of the repository, and variants with other steps.
fn tokenizers() -> Vec<Tokenizer> {
    let folders = ["smollm2", "llama3", "llama3_2", "qwen2_5", "qwen3"].map(fixture);
    let folders = folders.into_iter().chain([root().join("recipes/quickstart/tokenizer")]);
    let mut tokenizers: Vec<_> = folders.map(|folder| Tokenizer::from_directory(folder).unwrap()).collect();
    let numbers = json!({"type": "Digits", "individual_digits": false});
    let digits = json!({"type": "Digits", "individual_digits": true});
    let lines = [split(r"[\r\n]", "Isolated"), split(r"\s?[\p{L}\p{P}]+", "Isolated")];
    for pre_tokenizer in [
        bytes(false, true, true),
        bytes(false, true, false),
        sequence(&[numbers.clone(), bytes(false, true, true)]),
        sequence(&[split(LLAMA3, "Isolated"), digits.clone(), bytes(false, true, true)]),
        sequence(&[lines[0].clone(), lines[1].clone(), numbers, bytes(false, true, false)]),
    ] {
        for post_processor in [
            Json::Null,
            bytes(true, true, true),
            bytes(false, true, true),
            json!({"type": "Sequence", "processors": [bytes(true, true, false), template()]}),
        ] {
            let steps = [("pre_tokenizer", pre_tokenizer.clone()), ("post_processor", post_processor)];
            tokenizers.push(changed("smollm2", &steps));
            tokenizers.push(changed("qwen3", &[steps.as_slice(), &[("added_tokens", added(&ADDED))]].concat()));
        }
    }
    tokenizers
}

fn slowly(tokenizer: &Tokenizer, text: &str) -> (Vec<u32>, Encoding) {
    let ids = tokenizer.encode_with_tokenizers_crate(text).unwrap();
    (ids, tokenizer.encode_with_offsets_with_tokenizers_crate(text).unwrap())
}

/// Compares twice: the second time the words are cached.
#[track_caller]
fn check(tokenizer: &Tokenizer, text: &str) {
    let want = slowly(tokenizer, text);
    for _ in 0..2 {
        let found =
            (tokenizer.encode(text, SpecialTokens::Exclude).unwrap(), tokenizer.encode_with_offsets(text).unwrap());
        assert_eq!(found, want, "{text:?} by {:?}", tokenizer.inner.get_pre_tokenizer());
    }
}

static TOKENIZERS: LazyLock<Vec<Tokenizer>> = LazyLock::new(tokenizers);

/// Generates text that pre-tokenizers, normalizers and token searches treat specially.
fn piece() -> impl Strategy<Value = String> {
    let spaces = prop::sample::select(vec![" ", "\n", "\r\n", "\t", "\u{a0}", "\u{3000}", "\u{85}", "\u{200b}"]);
    let marked =
        ["'s", "'LL", "'\u{17f}", "\u{212a}", "e\u{301}", "\u{1100}\u{1161}\u{11a8}", "\u{344}", "が", "か\u{3099}"];
    let digits = ["7", "2026", "१२", "½", "Ⅷ", "٣", "１"];
    let words = [
        "the",
        " the",
        "Ġ",
        " Ġ ",
        "naïve",
        "Straße",
        "🧑\u{200d}🚀",
        "日本語",
        "العربية",
        "\u{feff}",
        "{}();",
        "\\n",
        "\0",
    ];
    prop_oneof![
        3 => (spaces, 1..5usize).prop_map(|(space, n)| space.repeat(n)),
        3 => prop::sample::select([&marked[..], &digits, &words].concat()).prop_map(str::to_owned),
        1 => prop::sample::select(ADDED.to_vec()).prop_map(|(content, _)| content.to_owned()),
        1 => prop::sample::select(vec!["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<think>", "<|im_", "end|>"])
            .prop_map(str::to_owned),
        2 => ".{0,4}",
        2 => any::<String>(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn any_text_has_the_tokenizers_own_ids_and_offsets(pieces in prop::collection::vec(piece(), 0..12)) {
        let text = pieces.concat();
        TOKENIZERS.iter().for_each(|tokenizer| check(tokenizer, &text));
    }
}

#[test]
fn every_tokenizer_here_has_the_quick_way() {
    assert!(TOKENIZERS.iter().all(|tokenizer| tokenizer.words.is_some()));
}

#[test]
fn long_words_and_long_runs_have_the_tokenizers_own_ids() {
    for text in ["a".repeat(3000), " ".repeat(20_000) + "x", "\n ".repeat(3000), "é".repeat(200), "1".repeat(999)] {
        TOKENIZERS.iter().for_each(|tokenizer| check(tokenizer, &format!("{text} and {text}")));
    }
}

#[test]
fn more_words_than_are_remembered_are_still_the_same() {
    let tokenizer = &TOKENIZERS[0];
    let text: String =
        (0..300_000).map(|n| format!(" w{}", char::from_u32(0x4e00 + n % 70_000).unwrap_or('x'))).collect();
    assert_eq!(tokenizer.encode(&text, SpecialTokens::Exclude).unwrap(), slowly(tokenizer, &text).0);
}

/// Other tokenizers have no fast path.
#[test]
fn other_steps_are_left_to_the_tokenizer() {
    let stripping = json!([{"id": 1, "content": "<m>", "single_word": false, "lstrip": true, "rstrip": false,
                            "normalized": false, "special": true}]);
    for (key, value) in [
        ("pre_tokenizer", bytes(true, true, true)),
        ("pre_tokenizer", sequence(&[split(LLAMA3, "Removed"), bytes(false, true, false)])),
        ("pre_tokenizer", sequence(&[split(r"\p{L}++|\s", "Isolated"), bytes(false, true, false)])),
        ("pre_tokenizer", sequence(&[split(r"\p{N}{1,3}+|\s", "Isolated"), bytes(false, true, false)])),
        ("pre_tokenizer", sequence(&[split(r"\p{L}+(?!\d)|\s", "Isolated"), bytes(false, true, false)])),
        ("pre_tokenizer", sequence(&[split(r"\bx|x*", "Isolated"), bytes(false, true, false)])),
        ("pre_tokenizer", json!({"type": "Whitespace"})),
        ("normalizer", json!({"type": "Lowercase"})),
        ("added_tokens", stripping),
    ] {
        let tokenizer = changed("smollm2", &[(key, value)]);
        assert!(tokenizer.words.is_none(), "{key}");
        check(&tokenizer, "Some  ByteLevelBpe, <m> 12\n");
    }
}
