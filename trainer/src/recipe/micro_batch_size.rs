//! The key `micro_batch_size`.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::value::{F64Deserializer, StrDeserializer, U64Deserializer};
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::HumanInt;

/// Value of `micro_batch_size`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MicroBatchSize {
    /// The number of rows.
    Rows(HumanInt),
    /// As many rows as the device needs for full speed, by the memory estimate and the free memory.
    Auto,
}

/// The word for [`MicroBatchSize::Auto`].
const AUTO: &str = "auto";

struct RowsVisitor;

impl Visitor<'_> for RowsVisitor {
    type Value = MicroBatchSize;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("auto, or a whole number of at least 1 (such as 4)")
    }
    fn visit_u64<E: de::Error>(self, value: u64) -> Result<MicroBatchSize, E> {
        HumanInt::deserialize(U64Deserializer::new(value)).map(MicroBatchSize::Rows)
    }
    fn visit_i64<E: de::Error>(self, value: i64) -> Result<MicroBatchSize, E> {
        Err(E::invalid_value(de::Unexpected::Signed(value), &self))
    }
    fn visit_f64<E: de::Error>(self, value: f64) -> Result<MicroBatchSize, E> {
        let rows = HumanInt::deserialize(F64Deserializer::<E>::new(value)).map(MicroBatchSize::Rows);
        rows.map_err(|_| E::invalid_value(de::Unexpected::Float(value), &self))
    }
    fn visit_str<E: de::Error>(self, text: &str) -> Result<MicroBatchSize, E> {
        if text == AUTO {
            return Ok(MicroBatchSize::Auto);
        }
        let rows = HumanInt::deserialize(StrDeserializer::<E>::new(text)).map(MicroBatchSize::Rows);
        rows.map_err(|_| E::invalid_value(de::Unexpected::Str(text), &self))
    }
}

impl<'de> Deserialize<'de> for MicroBatchSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RowsVisitor)
    }
}

impl Serialize for MicroBatchSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Rows(rows) => rows.serialize(serializer),
            Self::Auto => serializer.serialize_str(AUTO),
        }
    }
}

impl JsonSchema for MicroBatchSize {
    fn schema_name() -> Cow<'static, str> {
        "MicroBatchSize".into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let rows = generator.subschema_for::<HumanInt>();
        json_schema!({ "anyOf": [{ "const": AUTO }, rows] })
    }
}
