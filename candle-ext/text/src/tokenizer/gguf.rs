//! Vocabulary of a tokenizer in the terms of GGUF's `tokenizer.ggml.*` keys, as llama.cpp's convert_hf_to_gguf.py writes them.
//!
//! llama.cpp implements two algorithms. `gpt2` is byte-level BPE, with a split rule that it knows by name
//! (`tokenizer.ggml.pre`). `llama` is SentencePiece's BPE. GGUF has no normalizer: llama.cpp does not apply NFC.

use std::collections::HashMap;

use serde_json::Value as Json;

use super::{Tokenizer, TokenizerError};
use crate::printable::shortened;

/// Vocabulary, special tokens and chat templates of a tokenizer for a GGUF file.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufVocabulary {
    /// Algorithm: `gpt2` or `llama`.
    pub model: &'static str,
    /// Name of the split rule: `llama-bpe`, `qwen2`, ...; `default` for `llama`.
    pub pre: &'static str,
    /// Token of each id, as spelled in the vocabulary; `[PADn]` for rows of the embedding without a token.
    pub tokens: Vec<String>,
    /// Type of each token.
    pub types: Vec<GgufTokenType>,
    /// Score of each token: a pair with a higher score is merged earlier. Only `llama` has scores.
    pub scores: Option<Vec<f32>>,
    /// Merges of byte-level BPE, two tokens with a space between. Empty for `llama`.
    pub merges: Vec<String>,
    /// BOS, EOS, unknown and padding token: the part of the key before `_token_id`, and the id.
    pub special_ids: Vec<(&'static str, u32)>,
    /// True if encoding puts BOS before a text.
    pub adds_bos: bool,
    /// True if encoding puts EOS after a text.
    pub adds_eos: bool,
    /// True if encoding puts a space before a text. Only `llama` has the setting.
    pub adds_space_prefix: Option<bool>,
    /// Chat templates by name; the usual one is `default`.
    pub chat_templates: Vec<(String, String)>,
}

/// Type of a token in GGUF.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum GgufTokenType {
    /// Ordinary token.
    Normal = 1,
    /// Token for unknown text.
    Unknown = 2,
    /// Special token.
    Control = 3,
    /// Added token that is not special.
    UserDefined = 4,
    /// Row of the embedding without a token.
    Unused = 5,
    /// Byte of SentencePiece: `<0x0A>`.
    Byte = 6,
}

/// Split rule of the tokenizers of Llama 3, and llama.cpp's names of it: with and without `ignore_merges`.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Split rule of the tokenizers of Qwen2, Qwen2.5 and Qwen3.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

impl Tokenizer {
    /// Returns the vocabulary for a GGUF file of a model with `n_rows` rows in its embedding.
    ///
    /// # Errors
    /// If llama.cpp has no algorithm or split rule that gives the same tokens, or a token has no row.
    pub fn gguf_vocabulary(&self, n_rows: usize) -> Result<GgufVocabulary, TokenizerError> {
        let json = serde_json::to_value(&self.inner).map_err(|error| self.not_in_gguf(error.to_string()))?;
        let kind = Kind::of(&json).map_err(|problem| self.not_in_gguf(problem))?;
        let vocabulary = self.inner.get_vocab(true);
        if let Some((token, id)) = vocabulary.iter().find(|(_, id)| **id as usize >= n_rows) {
            let problem = format!("token {token:?} has the id {id}, and the model's embedding has {n_rows} rows");
            return Err(self.not_in_gguf(problem));
        }
        let mut tokens: Vec<String> = (0..n_rows).map(|id| format!("[PAD{id}]")).collect();
        let mut types = vec![GgufTokenType::Unused; n_rows];
        for (token, id) in vocabulary {
            types[id as usize] = self.gguf_type(&token, id, kind);
            tokens[id as usize] = match types[id as usize] {
                // llama.cpp searches for these in the text as it is written.
                GgufTokenType::UserDefined => token.replace('\u{2581}', " "),
                _ => token,
            };
        }
        let merges = merges_of(&json);
        let scores = matches!(kind, Kind::SentencePiece { .. }).then(|| scores(&tokens, &merges));
        let id_of = |token: &Option<super::SpecialToken>| token.as_ref().map(|token| token.id);
        let around = &self.added;
        let [bos, eos] = [id_of(&self.bos), id_of(&self.eos)];
        let pad = self.named.iter().any(|(key, _)| key == "pad_token").then(|| id_of(&self.pad)).flatten();
        let roles = [("bos", bos), ("eos", eos), ("unknown", id_of(&self.unk)), ("padding", pad)];
        let templates = self.templates.iter().map(|template| (template.name.clone(), template.source.clone()));
        Ok(GgufVocabulary {
            model: kind.model(),
            pre: kind.split_rule(),
            types,
            scores,
            merges: match kind {
                Kind::ByteLevel { .. } => {
                    merges.iter().map(|[a, b]| format!("{} {}", visible(a), visible(b))).collect()
                }
                Kind::SentencePiece { .. } => Vec::new(),
            },
            tokens,
            special_ids: roles.into_iter().filter_map(|(role, id)| Some((role, id?))).collect(),
            adds_bos: bos.is_some_and(|bos| around.before == [bos]),
            adds_eos: eos.is_some_and(|eos| around.after == [eos]),
            adds_space_prefix: match kind {
                Kind::SentencePiece { adds_prefix } => Some(adds_prefix),
                Kind::ByteLevel { .. } => None,
            },
            chat_templates: templates.collect(),
        })
    }

