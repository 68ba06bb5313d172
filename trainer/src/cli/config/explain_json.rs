//! The JSON of `trainer config explain`.

use serde_json::{Value, json};

use super::explained_key::{ExplainedKey, keys_below};
use super::settings::{ResolvedSettings, WordedSetting};
use crate::recipe::{KeyDoc, ValueDoc};

/// Returns the explanation of a key as JSON. Keys that do not apply are null or empty lists.
pub(super) fn as_json(explained: &ExplainedKey, docs: &[KeyDoc], settings: Option<&ResolvedSettings>) -> Value {
    let setting = |s: &WordedSetting| json!({"key": s.key, "value": s.value, "origin": s.origin});
    let of_recipe =
        |settings: &ResolvedSettings| -> Vec<Value> { explained.settings(settings).into_iter().map(setting).collect() };
    let keys: Vec<Value> =
        explained.section().map_or_else(Vec::new, |section| keys_below(docs, section).map(documentation).collect());
    json!({
        "key": explained.key,
        "note": explained.note,
        "documentation": explained.doc.map(documentation),
        "keys": keys,
        "recipe": settings.map(|settings| &settings.path),
        "settings": settings.map(of_recipe),
    })
}

fn documentation(doc: &KeyDoc) -> Value {
    let value = |value: &ValueDoc| json!({"name": value.name, "meaning": value.meaning});
    let other = |(name, remark): &(&str, &str)| json!({"name": name, "remark": remark});
    json!({
        "path": doc.path,
        "meaning": doc.meaning,
        "type": doc.value_type,
        "default": doc.default,
        "values": doc.values.iter().map(value).collect::<Vec<_>>(),
        "value_aliases": doc.value_aliases,
        "aliases": doc.aliases,
        "other_names": doc.other_names.iter().map(other).collect::<Vec<_>>(),
    })
}
