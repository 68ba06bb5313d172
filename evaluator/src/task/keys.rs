//! Typed access to the keys of a YAML map, with an error for unknown keys.

use candlewick_text::suggestion::did_you_mean;
use serde_json::{Map, Value as Json};

use super::error::ConfigError;
use super::yaml::{TaskEntry, TaskNode, TaskValue};

/// Map of a task file. `what` describes it in error messages: "a task", "a metric".
#[derive(Clone, Copy)]
pub(crate) struct YamlMap<'a> {
    node: &'a TaskNode,
    entries: &'a [TaskEntry],
    what: &'static str,
}

impl<'a> YamlMap<'a> {
    /// Wraps a node that must be a map with no other keys than `known`.
    pub(crate) fn new(node: &'a TaskNode, what: &'static str, known: &[&str]) -> Result<Self, ConfigError> {
        let keys = Self::with_any_keys(node, what)?;
        keys.deny_unknown(known)?;
        Ok(keys)
    }

    /// Returns an error if there are other keys than `known`.
    pub(crate) fn deny_unknown(&self, known: &[&str]) -> Result<(), ConfigError> {
        let stranger = self.entries.iter().find(|entry| !known.contains(&entry.key.as_str()));
        stranger.map_or(Ok(()), |entry| Err(self.unknown(entry, known)))
    }

    /// Wraps a node that must be a map; any keys are allowed.
    pub(crate) fn with_any_keys(node: &'a TaskNode, what: &'static str) -> Result<Self, ConfigError> {
        match &node.value {
            TaskValue::Map(entries) => Ok(Self { node, entries, what }),
            _ => Err(ConfigError::at(node.place.clone(), format!("{what} is a map of keys, not {}", node.describe()))),
        }
    }

    fn unknown(&self, entry: &TaskEntry, known: &[&str]) -> ConfigError {
        let near = did_you_mean(&entry.key, known.iter().copied());
        let message = format!("unknown key `{}` in {}{near}", entry.key, self.what);
        let fault = ConfigError::at(entry.place.clone(), message);
        if near.is_empty() { fault.with_remedy(format!("known are {}", known.join(", "))) } else { fault }
    }

    /// Creates an error at the location of the map.
    pub(crate) fn error(&self, message: impl Into<String>) -> ConfigError {
        ConfigError::at(self.node.place.clone(), message)
    }

    /// Returns all entries, in the order of the file.
    pub(crate) fn entries(&self) -> &'a [TaskEntry] {
        self.entries
    }

    /// Returns the entry of a key, unless it is missing or null.
    pub(crate) fn get(&self, key: &str) -> Option<&'a TaskEntry> {
        self.entries.iter().find(|entry| entry.key == key).filter(|entry| !matches!(entry.node.value, TaskValue::Null))
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<String>, ConfigError> {
        self.get(key).map(text_of).transpose()
    }

    pub(crate) fn required_text(&self, key: &str) -> Result<String, ConfigError> {
        self.text(key)?.ok_or_else(|| self.error(format!("{} needs the key `{key}`", self.what)))
    }

    pub(crate) fn flag(&self, key: &str, default: bool) -> Result<bool, ConfigError> {
        match self.get(key) {
            None => Ok(default),
            Some(entry) => match &entry.node.value {
                TaskValue::Bool(value) => Ok(*value),
                _ => Err(type_error(entry, "true or false")),
            },
        }
    }

    pub(crate) fn count(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        let Some(entry) = self.get(key) else { return Ok(None) };
        match entry.node.value {
            TaskValue::Int(number) => usize::try_from(number).ok(),
            _ => None,
        }
        .map_or_else(|| Err(type_error(entry, "an integer of at least 0")), |count| Ok(Some(count)))
    }

    /// Reads an integer from 0 to `most`.
    pub(crate) fn count_up_to(&self, key: &str, most: usize) -> Result<Option<usize>, ConfigError> {
        let count = self.count(key)?;
        match (self.get(key), count) {
            (Some(entry), Some(count)) if count > most => Err(type_error(entry, &format!("at most {most}"))),
            _ => Ok(count),
        }
    }

    pub(crate) fn integer(&self, key: &str) -> Result<Option<i64>, ConfigError> {
        let Some(entry) = self.get(key) else { return Ok(None) };
        match entry.node.value {
            TaskValue::Int(number) => i64::try_from(number).ok(),
            _ => None,
        }
        .map_or_else(|| Err(type_error(entry, "an integer")), |number| Ok(Some(number)))
    }

    /// Reads a string or a list of strings.
    pub(crate) fn texts(&self, key: &str) -> Result<Option<Vec<String>>, ConfigError> {
        let Some(entry) = self.get(key) else { return Ok(None) };
        match &entry.node.value {
            TaskValue::Text(text) => Ok(Some(vec![text.clone()])),
            TaskValue::List(items) => {
                let expected = |item: &TaskNode| format!("{key}: expected texts, found {}", item.describe());
                let text = |item| scalar(item).ok_or_else(|| ConfigError::at(item.place.clone(), expected(item)));
                let texts = items.iter().map(text);
                texts.collect::<Result<_, _>>().map(Some)
            }
            _ => Err(type_error(entry, "a text or a list of texts")),
        }
    }

    pub(crate) fn list(&self, key: &str) -> Result<Option<&'a [TaskNode]>, ConfigError> {
        let Some(entry) = self.get(key) else { return Ok(None) };
        match &entry.node.value {
            TaskValue::List(items) => Ok(Some(items)),
            _ => Err(type_error(entry, "a list")),
        }
    }

    pub(crate) fn map(&self, key: &str) -> Result<Option<Map<String, Json>>, ConfigError> {
        let Some(entry) = self.get(key) else { return Ok(None) };
        match entry.node.json() {
            Json::Object(fields) => Ok(Some(fields)),
            _ => Err(type_error(entry, "a map")),
        }
    }
}

/// Creates an error that states the expected type of a key.
pub(crate) fn type_error(entry: &TaskEntry, wanted: &str) -> ConfigError {
    ConfigError::at(
        entry.node.place.clone(),
        format!("{}: expected {wanted}, found {}", entry.key, entry.node.describe()),
    )
}

fn text_of(entry: &TaskEntry) -> Result<String, ConfigError> {
    scalar(&entry.node).ok_or_else(|| type_error(entry, "a text"))
}

/// Returns a string, or a number as a string.
fn scalar(node: &TaskNode) -> Option<String> {
    match &node.value {
        TaskValue::Text(text) => Some(text.clone()),
        value => value.number().map(|number| number.to_string()),
    }
}
