//! The special tokens a tokenizer's folder names: which they are, as text and as id.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Map, Value as Json};

use super::{TokenizerError, files};

/// A special token as text and as id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecialToken {
    /// How it is written.
    pub text: String,
    /// Its id.
    pub id: u32,
}

/// The special tokens that a tokenizer puts around a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PostProcessorTokens {
    /// The ids before the text, usually BOS or none.
    pub before: Vec<u32>,
    /// The ids after the text.
    pub after: Vec<u32>,
}

impl PostProcessorTokens {
    /// Reads off what the post-processor puts around a text. Of no text, BOS and what is before it stand before.
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
    /// Refuses ids that no token has: a model has no embedding for them.
    pub(super) fn check(&self, inner: &tokenizers::Tokenizer) -> Result<(), String> {
        let unknown = self.before.iter().chain(&self.after).find(|id| inner.id_to_token(**id).is_none());
        unknown.map_or(Ok(()), |id| {
            Err(format!(
                "its post_processor adds the id {id}, and no token of the vocabulary has that id; correct the id"
            ))
        })
    }
}

/// What the folder's files say of special tokens, not yet looked up.
pub(super) struct SpecialTokenConfig {
    /// Every `*_token` by key, in the order of the files. Templates see them all.
    pub(super) tokens: Vec<(String, String)>,
    pub(super) add_bos: Option<bool>,
    pub(super) add_eos: Option<bool>,
}

impl SpecialTokenConfig {
    /// Reads `tokenizer_config.json` and, for keys it lacks, `special_tokens_map.json`.
    pub(super) fn from_configs(config: &Map<String, Json>, map: &Map<String, Json>) -> Self {
        let mut tokens: Vec<(String, String)> = Vec::new();
        // A key that the config sets to null is no token, whatever the older file says.
        let older = map.iter().filter(|(key, _)| !config.contains_key(*key));
        // transformers 5 keeps a model's own tokens (image_token, ...) apart.
        let extra = config.get("extra_special_tokens").and_then(Json::as_object);
        let model = config.get("model_specific_special_tokens").and_then(Json::as_object);
        let nested = [extra, model].into_iter().flatten().flatten();
        for (key, value) in config.iter().chain(older).chain(nested) {
            if let Some(text) = token_text(value).filter(|_| key.ends_with("_token")) {
                tokens.push((key.clone(), text.to_owned()));
            }
        }
        let flag = |key: &str| config.get(key).and_then(Json::as_bool);
        Self { tokens, add_bos: flag("add_bos_token"), add_eos: flag("add_eos_token") }
    }

    pub(super) fn text(&self, key: &str) -> Option<&str> {
        let mut found = self.tokens.iter().filter(|(name, _)| name == key);
        found.next().map(|(_, text)| text.as_str())
    }
}

/// `"<s>"`, or an AddedToken written out as `{"content": "<s>", ...}`.
fn token_text(value: &Json) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str()).filter(|text| !text.is_empty())
}

/// Refuses a special token of `tokenizer_config.json` that is neither a text nor an AddedToken.
pub(super) fn check_roles(directory: &Path, config: &Map<String, Json>) -> Result<(), TokenizerError> {
    for key in ["bos_token", "eos_token", "pad_token", "unk_token"] {
        let is_token = |value: &Json| value.is_string() || value.get("content").is_some_and(Json::is_string);
        let Some(value) = config.get(key).filter(|value| !value.is_null() && !is_token(value)) else { continue };
        return Err(TokenizerError::InvalidValue {
            path: directory.join("tokenizer_config.json"),
            key,
            found: value.to_string().chars().take(60).collect(),
            expected: "a text, or an object with a text under `content`",
        });
    }
    Ok(())
}

/// The ids that end a generation: `eos_token_id`, a number or a list, in `generation_config.json` and `config.json`.
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
