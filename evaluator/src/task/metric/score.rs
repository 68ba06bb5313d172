//! Metric values of one document.

use serde::{Serialize, Serializer};
use serde_json::Value as Json;

/// Metric value of one document, or the inputs that the aggregation combines.
#[derive(Clone, Debug, PartialEq)]
pub enum MetricValue {
    /// Missing value.
    None,
    /// Floating-point number.
    Number(f64),
    /// Integer, such as a count or 0 and 1.
    Count(i64),
    /// Boolean.
    Flag(bool),
    /// Text.
    Text(String),
    /// List of values.
    List(Vec<MetricValue>),
}

impl MetricValue {
    /// Returns the value as a number; `true` is 1.
    pub fn number(&self) -> Option<f64> {
        match self {
            Self::Number(value) => Some(*value),
            Self::Count(value) => Some(*value as f64),
            Self::Flag(value) => Some(f64::from(u8::from(*value))),
            _ => None,
        }
    }

    /// Returns 1 for true and 0 for false.
    pub(crate) fn of(is_right: bool) -> Self {
        Self::Number(f64::from(u8::from(is_right)))
    }

    /// A pair.
    pub(crate) fn pair(first: MetricValue, second: MetricValue) -> Self {
        Self::List(vec![first, second])
    }

    /// Returns the two elements of a pair.
    pub(crate) fn as_pair(&self) -> Option<(&MetricValue, &MetricValue)> {
        match self {
            Self::List(items) if items.len() == 2 => Some((&items[0], &items[1])),
            _ => None,
        }
    }

    /// The text.
    pub(crate) fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }
}

impl From<&Json> for MetricValue {
    /// Returns the value as JSON for a sample record.
    fn from(value: &Json) -> Self {
        match value {
            Json::Null => Self::None,
            Json::Bool(value) => Self::Flag(*value),
            Json::Number(number) => {
                number.as_i64().map_or_else(|| number.as_f64().map_or(Self::None, Self::Number), Self::Count)
            }
            Json::String(text) => Self::Text(text.clone()),
            Json::Array(items) => Self::List(items.iter().map(Self::from).collect()),
            Json::Object(_) => Self::None,
        }
    }
}

impl Serialize for MetricValue {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::None => serializer.serialize_unit(),
            Self::Number(value) => serializer.serialize_f64(*value),
            Self::Count(value) => serializer.serialize_i64(*value),
            Self::Flag(value) => serializer.serialize_bool(*value),
            Self::Text(text) => serializer.serialize_str(text),
            Self::List(items) => items.serialize(serializer),
        }
    }
}
