//! YAML documents as trees in which every key and value has its place.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, DeserializeOwned, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value as Json};
use serde_saphyr::{Location, Options, Spanned, Tagged};

/// The place of a key or value in its text. Lines and columns count from one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Line.
    pub line: usize,
    /// Column, in characters.
    pub column: usize,
    /// Length, in characters; 0 if unknown.
    pub len: usize,
}

/// A value and its place.
#[derive(Clone, Debug, PartialEq)]
pub struct Node<P> {
    /// The value.
    pub value: Value<P>,
    /// Its place.
    pub place: P,
}

/// A YAML value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value<P> {
    /// Nothing.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// An integer.
    Int(i128),
    /// A finite number with a point or an exponent.
    Float(f64),
    /// Text.
    Text(String),
    /// A list.
    List(Vec<Node<P>>),
    /// A map, in the order of writing.
    Map(Vec<Entry<P>>),
    /// A value behind a tag that is not one of YAML's own.
    Tagged(String, Box<Node<P>>),
}

/// One key of a map.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry<P> {
    /// The key.
    pub key: String,
    /// The key's place.
    pub place: P,
    /// Its value.
    pub node: Node<P>,
}

/// A reason why a text is not YAML.
#[derive(Clone, Debug, PartialEq)]
pub struct SyntaxError {
    /// The parser's message, without the place.
    pub message: String,
    /// Line and column, where known.
    pub at: Option<(usize, usize)>,
}

/// The scalar that stands for a key.
pub trait Key: DeserializeOwned {
    /// Returns the key as text.
    fn into_text(self) -> String;
}

impl Key for String {
    fn into_text(self) -> String {
        self
    }
}

impl Node<Span> {
    /// Reads one YAML document with keys of the type `K`. An empty document is `Null`.
    ///
    /// # Errors
    /// If the text is not one YAML document under `options`.
    pub fn parse<K: Key>(text: &str, options: Options) -> Result<Self, SyntaxError> {
        let raw = serde_saphyr::from_str_with_options::<Spanned<Tagged<Raw<K>>>>(text, options);
        raw.map(node).map_err(|error| {
            let at = error.location().map(|at| (at.line() as usize, at.column() as usize));
            let message = error.without_snippet().to_string();
            SyntaxError { message: message.split(" at line ").next().unwrap_or(&message).to_owned(), at }
        })
    }
}

impl<P> Node<P> {
    /// Returns the value under `key`, if this is a map that has it.
    pub fn get(&self, key: &str) -> Option<&Entry<P>> {
        match &self.value {
            Value::Map(entries) => entries.iter().find(|entry| entry.key == key),
            _ => None,
        }
    }

    /// Returns the value at a path such as `data.sources.0.split`, with the place of its key.
    pub fn at(&self, path: &str) -> Option<(&Self, P)>
    where
        P: Copy,
    {
        let mut found = (self, self.place);
        for segment in path.split('.').filter(|segment| !segment.is_empty()) {
            found = match &found.0.value {
                Value::Map(_) => found.0.get(segment).map(|entry| (&entry.node, entry.place))?,
                Value::List(items) => items.get(segment.parse::<usize>().ok()?).map(|node| (node, node.place))?,
                _ => return None,
            };
        }
        Some(found)
    }

    /// Rebuilds the tree from its leaves: `place` converts each place, then `finish` each node.
    ///
    /// # Errors
    /// If `finish` refuses a node.
    pub fn try_map<Q, E>(
        self,
        place: &impl Fn(P) -> Q,
        finish: &impl Fn(Node<Q>) -> Result<Node<Q>, E>,
    ) -> Result<Node<Q>, E> {
        let value = match self.value {
            Value::Null => Value::Null,
            Value::Bool(value) => Value::Bool(value),
            Value::Int(value) => Value::Int(value),
            Value::Float(value) => Value::Float(value),
            Value::Text(text) => Value::Text(text),
            Value::List(items) => {
                Value::List(items.into_iter().map(|item| item.try_map(place, finish)).collect::<Result<_, _>>()?)
            }
            Value::Map(entries) => {
                let entry = |Entry { key, place: at, node }| {
                    Ok(Entry { key, place: place(at), node: Node::try_map(node, place, finish)? })
                };
                Value::Map(entries.into_iter().map(entry).collect::<Result<_, _>>()?)
            }
            Value::Tagged(tag, node) => Value::Tagged(tag, Box::new(node.try_map(place, finish)?)),
        };
        finish(Node { value, place: place(self.place) })
    }

    /// Returns the value as text, empty for other kinds.
    pub fn text_or_empty(&self) -> &str {
        match &self.value {
            Value::Text(text) => text,
            _ => "",
        }
    }

    /// Returns the value as JSON. A tagged text is one with its tag.
    pub fn json(&self) -> Json {
        match &self.value {
            Value::Null => Json::Null,
            Value::Bool(value) => Json::Bool(*value),
            Value::Int(_) | Value::Float(_) => self.value.number().map_or(Json::Null, Json::Number),
            Value::Text(text) => Json::String(text.clone()),
            Value::List(items) => items.iter().map(Node::json).collect(),
            Value::Map(entries) => {
                Json::Object(entries.iter().map(|e| (e.key.clone(), e.node.json())).collect::<Map<_, _>>())
            }
            Value::Tagged(tag, node) => Json::String(format!("{tag} {}", node.text_or_empty())),
        }
    }

    /// Names the kind of value for a message, with the value where it is short.
    pub fn describe(&self) -> String {
        match &self.value {
            Value::Null => "nothing (null)".into(),
            Value::Bool(value) => format!("the boolean {value}"),
            Value::Int(value) => format!("the integer {value}"),
            Value::Float(value) => format!("the number {value}"),
            Value::Text(text) => format!("the text {}", quoted(text)),
            Value::List(_) => "a list".into(),
            Value::Map(_) => "a map".into(),
            Value::Tagged(tag, node) => format!("{} with the tag `{tag}`", node.describe()),
        }
    }
}

