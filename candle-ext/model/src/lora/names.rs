//! Selection of modules and parameters by names and regular expressions, as in PEFT.

use std::collections::HashSet;

use fancy_regex::Regex;
use serde_json::{Value, json};

use crate::{
    ModelError,
    config::json::{Keys, shorten},
    family::multimodal::{name_in_multimodal_model, name_in_text_model},
};

/// PEFT's `target_modules`.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Names {
    /// Full module names, or suffixes after a dot.
    List(Vec<String>),
    /// Regular expression that matches a full module name.
    Regex(String),
    /// All linear layers except the output layer, routers and experts.
    AllLinear,
}

/// Names with a compiled expression.
pub(super) enum NameMatcher<'a> {
    List(HashSet<&'a str>),
    Regex(NamePattern),
    AllLinear,
}

/// A compiled regular expression, and the key that holds it.
pub(super) struct NamePattern {
    key: &'static str,
    text: String,
    regex: Regex,
}

impl Names {
    pub(super) fn read(keys: Keys, key: &'static str) -> Result<Option<Self>, ModelError> {
        match keys.get(key) {
            None => Ok(None),
            // LLaMA-Factory writes `all`.
            Some(Value::String(text)) if ["all-linear", "all"].iter().any(|name| text.eq_ignore_ascii_case(name)) => {
                Ok(Some(Self::AllLinear))
            }
            Some(Value::String(text)) => {
                NamePattern::whole(key, text)?;
                Ok(Some(Self::Regex(text.clone())))
            }
            Some(value) => {
                let want = "a list of names, a regular expression or \"all-linear\"";
                Ok(Some(Self::List(list(key, value, want)?)))
            }
        }
    }

    /// Returns the names of a text model in place of those of a multimodal model.
    pub(super) fn of_text_model(self) -> Self {
        match self {
            Self::List(list) => Self::List(list.iter().map(|name| name_in_text_model(name)).collect()),
            Self::Regex(_) | Self::AllLinear => self,
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

    /// Compiles the expression.
    pub(super) fn matcher(&self, key: &'static str) -> Result<NameMatcher<'_>, ModelError> {
        Ok(match self {
            Self::List(list) => NameMatcher::List(list.iter().map(String::as_str).collect()),
            Self::Regex(text) => NameMatcher::Regex(NamePattern::whole(key, text)?),
            Self::AllLinear => NameMatcher::AllLinear,
        })
    }
}

impl NameMatcher<'_> {
    pub(super) fn matches(&self, module: &str) -> Result<bool, ModelError> {
        match self {
            Self::List(list) => Ok(suffixes(module).any(|name| list.contains(name))),
            Self::Regex(pattern) => pattern.is_match(module),
            Self::AllLinear => Ok(true),
        }
    }
}

impl NamePattern {
    /// Compiles an expression that matches a whole name.
    fn whole(key: &'static str, text: &str) -> Result<Self, ModelError> {
        Self::compile(key, text, &format!("^(?:{text})$"))
    }

    /// Compiles an expression that matches a name, or its end after a dot.
    pub(super) fn suffix(key: &'static str, text: &str) -> Result<Self, ModelError> {
        Self::compile(key, text, &format!(r"^(.*\.)?({text})$"))
    }

    fn compile(key: &'static str, text: &str, expression: &str) -> Result<Self, ModelError> {
        match Regex::new(expression) {
            Ok(regex) => Ok(Self { key, text: text.to_owned(), regex }),
            Err(e) => Err(ModelError::lora(key, format!("`{text}` is not a regular expression: {e}"))),
        }
    }

    /// Returns the key that holds the expression.
    pub(super) fn key(&self) -> &'static str {
        self.key
    }

    /// Returns the expression as written.
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Returns true if the expression matches a name of a text model, or the name that a multimodal model has for it.
    pub(super) fn is_match(&self, name: &str) -> Result<bool, ModelError> {
        let is_match = |name: &str| {
            self.regex.is_match(name).map_err(|e| ModelError::lora(self.key, format!("`{}`: {e}", self.text)))
        };
        Ok(is_match(name)? || is_match(&name_in_multimodal_model(name))?)
    }
}

/// Reads a list of names. `want` describes all accepted values.
pub(super) fn list(key: &str, value: &Value, want: &str) -> Result<Vec<String>, ModelError> {
    let list = value.as_array().and_then(|list| list.iter().map(Value::as_str).collect::<Option<Vec<_>>>());
    let list = list.ok_or_else(|| ModelError::lora(key, format!("expected {want}, found {}", shorten(value))))?;
    Ok(list.into_iter().map(str::to_string).collect())
}

/// Returns a name and its ends after each dot.
pub(super) fn suffixes(name: &str) -> impl Iterator<Item = &str> {
    std::iter::successors(Some(name), |rest| rest.split_once('.').map(|(_, end)| end))
}
