//! A value or a list of values.

use std::fmt;
use std::marker::PhantomData;

use schemars::JsonSchema;
use serde::Serialize;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{Deserialize, Deserializer, Error, IntoDeserializer, SeqAccess, Visitor};

/// One value, or a list of values.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum ValueOrList<T> {
    /// One value.
    Value(T),
    /// A list.
    List(Vec<T>),
}

impl<T> ValueOrList<T> {
    /// Returns the values.
    pub fn values(&self) -> &[T] {
        match self {
            Self::Value(value) => std::slice::from_ref(value),
            Self::List(values) => values,
        }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for ValueOrList<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ValueVisitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for ValueVisitor<T> {
            type Value = ValueOrList<T>;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a value or a list of values")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, values: A) -> Result<Self::Value, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(values)).map(ValueOrList::List)
            }
            fn visit_str<E: Error>(self, value: &str) -> Result<Self::Value, E> {
                T::deserialize(value.into_deserializer()).map(ValueOrList::Value)
            }
            fn visit_f64<E: Error>(self, value: f64) -> Result<Self::Value, E> {
                T::deserialize(value.into_deserializer()).map(ValueOrList::Value)
            }
            fn visit_i64<E: Error>(self, value: i64) -> Result<Self::Value, E> {
                T::deserialize(value.into_deserializer()).map(ValueOrList::Value)
            }
            fn visit_u64<E: Error>(self, value: u64) -> Result<Self::Value, E> {
                T::deserialize(value.into_deserializer()).map(ValueOrList::Value)
            }
        }
        deserializer.deserialize_any(ValueVisitor(PhantomData))
    }
}
