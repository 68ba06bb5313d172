//! The deserializer of a [`RecipeNode`]. Its errors name the key and its location.

use std::fmt;

use candlewick_text::suggestion::nearest;
use serde::de::value::StrDeserializer;
use serde::de::{
    self, DeserializeOwned, DeserializeSeed, EnumAccess, Expected, IntoDeserializer, MapAccess, SeqAccess, Unexpected,
    VariantAccess, Visitor,
};

use super::error::Fault;
use super::keys;
use super::missing_features::missing_feature_advice;
use super::node::{RecipeEntry, RecipeLocation, RecipeNode, RecipeValue, quoted};

/// Decodes the whole tree.
pub(crate) fn decode<T: DeserializeOwned>(node: &RecipeNode) -> Result<T, Fault> {
    T::deserialize(NodeDeserializer { node, path: String::new(), key: node.place }).map_err(DecodeError::into_fault)
}

/// A decoding error. `at` is the path and location of the key, once a deserializer has added them.
#[derive(Debug)]
pub(crate) struct DecodeError {
    kind: DecodeErrorKind,
    at: Option<(String, RecipeLocation)>,
}

#[derive(Debug)]
enum DecodeErrorKind {
    Message(String),
    Type { found: String, expected: String },
    UnknownKey { key: String, known: &'static [&'static str] },
    UnknownName { name: String, known: &'static [&'static str] },
    Missing(&'static str),
    Twice(&'static str),
}

impl DecodeError {
    fn new(kind: DecodeErrorKind) -> Self {
        Self { kind, at: None }
    }

    /// Adds the location unless a more specific one is set.
    fn or_at(mut self, path: &str, location: RecipeLocation) -> Self {
        self.at.get_or_insert_with(|| (path.to_owned(), location));
        self
    }

    fn into_fault(self) -> Fault {
        let (path, location) = self.at.map_or((String::new(), None), |(path, location)| (path, Some(location)));
        let parent = path.rsplit_once('.').map_or("", |(parent, _)| parent);
        match self.kind {
            DecodeErrorKind::Message(message) => Fault::new(location, in_words(&path, &message)),
            DecodeErrorKind::Type { found, expected } => {
                let quote = expected.starts_with("text")
                    && (found.starts_with("the integer")
                        || found.starts_with("the number")
                        || found.starts_with("the boolean"));
                let fault = Fault::new(location, in_words(&path, &format!("expected {expected}, found {found}")));
                if quote { fault.note("put it in quotes to make it text") } else { fault }
            }
            DecodeErrorKind::UnknownKey { key, known } => unknown_key(location, parent, &key, known),
            DecodeErrorKind::UnknownName { name, known } => {
                let fault = Fault::new(location, in_words(&path, &format!("unknown value {}", quoted(&name))));
                suggest(fault, &name, known).note(format!("values: {}", known.join(", ")))
            }
            DecodeErrorKind::Missing(key) => Fault::new(location, format!("the key `{}` is missing", join(&path, key))),
            DecodeErrorKind::Twice(key) => {
                Fault::new(location, format!("{}: given twice, once by its alias", join(parent, key)))
            }
        }
    }
}

fn unknown_key(location: Option<RecipeLocation>, parent: &str, key: &str, known: &'static [&'static str]) -> Fault {
    const SHORT: usize = 16;
    let path = join(parent, key);
    let fault = Fault::new(location, format!("unknown key `{path}`"));
    let fault = match keys::advice(&path, known) {
        Some(advice) => fault.note(advice),
        None => fault,
    };
    let place = if parent.is_empty() { "top-level keys".to_owned() } else { format!("keys of `{parent}`") };
    let list = format!("{place}: {}", known.join(", "));
    if known.len() <= SHORT { fault.note(list) } else { fault.note("-v lists the keys").detail(list) }
}

fn suggest(fault: Fault, word: &str, known: &[&'static str]) -> Fault {
    if let Some(advice) = missing_feature_advice(word) {
        return fault.note(advice);
    }
    match nearest(word, known.iter().copied()) {
        Some(candidate) => fault.note(format!("did you mean `{candidate}`?")),
        None => fault,
    }
}

fn in_words(path: &str, message: &str) -> String {
    if path.is_empty() { message.to_owned() } else { format!("{path}: {message}") }
}

fn join(parent: &str, key: &str) -> String {
    if parent.is_empty() { key.to_owned() } else { format!("{parent}.{key}") }
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.kind)
    }
}

