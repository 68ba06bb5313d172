//! A task's YAML as a tree in which every key and value knows its file, line and column, with `!function` kept apart from
//! text. Scalars are typed as PyYAML types them, by YAML 1.1.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value as Json};
use serde_saphyr::{DuplicateKeyPolicy, NonFiniteFloatPolicy, Spanned, Tagged};

use super::error::{Fault, Place};

/// A value and its place.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) value: Value,
    pub(crate) place: Place,
}

/// A YAML value.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    Null,
    Bool(bool),
    Number(Number),
    Text(String),
    List(Vec<Node>),
    Map(Vec<Entry>),
    /// `!function module.name`.
    Function(String),
}

/// One key of a map, where it was written, and its value.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) key: String,
    pub(crate) place: Place,
    pub(crate) node: Node,
}

impl Node {
    /// Reads one YAML document. `file` stands in complaints.
    pub(crate) fn parse(file: &Path, text: &str) -> Result<Self, Fault> {
        let options = serde_saphyr::options! {
            duplicate_keys: DuplicateKeyPolicy::LastWins,
            non_finite_float_policy: NonFiniteFloatPolicy::AsString,
            with_snippet: false,
        };
        let file: Arc<PathBuf> = Arc::new(file.to_owned());
        let raw = serde_saphyr::from_str_with_options::<Spanned<Tagged<Raw>>>(text, options).map_err(|error| {
            let at = error.location().map_or((0, 0), |at| (at.line() as usize, at.column() as usize));
            let message = error.without_snippet().to_string();
            let message = message.split(" at line ").next().unwrap_or(&message).to_owned();
            Fault::at(Place { file: file.clone(), line: at.0, column: at.1 }, message)
        })?;
        Reader { file, text }.node(raw)
    }

    /// The value under `key`, if this is a map that has it.
    pub(crate) fn get(&self, key: &str) -> Option<&Entry> {
        match &self.value {
            Value::Map(entries) => entries.iter().find(|entry| entry.key == key),
            _ => None,
        }
    }

    /// The value as text, empty for what is none.
    pub(crate) fn text_or_empty(&self) -> &str {
        match &self.value {
            Value::Text(text) => text,
            _ => "",
        }
    }

    /// The value as JSON; a function is its name.
    pub(crate) fn json(&self) -> Json {
        match &self.value {
            Value::Null => Json::Null,
            Value::Bool(value) => Json::Bool(*value),
            Value::Number(value) => Json::Number(value.clone()),
            Value::Text(text) => Json::String(text.clone()),
            Value::List(items) => items.iter().map(Node::json).collect(),
            Value::Map(entries) => {
                Json::Object(entries.iter().map(|e| (e.key.clone(), e.node.json())).collect::<Map<_, _>>())
            }
            Value::Function(name) => Json::String(format!("!function {name}")),
        }
    }

    /// Names the kind of value for a message.
    pub(crate) fn describe(&self) -> String {
        match &self.value {
            Value::Null => "nothing (null)".into(),
            Value::Bool(value) => format!("the boolean {value}"),
            Value::Number(value) => format!("the number {value}"),
            Value::Text(text) => format!("the text {:?}", text.chars().take(40).collect::<String>()),
            Value::List(_) => "a list".into(),
            Value::Map(_) => "a map".into(),
            Value::Function(name) => format!("the function {name}"),
        }
    }
}

/// The tree as the parser gives it.
enum Raw {
    Scalar(Value),
    List(Vec<Spanned<Tagged<Raw>>>),
    Map(Vec<(Spanned<Key>, Spanned<Tagged<Raw>>)>),
}

/// A key is text, or what Python would print for it.
struct Key(String);

struct Reader<'a> {
    file: Arc<PathBuf>,
    text: &'a str,
}

