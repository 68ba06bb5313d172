//! Parser of task files that keeps file, line and column of every key and value. Scalars have the types of PyYAML
//! (YAML 1.1). The only supported tag is `!function`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candlewick_text::yaml::{self, YamlSpan};
use serde::de::{Deserialize, Deserializer, Error as _};
use serde_json::Value as Json;
use serde_saphyr::{DuplicateKeyPolicy, NonFiniteFloatPolicy};

use super::error::{ConfigError, SourceLocation};

/// YAML node of a task file, with its location.
pub(crate) type TaskNode = yaml::YamlNode<SourceLocation>;

/// YAML value of a task file.
pub(crate) type TaskValue = yaml::YamlValue<SourceLocation>;

/// Key and value in a map of a task file.
pub(crate) type TaskEntry = yaml::YamlEntry<SourceLocation>;

/// Parses a task file. Errors name `file`.
pub(crate) fn parse(file: &Path, text: &str) -> Result<TaskNode, ConfigError> {
    let options = serde_saphyr::options! {
        duplicate_keys: DuplicateKeyPolicy::LastWins,
        non_finite_float_policy: NonFiniteFloatPolicy::AsString,
        with_snippet: false,
    };
    let file: Arc<PathBuf> = Arc::new(file.to_owned());
    let place = |line, column| SourceLocation { file: file.clone(), line, column };
    let tree = yaml::YamlNode::parse::<Key>(text, options).map_err(|error| {
        let (line, column) = error.at.unwrap_or((0, 0));
        ConfigError::at(place(line, column), error.message)
    })?;
    tree.try_map(&|YamlSpan { line, column, .. }| place(line, column), &|node| checked(node, text))
}

/// Checks the keys and the tag of a value, and reads a lone `y` or `n` as a string, as PyYAML does.
fn checked(mut node: TaskNode, text: &str) -> Result<TaskNode, ConfigError> {
    match &node.value {
        TaskValue::Bool(_) => {
            if let Some(word) = lone_letter(text, &node.place) {
                node.value = TaskValue::Text(word);
            }
        }
        TaskValue::Map(entries) => check_keys(entries)?,
        TaskValue::Tagged(tag, tagged) if tag != "!function" || !matches!(tagged.value, TaskValue::Text(_)) => {
            return Err(ConfigError::at(
                node.place,
                format!("unknown tag `{tag}`; the only one is !function before a text"),
            ));
        }
        _ => {}
    }
    Ok(node)
}

/// Returns the word at a location if it is a lone `y` or `n`, which PyYAML reads as a string.
fn lone_letter(text: &str, place: &SourceLocation) -> Option<String> {
    let line = text.lines().nth(place.line.checked_sub(1)?)?;
    let from: String = line.chars().skip(place.column.checked_sub(1)?).collect();
    let word: String = from.chars().take_while(|c| c.is_alphanumeric()).collect();
    ["y", "n", "Y", "N"].contains(&word.as_str()).then_some(word)
}

/// Returns an error for a duplicate key. PyYAML takes the last value, other parsers the first.
fn check_keys(entries: &[TaskEntry]) -> Result<(), ConfigError> {
    let mut seen: HashMap<&str, &TaskEntry> = HashMap::new();
    for entry in entries {
        if let Some(first) = seen.insert(&entry.key, entry) {
            let message = format!("`{}` is given twice, first in line {}; remove one", entry.key, first.place.line);
            return Err(ConfigError::at(entry.place.clone(), message));
        }
    }
    Ok(())
}

/// Map key: a string, or a scalar as Python prints it.
struct Key(String);

impl yaml::YamlKey for Key {
    fn into_text(self) -> String {
        self.0
    }
}

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let key = match Json::deserialize(deserializer)? {
            Json::String(text) => text,
            Json::Bool(value) => if value { "True" } else { "False" }.to_owned(),
            number @ Json::Number(_) => super::python::repr::str(&number),
            Json::Null => "None".to_owned(),
            _ => return Err(D::Error::custom("a key is a list or a map; write a text")),
        };
        Ok(Key(key))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Json, String> {
        let node = super::parse(Path::new("task.yaml"), text);
        node.map(|node| node.json()).map_err(|fault| fault.to_string())
    }

    #[test]
    fn a_key_that_comes_twice_is_refused() {
        let error = parse("task: a\nnum_fewshot: 3\nnum_fewshot: 0\n").unwrap_err();
        assert_eq!(error, "task.yaml:3:1: `num_fewshot` is given twice, first in line 2; remove one");
        assert!(parse("a:\n  - {b: 1, c: 2, b: 3}\n").unwrap_err().contains("`b` is given twice"));
    }

    #[test]
    fn an_explicit_key_overrides_a_merged_map() {
        let merged = parse("a: &a {k: 1, l: 1}\nb:\n  <<: *a\n  k: 2\n").unwrap();
        assert_eq!(merged["b"], serde_json::json!({"k": 2, "l": 1}));
    }
}
