//! Module selection by names and regular expressions, as in PEFT.

use fancy_regex::Regex;
use serde_json::{Value, json};

use crate::{
    ModelError,
    config::json::{Keys, shorten},
};

/// PEFT's `target_modules`.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Names {
    /// Full module names, or suffixes after a dot.
    List(Vec<String>),
    /// Regular expression that matches a full module name.
    Regex(String),
    /// All linear layers except the output layer.
    AllLinear,
}

impl Names {
    pub(super) fn read(keys: Keys, key: &str) -> Result<Option<Self>, ModelError> {
        match keys.get(key) {
            None => Ok(None),
            Some(Value::String(text)) if text.eq_ignore_ascii_case("all-linear") => Ok(Some(Self::AllLinear)),
            Some(Value::String(text)) => {
                expression(key, &format!("^(?:{text})$"))?;
                Ok(Some(Self::Regex(text.clone())))
            }
            Some(value) => {
                let list = value.as_array().and_then(|list| list.iter().map(Value::as_str).collect::<Option<Vec<_>>>());
                let list = list.ok_or_else(|| {
                    let want = "a list of names, a regular expression or \"all-linear\"";
                    ModelError::lora(key, format!("expected {want}, found {}", shorten(value)))
                })?;
                Ok(Some(Self::List(list.into_iter().map(str::to_string).collect())))
            }
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        matches!(self, Self::List(list) if list.is_empty())
    }

    pub(super) fn to_json(&self) -> Value {
        match self {
            Self::List(list) => json!(list),
            Self::Regex(text) => json!(text),
            Self::AllLinear => json!("all-linear"),
        }
    }

    pub(super) fn matches(&self, key: &str, module: &str) -> Result<bool, ModelError> {
        match self {
            Self::List(list) => Ok(list.iter().any(|name| has_suffix(module, name))),
            Self::Regex(text) => is_match(key, &format!("^(?:{text})$"), module),
            Self::AllLinear => Ok(true),
        }
    }
}

pub(super) fn has_suffix(module: &str, name: &str) -> bool {
    module.strip_suffix(name).is_some_and(|head| head.is_empty() || head.ends_with('.'))
}

fn expression(key: &str, text: &str) -> Result<Regex, ModelError> {
    Regex::new(text).map_err(|e| ModelError::lora(key, format!("`{text}` is not a regular expression: {e}")))
}

pub(super) fn is_match(key: &str, text: &str, module: &str) -> Result<bool, ModelError> {
    expression(key, text)?.is_match(module).map_err(|e| ModelError::lora(key, format!("`{text}`: {e}")))
}