impl Reader<'_> {
    fn node(&self, raw: Spanned<Tagged<Raw>>) -> Result<Node, Fault> {
        let place = self.place(raw.referenced);
        let Tagged(value, tag) = raw.value;
        let tag = tag.filter(|tag| !tag.starts_with("tag:yaml.org,2002:"));
        let value = match (tag.as_deref(), value) {
            (None, Raw::Scalar(value)) => self.scalar(value, &place),
            (None, Raw::List(items)) => Value::List(items.into_iter().map(|i| self.node(i)).collect::<Result<_, _>>()?),
            (None, Raw::Map(entries)) => {
                let entries = entries.into_iter().map(|e| self.entry(e)).collect::<Result<Vec<_>, _>>()?;
                check_keys(&entries)?;
                Value::Map(entries)
            }
            (Some("!function"), Raw::Scalar(Value::Text(name))) => Value::Function(name.trim().to_owned()),
            (Some(tag), _) => return Err(Fault::at(place, format!("unknown tag `{tag}`; the only one is !function"))),
        };
        Ok(Node { value, place })
    }

    fn entry(&self, (key, node): (Spanned<Key>, Spanned<Tagged<Raw>>)) -> Result<Entry, Fault> {
        Ok(Entry { place: self.place(key.referenced), key: key.value.0, node: self.node(node)? })
    }

    fn place(&self, at: serde_saphyr::Location) -> Place {
        Place { file: self.file.clone(), line: at.line() as usize, column: at.column() as usize }
    }

    /// A lone `y` or `n` is text to PyYAML.
    fn scalar(&self, value: Value, place: &Place) -> Value {
        let written = || {
            let line = self.text.lines().nth(place.line.checked_sub(1)?)?;
            let from: String = line.chars().skip(place.column.checked_sub(1)?).collect();
            let word: String = from.chars().take_while(|c| c.is_alphanumeric()).collect();
            ["y", "n", "Y", "N"].contains(&word.as_str()).then_some(word)
        };
        match value {
            Value::Bool(_) => written().map_or(value, Value::Text),
            other => other,
        }
    }
}

/// Refuses a key that comes twice: PyYAML takes the last, other readers the first.
fn check_keys(entries: &[Entry]) -> Result<(), Fault> {
    let mut seen: HashMap<&str, &Entry> = HashMap::new();
    for entry in entries {
        if let Some(first) = seen.insert(&entry.key, entry) {
            let message = format!("`{}` is given twice, first in line {}; remove one", entry.key, first.place.line);
            return Err(Fault::at(entry.place.clone(), message));
        }
    }
    Ok(())
}

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let key = match Raw::deserialize(deserializer)? {
            Raw::Scalar(Value::Text(text)) => text,
            Raw::Scalar(Value::Bool(value)) => if value { "True" } else { "False" }.to_owned(),
            Raw::Scalar(Value::Number(number)) => super::python::repr::number(&number),
            Raw::Scalar(_) => "None".to_owned(),
            _ => return Err(D::Error::custom("a key is a list or a map; write a text")),
        };
        Ok(Key(key))
    }
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RawVisitor)
    }
}

struct RawVisitor;

impl<'de> Visitor<'de> for RawVisitor {
    type Value = Raw;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a YAML value")
    }
    fn visit_unit<E>(self) -> Result<Raw, E> {
        Ok(Raw::Scalar(Value::Null))
    }
    fn visit_none<E>(self) -> Result<Raw, E> {
        Ok(Raw::Scalar(Value::Null))
    }
    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Raw, D::Error> {
        deserializer.deserialize_any(self)
    }
    fn visit_bool<E>(self, value: bool) -> Result<Raw, E> {
        Ok(Raw::Scalar(Value::Bool(value)))
    }
    fn visit_i64<E>(self, value: i64) -> Result<Raw, E> {
        Ok(Raw::Scalar(Value::Number(value.into())))
    }
    fn visit_u64<E>(self, value: u64) -> Result<Raw, E> {
        Ok(Raw::Scalar(Value::Number(value.into())))
    }
    fn visit_f64<E>(self, value: f64) -> Result<Raw, E> {
        Ok(Raw::Scalar(Number::from_f64(value).map_or(Value::Null, Value::Number)))
    }
    fn visit_str<E>(self, value: &str) -> Result<Raw, E> {
        Ok(Raw::Scalar(Value::Text(value.to_owned())))
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Raw, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = access.next_element()? {
            items.push(item);
        }
        Ok(Raw::List(items))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Raw, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = access.next_entry()? {
            entries.push(entry);
        }
        Ok(Raw::Map(entries))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Json, String> {
        let node = Node::parse(Path::new("task.yaml"), text);
        node.map(|node| node.json()).map_err(|fault| fault.to_string())
    }

    #[test]
    fn a_key_that_comes_twice_is_refused() {
        let error = parse("task: a\nnum_fewshot: 3\nnum_fewshot: 0\n").unwrap_err();
        assert_eq!(error, "task.yaml:3:1: `num_fewshot` is given twice, first in line 2; remove one");
        assert!(parse("a:\n  - {b: 1, c: 2, b: 3}\n").unwrap_err().contains("`b` is given twice"));
    }

    #[test]
    fn a_key_beside_a_merged_map_wins() {
        let merged = parse("a: &a {k: 1, l: 1}\nb:\n  <<: *a\n  k: 2\n").unwrap();
        assert_eq!(merged["b"], serde_json::json!({"k": 2, "l": 1}));
    }
}