impl<P> Value<P> {
    /// Returns the number as JSON has it. An integer beyond 64 bits is rounded.
    pub fn number(&self) -> Option<Number> {
        match self {
            Value::Int(value) => i64::try_from(*value)
                .map(Number::from)
                .or_else(|_| u64::try_from(*value).map(Number::from))
                .map_or_else(|_| Number::from_f64(*value as f64), Some),
            Value::Float(value) => Number::from_f64(*value),
            _ => None,
        }
    }
}

/// Quotes a text for a message, shortened.
pub fn quoted(text: &str) -> String {
    let mut chars = text.chars();
    let head: String = chars.by_ref().take(40).collect();
    let tail = if chars.next().is_some() { "…" } else { "" };
    format!("{:?}", format!("{head}{tail}"))
}

/// The tree as the parser gives it.
enum Raw<K> {
    Scalar(Value<Span>),
    List(Vec<Spanned<Tagged<Self>>>),
    Map(Vec<(Spanned<K>, Spanned<Tagged<Self>>)>),
}

fn node<K: Key>(raw: Spanned<Tagged<Raw<K>>>) -> Node<Span> {
    let place = span(raw.referenced);
    let Tagged(value, tag) = raw.value;
    let entry = |(key, raw): (Spanned<K>, _)| Entry {
        place: span(key.referenced),
        key: key.value.into_text(),
        node: node(raw),
    };
    let value = match value {
        Raw::Scalar(value) => value,
        Raw::List(items) => Value::List(items.into_iter().map(node).collect()),
        Raw::Map(entries) => Value::Map(entries.into_iter().map(entry).collect()),
    };
    let untagged = Node { value, place };
    match tag.filter(|tag| !tag.starts_with("tag:yaml.org,2002:")) {
        Some(tag) => Node { value: Value::Tagged(tag, Box::new(untagged)), place },
        None => untagged,
    }
}

fn span(at: Location) -> Span {
    Span { line: at.line() as usize, column: at.column() as usize, len: at.span().len() as usize }
}

impl<'de, K: Key> Deserialize<'de> for Raw<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RawVisitor(PhantomData))
    }
}

struct RawVisitor<K>(PhantomData<K>);

impl<'de, K: Key> Visitor<'de> for RawVisitor<K> {
    type Value = Raw<K>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a YAML value")
    }
    fn visit_unit<E>(self) -> Result<Raw<K>, E> {
        Ok(Raw::Scalar(Value::Null))
    }
    fn visit_none<E>(self) -> Result<Raw<K>, E> {
        Ok(Raw::Scalar(Value::Null))
    }
    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Raw<K>, D::Error> {
        deserializer.deserialize_any(self)
    }
    fn visit_bool<E>(self, value: bool) -> Result<Raw<K>, E> {
        Ok(Raw::Scalar(Value::Bool(value)))
    }
    fn visit_i64<E>(self, value: i64) -> Result<Raw<K>, E> {
        Ok(Raw::Scalar(Value::Int(value.into())))
    }
    fn visit_u64<E>(self, value: u64) -> Result<Raw<K>, E> {
        Ok(Raw::Scalar(Value::Int(value.into())))
    }
    fn visit_i128<E>(self, value: i128) -> Result<Raw<K>, E> {
        Ok(Raw::Scalar(Value::Int(value)))
    }
    fn visit_u128<E: Error>(self, value: u128) -> Result<Raw<K>, E> {
        i128::try_from(value).map(|v| Raw::Scalar(Value::Int(v))).map_err(|_| E::custom("the integer is too large"))
    }
    fn visit_f64<E>(self, value: f64) -> Result<Raw<K>, E> {
        Ok(Raw::Scalar(Value::Float(value)))
    }
    fn visit_str<E>(self, value: &str) -> Result<Raw<K>, E> {
        Ok(Raw::Scalar(Value::Text(value.to_owned())))
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Raw<K>, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = access.next_element()? {
            items.push(item);
        }
        Ok(Raw::List(items))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Raw<K>, A::Error> {
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

    fn parse(text: &str) -> Node<Span> {
        Node::parse::<String>(text, serde_saphyr::options! { with_snippet: false }).unwrap()
    }

    #[test]
    fn keys_and_values_have_their_places() {
        let tree = parse("a: 1\nb:\n  - x\n  - {c: 2.5}\n");
        let (node, key) = tree.at("b.1.c").unwrap();
        assert_eq!((&node.value, key), (&Value::Float(2.5), Span { line: 4, column: 6, len: 1 }));
        assert_eq!(node.place, Span { line: 4, column: 9, len: 3 });
        assert_eq!(tree.json(), serde_json::json!({"a": 1, "b": ["x", {"c": 2.5}]}));
        assert!(tree.at("b.2").is_none() && tree.at("a.b").is_none());
    }

    #[test]
    fn only_tags_that_yaml_does_not_define_are_kept() {
        let tree = parse("f: !function a.b\nt: !!str 5\n");
        assert_eq!(tree.json(), serde_json::json!({"f": "!function a.b", "t": "5"}));
        assert_eq!(tree.get("f").unwrap().node.describe(), "the text \"a.b\" with the tag `!function`");
    }

    #[test]
    fn integers_are_exact_to_64_bits() {
        let numbers = parse("[18446744073709551615, -9223372036854775808, 18446744073709551616]").json();
        assert_eq!(numbers, serde_json::json!([u64::MAX, i64::MIN, 18_446_744_073_709_551_616_f64]));
    }
}