    fn not_in_gguf(&self, problem: String) -> TokenizerError {
        TokenizerError::NotInGguf { directory: self.directory.clone(), problem }
    }

    fn gguf_type(&self, token: &str, id: u32, kind: Kind) -> GgufTokenType {
        let added = self.inner.get_added_vocabulary();
        let is_byte = |token: &str| token.len() == 6 && token.starts_with("<0x") && token.ends_with('>');
        match kind {
            Kind::SentencePiece { .. } if self.unk.as_ref().is_some_and(|unk| unk.id == id) => GgufTokenType::Unknown,
            Kind::SentencePiece { .. } if is_byte(token) => GgufTokenType::Byte,
            _ if added.is_special_token(token) => GgufTokenType::Control,
            _ if !added.get_vocab().contains_key(token) => GgufTokenType::Normal,
            _ if looks_special(token) => GgufTokenType::Control,
            _ => GgufTokenType::UserDefined,
        }
    }
}

/// Returns true for an added token that llama.cpp treats as special even if the tokenizer does not.
fn looks_special(token: &str) -> bool {
    let is_between = |open: &str, close: &str| token.starts_with(open) && token.ends_with(close);
    is_between("<|", "|>") || is_between("<\u{ff5c}", "\u{ff5c}>") || ["<pad>", "<mask>"].contains(&token)
}

/// Algorithm of a tokenizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Byte-level BPE with the name of its split rule.
    ByteLevel { split_rule: &'static str },
    /// SentencePiece's BPE.
    SentencePiece { adds_prefix: bool },
}

