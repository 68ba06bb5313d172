//! YAML documents as trees with the source position of every key and value.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, DeserializeOwned, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value as Json};
use serde_saphyr::{Location, Options, Spanned, Tagged};

use crate::printable::shortened;

/// Source position of a key or value. Lines and columns count from one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct YamlSpan {
    /// Line.
    pub line: usize,
    /// Column, in characters.
    pub column: usize,
    /// Length, in characters; 0 if unknown.
    pub len: usize,
}

/// YAML value with its source position of type `P`.
#[derive(Clone, Debug, PartialEq)]
pub struct YamlNode<P> {
    /// The value.
    pub value: YamlValue<P>,
    /// Source position of the value.
    pub place: P,
}

/// YAML value: scalar, list or map.
#[derive(Clone, Debug, PartialEq)]
pub enum YamlValue<P> {
    /// Null.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// An integer. One of a document has at most 64 bits.
    Int(i128),
    /// A finite number with a point or an exponent.
    Float(f64),
    /// Text.
    Text(String),
    /// A list.
    List(Vec<YamlNode<P>>),
    /// A map, in the order of writing.
    Map(Vec<YamlEntry<P>>),
    /// A value with an application-specific tag, such as `!function`.
    Tagged(String, Box<YamlNode<P>>),
}

/// Map entry: a key with its value.
#[derive(Clone, Debug, PartialEq)]
pub struct YamlEntry<P> {
    /// The key.
    pub key: String,
    /// Source position of the key.
    pub place: P,
    /// Its value.
    pub node: YamlNode<P>,
}

/// Syntax error of a YAML document.
#[derive(Clone, Debug, PartialEq)]
pub struct YamlSyntaxError {
    /// Message of the parser, without the position.
    pub message: String,
    /// Line and column, if known.
    pub at: Option<(usize, usize)>,
}

/// Type that deserializes map keys, such as `String`.
pub trait YamlKey: DeserializeOwned {
    /// Returns the key as text.
    fn into_text(self) -> String;
}

impl YamlKey for String {
    fn into_text(self) -> String {
        self
    }
}

impl YamlNode<YamlSpan> {
    /// Parses one YAML document with keys of the type `K`. An empty document is `Null`.
    ///
    /// # Errors
    /// If the text is not one YAML document under `options`.
    pub fn parse<K: YamlKey>(text: &str, options: Options) -> Result<Self, YamlSyntaxError> {
        let raw = serde_saphyr::from_str_with_options::<Spanned<Tagged<Raw<K>>>>(text, options);
        let tree = raw.map(node).map_err(|error| {
            let at = error.location().map(|at| (at.line() as usize, at.column() as usize));
            let message = error.without_snippet().to_string();
            YamlSyntaxError { message: message.split(" at line ").next().unwrap_or(&message).to_owned(), at }
        })?;
        tree.check_integers(&text.lines().collect::<Vec<_>>()).map(|()| tree)
    }

    /// Returns an error for an integer beyond 64 bits, which JSON and `f64` would round. The parser returns one beyond 128
    /// bits as a float.
    fn check_integers(&self, lines: &[&str]) -> Result<(), YamlSyntaxError> {
        let is_wide = match &self.value {
            YamlValue::Int(value) => i64::try_from(*value).is_err() && u64::try_from(*value).is_err(),
            YamlValue::Float(_) => is_integer(&self.place.text_in(lines)),
            YamlValue::List(items) => return items.iter().try_for_each(|item| item.check_integers(lines)),
            YamlValue::Map(entries) => return entries.iter().try_for_each(|entry| entry.node.check_integers(lines)),
            YamlValue::Tagged(_, node) => return node.check_integers(lines),
            YamlValue::Null | YamlValue::Bool(_) | YamlValue::Text(_) => false,
        };
        match is_wide {
            true => Err(YamlSyntaxError {
                message: format!(
                    "the integer {} has more than 64 bits; put it into quotes, or write it with an exponent",
                    shortened(&self.place.text_in(lines), 40)
                ),
                at: Some((self.place.line, self.place.column)),
            }),
            false => Ok(()),
        }
    }
}

impl YamlSpan {
    /// Returns the text at this position.
    fn text_in(&self, lines: &[&str]) -> String {
        let line = lines.get(self.line.saturating_sub(1)).copied().unwrap_or_default();
        line.chars().skip(self.column.saturating_sub(1)).take(self.len).collect()
    }
}

/// Returns true for a decimal integer.
fn is_integer(text: &str) -> bool {
    let digits = text.trim_start_matches(['+', '-']);
    !digits.is_empty() && digits.chars().all(|c| c.is_ascii_digit() || c == '_')
}