impl std::error::Error for DecodeError {}

impl de::Error for DecodeError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self::new(DecodeErrorKind::Message(message.to_string()))
    }
    fn invalid_type(found: Unexpected, expected: &dyn Expected) -> Self {
        Self::new(DecodeErrorKind::Type { found: found_in_words(&found), expected: expected_in_words(expected) })
    }
    fn invalid_value(found: Unexpected, expected: &dyn Expected) -> Self {
        Self::invalid_type(found, expected)
    }
    fn invalid_length(len: usize, expected: &dyn Expected) -> Self {
        Self::new(DecodeErrorKind::Type { found: format!("a list of {len}"), expected: expected_in_words(expected) })
    }
    fn unknown_field(key: &str, known: &'static [&'static str]) -> Self {
        Self::new(DecodeErrorKind::UnknownKey { key: key.to_owned(), known })
    }
    fn unknown_variant(name: &str, known: &'static [&'static str]) -> Self {
        Self::new(DecodeErrorKind::UnknownName { name: name.to_owned(), known })
    }
    fn missing_field(key: &'static str) -> Self {
        Self::new(DecodeErrorKind::Missing(key))
    }
    fn duplicate_field(key: &'static str) -> Self {
        Self::new(DecodeErrorKind::Twice(key))
    }
}

fn found_in_words(found: &Unexpected) -> String {
    match found {
        Unexpected::Unit | Unexpected::Option => "nothing (null)".into(),
        Unexpected::Bool(value) => format!("the boolean {value}"),
        Unexpected::Signed(value) => format!("the integer {value}"),
        Unexpected::Unsigned(value) => format!("the integer {value}"),
        Unexpected::Float(value) => format!("the number {value}"),
        Unexpected::Str(text) => format!("the text {}", quoted(text)),
        Unexpected::Seq => "a list".into(),
        Unexpected::Map => "a map".into(),
        other => other.to_string(),
    }
}

/// Translates serde's names of Rust types into a recipe's terms.
fn expected_in_words(expected: &dyn Expected) -> String {
    let text = expected.to_string();
    match text.as_str() {
        "a string" | "path string" => "text".into(),
        "a boolean" => "true or false".into(),
        "a sequence" => "a list".into(),
        "f64" | "f32" => "a number".into(),
        "usize" | "u64" | "u32" => "a whole number of at least 0".into(),
        "i64" | "i32" => "a whole number".into(),
        "a map" => text,
        _ if text.starts_with("struct ") => "a map".into(),
        _ if text.starts_with("a tuple of size ") => text.replace("a tuple of size ", "a list of "),
        _ => text,
    }
}

struct NodeDeserializer<'a> {
    node: &'a RecipeNode,
    path: String,
    /// The location of the value's key. An error in the value itself reports the value's location.
    key: RecipeLocation,
}

impl<'a> NodeDeserializer<'a> {
    fn fail(&self, failure: DecodeError) -> DecodeError {
        failure.or_at(&self.path, self.node.place)
    }

    fn mismatch(&self, expected: &str) -> DecodeError {
        self.fail(DecodeError::new(DecodeErrorKind::Type { found: self.node.describe(), expected: expected.into() }))
    }

    fn list<'de, V: Visitor<'de>>(self, items: &[RecipeNode], visitor: V) -> Result<V::Value, DecodeError> {
        let mut access = Items { items, next: 0, path: &self.path };
        let value = visitor.visit_seq(&mut access).map_err(|e| e.or_at(&self.path, self.node.place))?;
        if access.next < items.len() {
            let expected = format!("a list of {}", access.next);
            let found = format!("a list of {}", items.len());
            return Err(self.fail(DecodeError::new(DecodeErrorKind::Type { found, expected })));
        }
        Ok(value)
    }

    fn map<'de, V: Visitor<'de>>(self, entries: &[RecipeEntry], visitor: V) -> Result<V::Value, DecodeError> {
        let place = if self.path.is_empty() { self.node.place } else { self.key };
        let mut access = Entries { entries, next: 0, path: &self.path };
        visitor.visit_map(&mut access).map_err(|failure| {
            match (&failure.kind, entries.get(access.next.wrapping_sub(1))) {
                (DecodeErrorKind::Twice(_), Some(entry)) => failure.or_at(&join(&self.path, &entry.key), entry.place),
                _ => failure.or_at(&self.path, place),
            }
        })
    }
}

