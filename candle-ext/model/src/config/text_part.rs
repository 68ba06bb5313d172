//! The text part of a multimodal model's config.json, whose keys are in the object `text_config`.

use serde_json::{Map, Value};

use super::json::Keys;
use crate::{Family, ModelError};

/// Key of the object with the keys of the text part.
const TEXT_CONFIG: &str = "text_config";

/// Keys that identify a model.
const NAMES: [&str; 2] = ["architectures", "model_type"];

const TIED: &str = "tie_word_embeddings";

/// Spellings of the dtype.
const DTYPES: [&str; 2] = ["dtype", "torch_dtype"];

/// config.json of a multimodal model, of which the text part alone is read.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MultimodalConfig {
    raw: Map<String, Value>,
}

/// Returns the keys of a model's text, and config.json as a whole if they are in an object of their own.
///
/// Name, dtype and tied embeddings of the whole model are among the keys of its text.
pub(super) fn split(raw: Map<String, Value>) -> Result<(Map<String, Value>, Option<MultimodalConfig>), ModelError> {
    let keys = Keys::new(&raw);
    let family = Family::find(&keys.texts("architectures")?.unwrap_or_default(), keys.text("model_type")?)?;
    // Older files have the keys of the text at the top.
    let Some(nested) = keys.object(TEXT_CONFIG)?.filter(|_| family.is_multimodal()) else { return Ok((raw, None)) };
    let nested_keys = Keys::nested(nested, "text_config.");
    family.check_text_type(nested_keys.text("model_type")?)?;
    let is_tied = [keys.flag(TIED)?, nested_keys.flag(TIED)?].into_iter().flatten().reduce(|a, b| a || b);
    let mut text = nested.clone();
    text.retain(|key, _| !NAMES.contains(&key.as_str()));
    let of_whole = NAMES.iter().chain(&DTYPES).filter_map(|key| Some(((*key).to_owned(), raw.get(*key)?.clone())));
    if DTYPES.iter().any(|key| raw.contains_key(*key)) {
        text.retain(|key, _| !DTYPES.contains(&key.as_str()));
    }
    text.extend(of_whole);
    text.extend(is_tied.map(|is_tied| (TIED.to_owned(), Value::from(is_tied))));
    Ok((text, Some(MultimodalConfig { raw })))
}

impl MultimodalConfig {
    /// Returns config.json with these keys of the text.
    pub(super) fn with_text(&self, text: &Map<String, Value>) -> Map<String, Value> {
        let mut whole = self.raw.clone();
        let before = whole.get(TEXT_CONFIG).and_then(Value::as_object).cloned().unwrap_or_default();
        let is_of_whole = |key: &str| {
            let is_shared = key == TIED || DTYPES.contains(&key);
            NAMES.contains(&key) || (is_shared && self.raw.contains_key(key))
        };
        for (key, value) in text.iter().filter(|(key, _)| is_of_whole(key)) {
            whole.insert(key.clone(), value.clone());
        }
        let mut nested: Map<String, Value> = Map::new();
        // Keys of both keep their place in the file.
        for (key, value) in &before {
            let value = match NAMES.contains(&key.as_str()) {
                true => Some(value),
                false => text.get(key).or_else(|| Some(value).filter(|_| is_of_whole(key))),
            };
            nested.extend(value.map(|value| (key.clone(), value.clone())));
        }
        let added = text.iter().filter(|(key, _)| !before.contains_key(*key) && !is_of_whole(key));
        nested.extend(added.map(|(key, value)| (key.clone(), value.clone())));
        whole.insert(TEXT_CONFIG.to_owned(), Value::Object(nested));
        whole
    }
}