impl<P> YamlNode<P> {
    /// Returns the entry of `key`, if this is a map that has it.
    pub fn get(&self, key: &str) -> Option<&YamlEntry<P>> {
        match &self.value {
            YamlValue::Map(entries) => entries.iter().find(|entry| entry.key == key),
            _ => None,
        }
    }

    /// Returns the value at a path such as `data.sources.0.split`, with the position of its key.
    pub fn at(&self, path: &str) -> Option<(&Self, P)>
    where
        P: Copy,
    {
        let mut found = (self, self.place);
        for segment in path.split('.').filter(|segment| !segment.is_empty()) {
            found = match &found.0.value {
                YamlValue::Map(_) => found.0.get(segment).map(|entry| (&entry.node, entry.place))?,
                YamlValue::List(items) => items.get(segment.parse::<usize>().ok()?).map(|node| (node, node.place))?,
                _ => return None,
            };
        }
        Some(found)
    }

    /// Rebuilds the tree bottom-up: `place` converts each position, then `finish` each node.
    ///
    /// # Errors
    /// If `finish` returns one.
    pub fn try_map<Q, E>(
        self,
        place: &impl Fn(P) -> Q,
        finish: &impl Fn(YamlNode<Q>) -> Result<YamlNode<Q>, E>,
    ) -> Result<YamlNode<Q>, E> {
        let value = match self.value {
            YamlValue::Null => YamlValue::Null,
            YamlValue::Bool(value) => YamlValue::Bool(value),
            YamlValue::Int(value) => YamlValue::Int(value),
            YamlValue::Float(value) => YamlValue::Float(value),
            YamlValue::Text(text) => YamlValue::Text(text),
            YamlValue::List(items) => {
                YamlValue::List(items.into_iter().map(|item| item.try_map(place, finish)).collect::<Result<_, _>>()?)
            }
            YamlValue::Map(entries) => {
                let entry = |YamlEntry { key, place: at, node }| {
                    Ok(YamlEntry { key, place: place(at), node: YamlNode::try_map(node, place, finish)? })
                };
                YamlValue::Map(entries.into_iter().map(entry).collect::<Result<_, _>>()?)
            }
            YamlValue::Tagged(tag, node) => YamlValue::Tagged(tag, Box::new(node.try_map(place, finish)?)),
        };
        finish(YamlNode { value, place: place(self.place) })
    }

    /// Returns the value as text, or an empty string for other types.
    pub fn text_or_empty(&self) -> &str {
        match &self.value {
            YamlValue::Text(text) => text,
            _ => "",
        }
    }

    /// Converts the value to JSON. A tagged value becomes a string with its tag.
    pub fn json(&self) -> Json {
        match &self.value {
            YamlValue::Null => Json::Null,
            YamlValue::Bool(value) => Json::Bool(*value),
            YamlValue::Int(_) | YamlValue::Float(_) => self.value.number().map_or(Json::Null, Json::Number),
            YamlValue::Text(text) => Json::String(text.clone()),
            YamlValue::List(items) => items.iter().map(YamlNode::json).collect(),
            YamlValue::Map(entries) => {
                Json::Object(entries.iter().map(|e| (e.key.clone(), e.node.json())).collect::<Map<_, _>>())
            }
            YamlValue::Tagged(tag, node) => Json::String(format!("{tag} {}", node.text_or_empty())),
        }
    }

    /// Names the type of the value for a message, with short values included.
    pub fn describe(&self) -> String {
        match &self.value {
            YamlValue::Null => "nothing (null)".into(),
            YamlValue::Bool(value) => format!("the boolean {value}"),
            YamlValue::Int(value) => format!("the integer {value}"),
            YamlValue::Float(value) => format!("the number {value}"),
            YamlValue::Text(text) => format!("the text {}", quoted(text)),
            YamlValue::List(_) => "a list".into(),
            YamlValue::Map(_) => "a map".into(),
            YamlValue::Tagged(tag, node) => format!("{} with the tag `{tag}`", node.describe()),
        }
    }
}

impl<P> YamlValue<P> {
    /// Converts a number of at most 64 bits to JSON.
    pub fn number(&self) -> Option<Number> {
        match self {
            YamlValue::Int(value) => {
                i64::try_from(*value).map(Number::from).or_else(|_| u64::try_from(*value).map(Number::from)).ok()
            }
            YamlValue::Float(value) => Number::from_f64(*value),
            _ => None,
        }
    }
}

/// Quotes a text for a message, shortened to 40 characters.
pub fn quoted(text: &str) -> String {
    format!("{:?}", shortened(text, 40))
}