impl Kind {
    fn model(self) -> &'static str {
        match self {
            Self::ByteLevel { .. } => "gpt2",
            Self::SentencePiece { .. } => "llama",
        }
    }

    fn split_rule(self) -> &'static str {
        match self {
            Self::ByteLevel { split_rule } => split_rule,
            Self::SentencePiece { .. } => "default",
        }
    }

    fn of(json: &Json) -> Result<Self, String> {
        let model = &json["model"];
        if model["type"] != "BPE" {
            return Err(format!("it is a {} tokenizer, and only BPE is exported", model["type"]));
        }
        if model["byte_fallback"] == true {
            return Self::of_sentence_piece(json);
        }
        let ignores_merges = model["ignore_merges"] == true;
        match (split_rule(&steps(&json["pre_tokenizer"], "pretokenizers")), ignores_merges) {
            (Some("llama3"), true) => Ok(Self::ByteLevel { split_rule: "llama-bpe" }),
            (Some("llama3"), false) => Ok(Self::ByteLevel { split_rule: "smaug-bpe" }),
            (Some(split_rule), false) => Ok(Self::ByteLevel { split_rule }),
            (found, _) => {
                let problem = match found {
                    Some(name) => format!("the split rule {name} with ignore_merges"),
                    None => format!("the pre_tokenizer {}", shorten(&json["pre_tokenizer"])),
                };
                Err(format!("llama.cpp does not have {problem}; it has those of Llama 3, Qwen2, SmolLM and GPT-2"))
            }
        }
    }

    /// Reads the space before a text from the normalizer `Prepend`, or from the pre-tokenizer `Metaspace`.
    fn of_sentence_piece(json: &Json) -> Result<Self, String> {
        let prepends = |step: &&Json| step["type"] == "Prepend" && step["prepend"] == "\u{2581}";
        let known = |step: &&Json| ["Prepend", "Replace"].iter().any(|kind| step["type"] == *kind);
        let normalizer = steps(&json["normalizer"], "normalizers");
        let pre_tokenizer = steps(&json["pre_tokenizer"], "pretokenizers");
        match (normalizer.iter().find(|step| !known(step)), pre_tokenizer.as_slice()) {
            (Some(step), _) => Err(format!("llama.cpp does not have the normalizer {}", shorten(step))),
            (None, []) => Ok(Self::SentencePiece { adds_prefix: normalizer.iter().any(prepends) }),
            (None, [step]) if step["type"] == "Metaspace" => {
                Ok(Self::SentencePiece { adds_prefix: step["prepend_scheme"] != "never" })
            }
            (None, _) => Err(format!("llama.cpp does not have the pre_tokenizer {}", shorten(&json["pre_tokenizer"]))),
        }
    }
}

/// Returns the steps of a pre-tokenizer or normalizer: those of a `Sequence`, else the one, or none.
fn steps<'j>(json: &'j Json, list: &str) -> Vec<&'j Json> {
    match json {
        Json::Null => Vec::new(),
        _ if json["type"] == "Sequence" => json[list].as_array().into_iter().flatten().collect(),
        one => vec![one],
    }
}

/// Returns llama.cpp's name of a split rule; `llama3` for that of Llama 3, which has two.
fn split_rule(steps: &[&Json]) -> Option<&'static str> {
    let is_bytes = |step: &Json, use_regex| {
        step["type"] == "ByteLevel" && step["add_prefix_space"] != true && step["use_regex"] == use_regex
    };
    match steps {
        [bytes] if is_bytes(bytes, true) => Some("gpt-2"),
        [digits, bytes] if is_bytes(bytes, true) => {
            (digits["type"] == "Digits" && digits["individual_digits"] == true).then_some("smollm")
        }
        [split, bytes] if is_bytes(bytes, false) && split["behavior"] == "Isolated" && split["invert"] != true => {
            match split["pattern"]["Regex"].as_str() {
                Some(LLAMA3) => Some("llama3"),
                Some(QWEN2) => Some("qwen2"),
                _ => None,
            }
        }
        _ => None,
    }
}

fn shorten(json: &Json) -> String {
    shortened(&json.to_string(), 120).into_owned()
}

/// Returns the merges: pairs, or texts with a space in older files.
fn merges_of(json: &Json) -> Vec<[String; 2]> {
    let pair = |merge: &Json| match merge {
        Json::String(text) => text.split_once(' ').map(|(a, b)| [a.to_owned(), b.to_owned()]),
        _ => Some([merge[0].as_str()?.to_owned(), merge[1].as_str()?.to_owned()]),
    };
    json["model"]["merges"].as_array().into_iter().flatten().filter_map(pair).collect()
}

/// Replaces spaces in a part of a merge, which separate the parts, by the character of byte-level BPE for a space.
fn visible(part: &str) -> String {
    part.replace(' ', "\u{120}")
}

/// Returns SentencePiece's scores: minus the rank of the first merge that makes the token.
///
/// SentencePiece merges the pair whose token has the highest score. The list of merges is sorted by that score.
fn scores(tokens: &[String], merges: &[[String; 2]]) -> Vec<f32> {
    let mut ranks: HashMap<String, usize> = HashMap::new();
    for (rank, [a, b]) in merges.iter().enumerate() {
        ranks.entry(format!("{a}{b}")).or_insert(rank);
    }
    let score = |token: &String| ranks.get(token).map_or(0.0, |rank| -(*rank as f32));
    tokens.iter().map(score).collect()
}
