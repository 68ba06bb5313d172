//! `generation_kwargs` of a task, and their conversion to generation settings.

use candlewick_text::suggestion::did_you_mean;
use serde_json::{Map, Value as Json};

use super::error::ConfigError;
use super::yaml::TaskEntry;
use candlewick_inference::request::GenerationSettings;

const KNOWN: [&str; 9] = [
    "until",
    "do_sample",
    "temperature",
    "top_p",
    "top_k",
    "max_gen_toks",
    "max_new_tokens",
    "max_tokens",
    "max_completion_tokens",
];

/// Keys for the maximum number of generated tokens; the first key present wins.
const MAX_TOKENS_KEYS: [&str; 4] = ["max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"];

/// Returns an error for unsupported `generation_kwargs`.
pub(crate) fn check(kwargs: &Map<String, Json>, entry: &TaskEntry) -> Result<(), ConfigError> {
    settings(kwargs)
        .map(|_| ())
        .map_err(|problem| ConfigError::at(entry.place.clone(), format!("generation_kwargs: {problem}")))
}

/// Converts `generation_kwargs` to settings, as lm-eval's Hugging Face model reads the keys.
pub fn settings(kwargs: &Map<String, Json>) -> Result<GenerationSettings, String> {
    if let Some(key) = kwargs.keys().find(|key| !KNOWN.contains(&key.as_str())) {
        return Err(format!("unknown key `{key}`{}; known are {}", did_you_mean(key, KNOWN), KNOWN.join(", ")));
    }
    let temperature = optional(kwargs, "temperature", number, "a number")?.unwrap_or(0.0);
    let do_sample = optional(kwargs, "do_sample", Json::as_bool, "true or false")?.unwrap_or(temperature > 0.0);
    let whole = |value: &Json| value.as_f64().filter(|value| *value >= 0.0 && value.fract() == 0.0).map(|n| n as u64);
    let count = |value: &Json| value.as_u64().or_else(|| whole(value)).map(|n| n as usize);
    let mut max_gen_toks = None;
    for alias in MAX_TOKENS_KEYS {
        max_gen_toks = max_gen_toks.or(optional(kwargs, alias, count, "a number of tokens")?);
    }
    Ok(GenerationSettings {
        until: optional(kwargs, "until", texts, "a text or a list of texts")?.unwrap_or_default(),
        max_gen_toks,
        do_sample,
        temperature: if do_sample { temperature } else { 0.0 },
        top_p: optional(kwargs, "top_p", number, "a number")?.unwrap_or(1.0),
        top_k: optional(kwargs, "top_k", count, "a number of tokens")?,
    })
}

/// Returns a warning for each key without effect. lm-eval prints the same warnings.
pub(crate) fn ignored_kwargs(kwargs: &Map<String, Json>) -> Vec<String> {
    let given = |key: &&str| kwargs.get(*key).is_some_and(|value| !value.is_null());
    let mut of_length = MAX_TOKENS_KEYS.iter().filter(|key| given(key));
    let counts = of_length.next();
    let mut found: Vec<String> = of_length
        .map(|key| {
            format!(
                "{key}={} has no effect: {}={} overrides it",
                kwargs[*key],
                counts.unwrap_or(key),
                kwargs[*counts.unwrap_or(key)]
            )
        })
        .collect();
    let temperature = kwargs.get("temperature").and_then(number).unwrap_or(0.0);
    // As in transformers, do_sample=true with temperature 0 is an error.
    if temperature != 0.0 && kwargs.get("do_sample").and_then(Json::as_bool) == Some(false) {
        found.push(format!("temperature={temperature} has no effect: it needs do_sample=true"));
    }
    found
}

fn optional<T>(
    kwargs: &Map<String, Json>,
    key: &str,
    read: impl Fn(&Json) -> Option<T>,
    wanted: &str,
) -> Result<Option<T>, String> {
    match kwargs.get(key) {
        None | Some(Json::Null) => Ok(None),
        Some(value) => read(value).map(Some).ok_or_else(|| format!("{key}: expected {wanted}, found {value}")),
    }
}

/// Reads a number, or a string that holds a number.
pub(crate) fn number(value: &Json) -> Option<f64> {
    value.as_f64().or_else(|| value.as_str()?.trim().parse().ok())
}

fn texts(value: &Json) -> Option<Vec<String>> {
    match value {
        Json::String(text) => Some(vec![text.clone()]),
        Json::Array(items) => items.iter().map(|item| item.as_str().map(str::to_owned)).collect(),
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(kwargs: Json) -> Result<GenerationSettings, String> {
        settings(kwargs.as_object().unwrap())
    }

    #[test]
    fn temperature_alone_samples() {
        assert!(read(json!({"temperature": 0.5})).unwrap().do_sample);
        assert!(!read(json!({"temperature": 0})).unwrap().do_sample);
        assert_eq!(read(json!({"temperature": 0.5, "do_sample": false})).unwrap().temperature, 0.0);
    }

    #[test]
    fn tokens_have_several_names() {
        assert_eq!(read(json!({"max_tokens": 3, "max_gen_toks": 7})).unwrap().max_gen_toks, Some(7));
        assert_eq!(read(json!({"until": "x"})).unwrap().until, ["x"]);
    }

    #[test]
    fn settings_without_an_effect_are_reported() {
        let said = |kwargs: Json| ignored_kwargs(kwargs.as_object().unwrap());
        let lengths = json!({"max_gen_toks": 7, "max_new_tokens": 3, "max_tokens": null});
        assert_eq!(said(lengths), ["max_new_tokens=3 has no effect: max_gen_toks=7 overrides it"]);
        assert!(said(json!({"do_sample": false, "temperature": 0.5}))[0].contains("needs do_sample=true"));
        assert!(said(json!({"do_sample": true})).is_empty(), "sampling refuses it");
        assert!(said(json!({"temperature": 0.5, "max_new_tokens": 3})).is_empty());
        assert_eq!(read(json!({"max_gen_toks": 8.0})).unwrap().max_gen_toks, Some(8));
    }

    #[test]
    fn unknown_settings_are_refused_by_name() {
        assert!(read(json!({"num_beams": 4})).unwrap_err().contains("unknown key `num_beams`"));
        assert!(read(json!({"do_smaple": true})).unwrap_err().contains("did you mean `do_sample`?"));
        assert!(read(json!({"top_p": "x"})).unwrap_err().contains("top_p: expected a number"));
    }
}
