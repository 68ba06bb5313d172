//! A YAML document as a tree whose every key and value remembers where it was written.
//!
//! The recipe types are decoded from this tree and not from the text, so that a recipe file and the
//! `key=value` arguments obey the same rules and every later complaint can name its place.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{DuplicateKeyPolicy, NonFiniteFloatPolicy, Spanned};

/// Where something was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// In the recipe file. Lines and columns count from one, `len` is in characters.
    File {
        /// Line.
        line: usize,
        /// Column, in characters.
        column: usize,
        /// Length of the text, in characters; 0 if unknown.
        len: usize,
    },
    /// In the `key=value` argument of this index.
    Argument(usize),
}

/// A value and its place.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// The value.
    pub value: Value,
    /// Where it was written.
    pub mark: Mark,
}

/// A YAML value. Scalars are typed by YAML 1.2, except that `yes`, `no`, `on` and `off` stay strings.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Nothing.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// An integer.
    Int(i128),
    /// A finite number with a point or an exponent.
    Float(f64),
    /// Text.
    Str(String),
    /// A list.
    List(Vec<Node>),
    /// A map, in the order of writing. Its keys are unique.
    Map(Vec<Entry>),
}

/// One key of a map.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// Where the key was written.
    pub mark: Mark,
    /// Its value.
    pub node: Node,
}

/// Why a text is not YAML.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SyntaxError {
    pub(crate) message: String,
    /// Line and column, where known.
    pub(crate) at: Option<(usize, usize)>,
}

impl Node {
    /// Reads one YAML document. An empty one is `Null`.
    pub(crate) fn parse(text: &str) -> Result<Self, SyntaxError> {
        let options = serde_saphyr::options! {
            duplicate_keys: DuplicateKeyPolicy::Error,
            strict_booleans: true,
            non_finite_float_policy: NonFiniteFloatPolicy::AsString,
            with_snippet: false,
        };
        serde_saphyr::from_str_with_options::<Spanned<Raw>>(text, options).map(Node::from).map_err(|error| {
            let at = error.location().map(|l| (l.line() as usize, l.column() as usize));
            SyntaxError { message: plain_message(error.without_snippet()), at }
        })
    }

    /// Gives the whole tree one mark.
    pub(crate) fn marked(mut self, mark: Mark) -> Self {
        self.mark = mark;
        match &mut self.value {
            Value::List(items) => {
                for item in items {
                    *item = std::mem::replace(item, Node { value: Value::Null, mark }).marked(mark);
                }
            }
            Value::Map(entries) => {
                for entry in entries {
                    entry.mark = mark;
                    let node = std::mem::replace(&mut entry.node, Node { value: Value::Null, mark });
                    entry.node = node.marked(mark);
                }
            }
            _ => {}
        }
        self
    }

    /// Returns the value under `key`, if this is a map that has it.
    pub fn get(&self, key: &str) -> Option<&Entry> {
        match &self.value {
            Value::Map(entries) => entries.iter().find(|entry| entry.key == key),
            _ => None,
        }
    }

    /// Returns what stands at a path such as `data.sources.0.split`, with the place of its key.
    pub fn at(&self, path: &str) -> Option<(&Node, Mark)> {
        let mut found = (self, self.mark);
        for segment in path.split('.').filter(|s| !s.is_empty()) {
            found = match &found.0.value {
                Value::Map(_) => found.0.get(segment).map(|entry| (&entry.node, entry.mark))?,
                Value::List(items) => items.get(segment.parse::<usize>().ok()?).map(|node| (node, node.mark))?,
                _ => return None,
            };
        }
        Some(found)
    }

    /// Names the kind of value for a message, with the value where it is short.
    pub(crate) fn describe(&self) -> String {
        match &self.value {
            Value::Null => "nothing (null)".into(),
            Value::Bool(value) => format!("the boolean {value}"),
            Value::Int(value) => format!("the integer {value}"),
            Value::Float(value) => format!("the number {value}"),
            Value::Str(text) => format!("the text {}", quoted(text)),
            Value::List(_) => "a list".into(),
            Value::Map(_) => "a map".into(),
        }
    }
}

/// Quotes a text for a message, shortened.
pub(crate) fn quoted(text: &str) -> String {
    let mut chars = text.chars();
    let head: String = chars.by_ref().take(40).collect();
    let tail = if chars.next().is_some() { "…" } else { "" };
    format!("{:?}", format!("{head}{tail}"))
}

/// The parser's message without its advice to programmers and without the place, which we print ourselves.
fn plain_message(error: &serde_saphyr::Error) -> String {
    let text = error.to_string();
    let text = text.split(" at line ").next().unwrap_or(&text);
    if text.starts_with("multiple YAML documents") {
        return "a second document begins: a recipe is one YAML document, without `---` inside".into();
    }
    match text.strip_prefix("duplicate mapping key: ").and_then(|rest| rest.split(',').next()) {
        Some(key) => format!("duplicate key `{key}`: it was already given in the same map"),
        None => text.to_owned(),
    }
}

/// The tree as serde-saphyr gives it, before its spans become marks.
enum Raw {
    Scalar(Value),
    List(Vec<Spanned<Raw>>),
    Map(Vec<(Spanned<String>, Spanned<Raw>)>),
}

impl From<Spanned<Raw>> for Node {
    fn from(raw: Spanned<Raw>) -> Self {
        let value = match raw.value {
            Raw::Scalar(value) => value,
            Raw::List(items) => Value::List(items.into_iter().map(Node::from).collect()),
            Raw::Map(entries) => Value::Map(
                entries
                    .into_iter()
                    .map(|(key, node)| Entry { mark: mark(key.referenced), key: key.value, node: node.into() })
                    .collect(),
            ),
        };
        Node { value, mark: mark(raw.referenced) }
    }
}

fn mark(location: serde_saphyr::Location) -> Mark {
    Mark::File {
        line: location.line() as usize,
        column: location.column() as usize,
        len: location.span().len() as usize,
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
        Ok(Raw::Scalar(Value::Int(value.into())))
    }
    fn visit_u64<E>(self, value: u64) -> Result<Raw, E> {
        Ok(Raw::Scalar(Value::Int(value.into())))
    }
    fn visit_i128<E>(self, value: i128) -> Result<Raw, E> {
        Ok(Raw::Scalar(Value::Int(value)))
    }
    fn visit_u128<E: de::Error>(self, value: u128) -> Result<Raw, E> {
        i128::try_from(value).map(|v| Raw::Scalar(Value::Int(v))).map_err(|_| E::custom("the integer is too large"))
    }
    fn visit_f64<E>(self, value: f64) -> Result<Raw, E> {
        Ok(Raw::Scalar(Value::Float(value)))
    }
    fn visit_str<E>(self, value: &str) -> Result<Raw, E> {
        Ok(Raw::Scalar(Value::Str(value.to_owned())))
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
