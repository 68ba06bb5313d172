//! A document's value of a metric.

use serde::{Serialize, Serializer};
use serde_json::Value as Json;

/// A value, or the parts that only the aggregation puts together.
#[derive(Clone, Debug, PartialEq)]
pub enum MetricValue {
    /// No value.
    None,
    /// A number.
    Number(f64),
    /// A count, or 0 and 1.
    Count(i64),
    /// A truth value.
    Flag(bool),
    /// A text.
    Text(String),
    /// Several.
    List(Vec<MetricValue>),
}

impl MetricValue {
    /// The value as a number; truth is 1.
    pub fn number(&self) -> Option<f64> {
        match self {
            Self::Number(value) => Some(*value),
            Self::Count(value) => Some(*value as f64),
            Self::Flag(value) => Some(f64::from(u8::from(*value))),
            _ => None,
        }
    }

    /// 1.0 or 0.0.
    pub(crate) fn of(is_right: bool) -> Self {
        Self::Number(f64::from(u8::from(is_right)))
    }

    /// A pair.
    pub(crate) fn pair(first: MetricValue, second: MetricValue) -> Self {
        Self::List(vec![first, second])
    }

    /// The two of a pair.
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
    /// A value as a record lists it.
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
