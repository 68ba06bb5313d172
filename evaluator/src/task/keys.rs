//! Reading a YAML map key by key: each key by its type, none unknown.

use candlewick_text::suggestion::did_you_mean;
use serde_json::{Map, Value as Json};

use super::error::ConfigError;
use super::yaml::{Entry, Node, Value};

/// A map of a task file. `what` names it in complaints: "a task", "a metric".
#[derive(Clone, Copy)]
pub(crate) struct YamlMap<'a> {
    node: &'a Node,
    entries: &'a [Entry],
    what: &'static str,
}

impl<'a> YamlMap<'a> {
    /// Takes a node as a map with no other keys than `known`.
    pub(crate) fn new(node: &'a Node, what: &'static str, known: &[&str]) -> Result<Self, ConfigError> {
        let keys = Self::open(node, what)?;
        keys.only(known)?;
        Ok(keys)
    }

    /// Checks that there are no other keys than `known`.
    pub(crate) fn only(&self, known: &[&str]) -> Result<(), ConfigError> {
        let stranger = self.entries.iter().find(|entry| !known.contains(&entry.key.as_str()));
        stranger.map_or(Ok(()), |entry| Err(self.unknown(entry, known)))
    }

    /// Takes a node as a map with any keys.
    pub(crate) fn open(node: &'a Node, what: &'static str) -> Result<Self, ConfigError> {
        match &node.value {
            Value::Map(entries) => Ok(Self { node, entries, what }),
            _ => Err(ConfigError::at(node.place.clone(), format!("{what} is a map of keys, not {}", node.describe()))),
        }
    }

    fn unknown(&self, entry: &Entry, known: &[&str]) -> ConfigError {
        let near = did_you_mean(&entry.key, known.iter().copied());
        let message = format!("unknown key `{}` in {}{near}", entry.key, self.what);
        let fault = ConfigError::at(entry.place.clone(), message);
        if near.is_empty() { fault.note(format!("known are {}", known.join(", "))) } else { fault }
    }

    /// Blames the map as a whole.
    pub(crate) fn fault(&self, message: impl Into<String>) -> ConfigError {
        ConfigError::at(self.node.place.clone(), message)
    }

    /// All keys, in the order of writing.
    pub(crate) fn entries(&self) -> &'a [Entry] {
        self.entries
    }

    /// The entry of a key that is there and not null.
    pub(crate) fn get(&self, key: &str) -> Option<&'a Entry> {
        self.entries.iter().find(|entry| entry.key == key).filter(|entry| !matches!(entry.node.value, Value::Null))
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<String>, ConfigError> {
        self.get(key).map(text_of).transpose()
    }

    pub(crate) fn required_text(&self, key: &str) -> Result<String, ConfigError> {
        self.text(key)?.ok_or_else(|| self.fault(format!("{} needs the key `{key}`", self.what)))
    }

    pub(crate) fn flag(&self, key: &str, default: bool) -> Result<bool, ConfigError> {
        match self.get(key) {
            None => Ok(default),
            Some(entry) => match &entry.node.value {
                Value::Bool(value) => Ok(*value),
                _ => Err(wrong(entry, "true or false")),
            },
        }
    }

    pub(crate) fn count(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        let Some(entry) = self.get(key) else { return Ok(None) };
        match entry.node.value {
            Value::Int(number) => usize::try_from(number).ok(),
            _ => None,
        }
        .map_or_else(|| Err(wrong(entry, "a whole number from 0 on")), |count| Ok(Some(count)))
    }

    /// Reads a count of at most `most`.
    pub(crate) fn count_up_to(&self, key: &str, most: usize) -> Result<Option<usize>, ConfigError> {
        let count = self.count(key)?;
        match (self.get(key), count) {
            (Some(entry), Some(count)) if count > most => Err(wrong(entry, &format!("at most {most}"))),
            _ => Ok(count),
        }
    }

    pub(crate) fn integer(&self, key: &str) -> Result<Option<i64>, ConfigError> {
        let Some(entry) = self.get(key) else { return Ok(None) };
        match entry.node.value {
            Value::Int(number) => i64::try_from(number).ok(),
            _ => None,
        }
        .map_or_else(|| Err(wrong(entry, "a whole number")), |number| Ok(Some(number)))
    }

    /// One text, or a list of them.
    pub(crate) fn texts(&self, key: &str) -> Result<Option<Vec<String>>, ConfigError> {
        let Some(entry) = self.get(key) else { return Ok(None) };
        match &entry.node.value {
            Value::Text(text) => Ok(Some(vec![text.clone()])),
            Value::List(items) => {
                let expected = |item: &Node| format!("{key}: expected texts, found {}", item.describe());
                let text = |item| scalar(item).ok_or_else(|| ConfigError::at(item.place.clone(), expected(item)));
                let texts = items.iter().map(text);
                texts.collect::<Result<_, _>>().map(Some)
            }
            _ => Err(wrong(entry, "a text or a list of texts")),
        }
    }

    pub(crate) fn list(&self, key: &str) -> Result<Option<&'a [Node]>, ConfigError> {
        let Some(entry) = self.get(key) else { return Ok(None) };
        match &entry.node.value {
            Value::List(items) => Ok(Some(items)),
            _ => Err(wrong(entry, "a list")),
        }
    }

    pub(crate) fn map(&self, key: &str) -> Result<Option<Map<String, Json>>, ConfigError> {
        let Some(entry) = self.get(key) else { return Ok(None) };
        match entry.node.json() {
            Json::Object(fields) => Ok(Some(fields)),
            _ => Err(wrong(entry, "a map")),
        }
    }
}

/// Says what was expected of a key.
pub(crate) fn wrong(entry: &Entry, wanted: &str) -> ConfigError {
    ConfigError::at(
        entry.node.place.clone(),
        format!("{}: expected {wanted}, found {}", entry.key, entry.node.describe()),
    )
}

fn text_of(entry: &Entry) -> Result<String, ConfigError> {
    scalar(&entry.node).ok_or_else(|| wrong(entry, "a text"))
}

/// Returns a text, or a number as text.
fn scalar(node: &Node) -> Option<String> {
    match &node.value {
        Value::Text(text) => Some(text.clone()),
        value => value.number().map(|number| number.to_string()),
    }
}
