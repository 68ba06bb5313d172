//! Special tokens that a tokenizer's folder configures.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Map, Value as Json};

use super::{TokenizerError, files};

/// Special token with its text and id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecialToken {
    /// Text of the token.
    pub text: String,
    /// Token id.
    pub id: u32,
}

/// Special tokens that the post-processor adds around a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PostProcessorTokens {
    /// Ids before the text, usually BOS or none.
    pub before: Vec<u32>,
    /// Ids after the text.
    pub after: Vec<u32>,
}

impl PostProcessorTokens {
    /// Finds the tokens that the post-processor adds around a text. If encoding drops the text, BOS ends the prefix.
    pub(super) fn of(inner: &tokenizers::Tokenizer, bos: Option<&SpecialToken>) -> tokenizers::Result<Self> {
        let ids = |text: &str, adds: bool| Ok::<_, tokenizers::Error>(inner.encode(text, adds)?.get_ids().to_vec());
        let (own, all) = (ids("a", false)?, ids("a", true)?);
        let start = match own.is_empty() {
            true => bos.and_then(|bos| all.iter().position(|id| *id == bos.id)).map_or(0, |at| at + 1),
            false => all.windows(own.len()).position(|window| window == own).unwrap_or(0),
        };
        Ok(Self { before: all[..start].to_vec(), after: all[(start + own.len()).min(all.len())..].to_vec() })
    }
}

impl PostProcessorTokens {
    /// Rejects ids without a token, for which a model has no embedding.
    pub(super) fn check(&self, inner: &tokenizers::Tokenizer) -> Result<(), String> {
        let unknown = self.before.iter().chain(&self.after).find(|id| inner.id_to_token(**id).is_none());
        unknown.map_or(Ok(()), |id| {
            Err(format!(
                "its post_processor adds the id {id}, and no token of the vocabulary has that id; correct the id"
            ))
        })
    }
}

/// Every `*_token` key of the folder's files with its text, in file order. Templates receive all of them.
pub(super) struct SpecialTokenConfig(pub(super) Vec<(String, String)>);

impl SpecialTokenConfig {
    /// Reads `tokenizer_config.json` and, for missing keys, `special_tokens_map.json`.
    pub(super) fn from_configs(config: &Map<String, Json>, map: &Map<String, Json>) -> Self {
        let mut tokens: Vec<(String, String)> = Vec::new();
        // A null key in the config disables the token, whatever the older file holds.
        let older = map.iter().filter(|(key, _)| !config.contains_key(*key));
        // transformers 5 stores model-specific tokens (image_token, ...) separately.
        let extra = config.get("extra_special_tokens").and_then(Json::as_object);
        let model = config.get("model_specific_special_tokens").and_then(Json::as_object);
        let nested = [extra, model].into_iter().flatten().flatten();
        for (key, value) in config.iter().chain(older).chain(nested) {
            if let Some(text) = token_text(value).filter(|_| key.ends_with("_token")) {
                tokens.push((key.clone(), text.to_owned()));
            }
        }
        Self(tokens)
    }

    pub(super) fn text(&self, key: &str) -> Option<&str> {
        let mut found = self.0.iter().filter(|(name, _)| name == key);
        found.next().map(|(_, text)| text.as_str())
    }
}

/// Returns the text of a token: `"<s>"`, or an AddedToken `{"content": "<s>", ...}`.
fn token_text(value: &Json) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str()).filter(|text| !text.is_empty())
}

/// Rejects a special token of `tokenizer_config.json` that is neither a string nor an AddedToken.
pub(super) fn check_roles(directory: &Path, config: &Map<String, Json>) -> Result<(), TokenizerError> {
    for key in ["bos_token", "eos_token", "pad_token", "unk_token"] {
        let is_token = |value: &Json| value.is_string() || value.get("content").is_some_and(Json::is_string);
        let Some(value) = config.get(key).filter(|value| !value.is_null() && !is_token(value)) else { continue };
        return Err(TokenizerError::InvalidValue {
            path: directory.join("tokenizer_config.json"),
            key,
            found: value.to_string().chars().take(60).collect(),
            expected: "a string, or an object with a string under `content`",
        });
    }
    Ok(())
}

/// Reads the ids that end generation: `eos_token_id`, a number or a list, in `generation_config.json` and
/// `config.json`.
pub(super) fn eos_ids(directory: &Path) -> Result<BTreeSet<u32>, TokenizerError> {
    let mut ids = BTreeSet::new();
    for file in ["generation_config.json", "config.json"] {
        let config = files::read_object(&directory.join(file))?;
        let Some(value) = config.get("eos_token_id").filter(|value| !value.is_null()) else {
            continue;
        };
        let listed = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        for id in listed {
            let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
            ids.insert(id.ok_or_else(|| TokenizerError::InvalidValue {
                path: directory.join(file),
                key: "eos_token_id",
                found: value.to_string(),
                expected: "a token id or a list of them",
            })?);
        }
    }
    Ok(ids)
}