impl<'de> de::Deserializer<'de> for NodeDeserializer<'_> {
    type Error = DecodeError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        let (path, location) = (self.path.clone(), self.node.place);
        match &self.node.value {
            RecipeValue::Null => visitor.visit_unit(),
            RecipeValue::Bool(value) => visitor.visit_bool(*value),
            RecipeValue::Int(value) => match (u64::try_from(*value), i64::try_from(*value)) {
                (Ok(value), _) => visitor.visit_u64(value),
                (_, Ok(value)) => visitor.visit_i64(value),
                _ => visitor.visit_f64(*value as f64),
            },
            RecipeValue::Float(value) => visitor.visit_f64(*value),
            RecipeValue::Text(text) => visitor.visit_str(text),
            RecipeValue::List(items) => self.list(items, visitor),
            RecipeValue::Map(entries) => self.map(entries, visitor),
            RecipeValue::Tagged(..) => Err(self.mismatch("a value without a tag")),
        }
        .map_err(|e| e.or_at(&path, location))
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match &self.node.value {
            RecipeValue::Bool(value) => visitor.visit_bool(*value),
            RecipeValue::Text(text) if ["yes", "on"].contains(&text.to_lowercase().as_str()) => {
                visitor.visit_bool(true)
            }
            RecipeValue::Text(text) if ["no", "off"].contains(&text.to_lowercase().as_str()) => {
                visitor.visit_bool(false)
            }
            _ => Err(self.mismatch("true or false")),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match self.node.value {
            RecipeValue::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, DecodeError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        match &self.node.value {
            RecipeValue::Map(entries) => self.map(entries, visitor),
            _ => Err(self.mismatch("a map")),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        match &self.node.value {
            RecipeValue::Text(name) => visitor.visit_enum(Name(name)).map_err(|e| e.or_at(&self.path, self.node.place)),
            _ => Err(self.mismatch("text (a name)")),
        }
    }

    serde::forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map identifier ignored_any
    }
}

struct Items<'a> {
    items: &'a [RecipeNode],
    next: usize,
    path: &'a str,
}

impl<'de> SeqAccess<'de> for &mut Items<'_> {
    type Error = DecodeError;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, DecodeError> {
        let Some(node) = self.items.get(self.next) else { return Ok(None) };
        let path = join(self.path, &self.next.to_string());
        self.next += 1;
        let place = path.clone();
        seed.deserialize(NodeDeserializer { node, path, key: node.place })
            .map(Some)
            .map_err(|e| e.or_at(&place, node.place))
    }
}

struct Entries<'a> {
    entries: &'a [RecipeEntry],
    next: usize,
    path: &'a str,
}

impl<'de> MapAccess<'de> for &mut Entries<'_> {
    type Error = DecodeError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, DecodeError> {
        let Some(entry) = self.entries.get(self.next) else { return Ok(None) };
        self.next += 1;
        let key: StrDeserializer<'_, DecodeError> = entry.key.as_str().into_deserializer();
        seed.deserialize(key).map(Some).map_err(|e| e.or_at(&join(self.path, &entry.key), entry.place))
    }

    fn next_value_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<T::Value, DecodeError> {
        let entry = &self.entries[self.next - 1];
        let path = join(self.path, &entry.key);
        let place = path.clone();
        seed.deserialize(NodeDeserializer { node: &entry.node, path, key: entry.place })
            .map_err(|e| e.or_at(&place, entry.node.place))
    }
}

/// A variant name of an enum without content.
struct Name<'a>(&'a str);

impl<'de> EnumAccess<'de> for Name<'_> {
    type Error = DecodeError;
    type Variant = Self;

    fn variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<(T::Value, Self), DecodeError> {
        let name: StrDeserializer<'_, DecodeError> = self.0.into_deserializer();
        Ok((seed.deserialize(name)?, self))
    }
}

impl<'de> VariantAccess<'de> for Name<'_> {
    type Error = DecodeError;

    fn unit_variant(self) -> Result<(), DecodeError> {
        Ok(())
    }
    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, _: T) -> Result<T::Value, DecodeError> {
        Err(de::Error::custom("expected a map with this name as its key"))
    }
    fn tuple_variant<V: Visitor<'de>>(self, _: usize, _: V) -> Result<V::Value, DecodeError> {
        Err(de::Error::custom("expected a map with this name as its key"))
    }
    fn struct_variant<V: Visitor<'de>>(self, _: &'static [&'static str], _: V) -> Result<V::Value, DecodeError> {
        Err(de::Error::custom("expected a map with this name as its key"))
    }
}