/// Tree as the parser returns it.
enum Raw<K> {
    Scalar(YamlValue<YamlSpan>),
    List(Vec<Spanned<Tagged<Self>>>),
    Map(Vec<(Spanned<K>, Spanned<Tagged<Self>>)>),
}

fn node<K: YamlKey>(raw: Spanned<Tagged<Raw<K>>>) -> YamlNode<YamlSpan> {
    let place = span(raw.referenced);
    let Tagged(value, tag) = raw.value;
    let entry = |(key, raw): (Spanned<K>, _)| YamlEntry {
        place: span(key.referenced),
        key: key.value.into_text(),
        node: node(raw),
    };
    let value = match value {
        Raw::Scalar(value) => value,
        Raw::List(items) => YamlValue::List(items.into_iter().map(node).collect()),
        Raw::Map(entries) => YamlValue::Map(entries.into_iter().map(entry).collect()),
    };
    let untagged = YamlNode { value, place };
    match tag.filter(|tag| !tag.starts_with("tag:yaml.org,2002:")) {
        Some(tag) => YamlNode { value: YamlValue::Tagged(tag, Box::new(untagged)), place },
        None => untagged,
    }
}

fn span(at: Location) -> YamlSpan {
    YamlSpan { line: at.line() as usize, column: at.column() as usize, len: at.span().len() as usize }
}

impl<'de, K: YamlKey> Deserialize<'de> for Raw<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RawVisitor(PhantomData))
    }
}

struct RawVisitor<K>(PhantomData<K>);

impl<'de, K: YamlKey> Visitor<'de> for RawVisitor<K> {
    type Value = Raw<K>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a YAML value")
    }
    fn visit_unit<E>(self) -> Result<Raw<K>, E> {
        Ok(Raw::Scalar(YamlValue::Null))
    }
    fn visit_none<E>(self) -> Result<Raw<K>, E> {
        Ok(Raw::Scalar(YamlValue::Null))
    }
    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Raw<K>, D::Error> {
        deserializer.deserialize_any(self)
    }
    fn visit_bool<E>(self, value: bool) -> Result<Raw<K>, E> {
        Ok(Raw::Scalar(YamlValue::Bool(value)))
    }
    fn visit_i64<E>(self, value: i64) -> Result<Raw<K>, E> {
        Ok(Raw::Scalar(YamlValue::Int(value.into())))
    }
    fn visit_u64<E>(self, value: u64) -> Result<Raw<K>, E> {
        Ok(Raw::Scalar(YamlValue::Int(value.into())))
    }
    fn visit_i128<E>(self, value: i128) -> Result<Raw<K>, E> {
        Ok(Raw::Scalar(YamlValue::Int(value)))
    }
    fn visit_u128<E: Error>(self, value: u128) -> Result<Raw<K>, E> {
        i128::try_from(value).map(|v| Raw::Scalar(YamlValue::Int(v))).map_err(|_| E::custom("the integer is too large"))
    }
    fn visit_f64<E>(self, value: f64) -> Result<Raw<K>, E> {
        Ok(Raw::Scalar(YamlValue::Float(value)))
    }
    fn visit_str<E>(self, value: &str) -> Result<Raw<K>, E> {
        Ok(Raw::Scalar(YamlValue::Text(value.to_owned())))
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

    fn parse(text: &str) -> YamlNode<YamlSpan> {
        YamlNode::parse::<String>(text, serde_saphyr::options! { with_snippet: false }).unwrap()
    }

    #[test]
    fn keys_and_values_have_their_places() {
        let tree = parse("a: 1\nb:\n  - x\n  - {c: 2.5}\n");
        let (node, key) = tree.at("b.1.c").unwrap();
        assert_eq!((&node.value, key), (&YamlValue::Float(2.5), YamlSpan { line: 4, column: 6, len: 1 }));
        assert_eq!(node.place, YamlSpan { line: 4, column: 9, len: 3 });
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
    fn integers_have_at_most_64_bits() {
        let numbers = parse("[18446744073709551615, -9223372036854775808, 1e40, '18446744073709551616']").json();
        assert_eq!(numbers, serde_json::json!([u64::MAX, i64::MIN, 1e40, "18446744073709551616"]));
        for wide in ["18446744073709551616", "-9223372036854775809", &"9".repeat(39), &"9".repeat(60)] {
            let options = serde_saphyr::options! { with_snippet: false };
            let parsed = YamlNode::parse::<String>(&format!("a: 1\nb:\n  - [x, {wide}]\n"), options);
            let Err(error) = parsed else { panic!("{wide} was accepted") };
            assert!(error.message.contains("more than 64 bits") && error.at == Some((3, 9)), "{error:?}");
        }
    }
}
