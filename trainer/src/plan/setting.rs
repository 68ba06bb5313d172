//! A setting of a plan: key, value and origin.

use candlewick_text::printable::shortened;
use serde::{Serialize, Serializer};

use crate::recipe::Origin;

/// A resolved setting of a plan: key, value and origin.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ResolvedSetting {
    /// The recipe's key.
    pub key: String,
    /// Its value.
    pub value: serde_json::Value,
    /// The origin of the value.
    #[serde(serialize_with = "in_words")]
    pub origin: Origin,
}

impl ResolvedSetting {
    pub(crate) fn new<T: Serialize>(key: &str, value: &T, origin: Origin) -> Self {
        let value = serde_json::to_value(value).unwrap_or(serde_json::Value::Null);
        Self { key: key.to_owned(), value, origin }
    }

    pub(crate) fn shown(&self) -> String {
        const WIDEST: usize = 72;
        shortened(&value_in_words(&self.value), WIDEST).into_owned()
    }
}

/// Returns a value as a recipe has it: text without quotes, `none` for null.
pub(crate) fn value_in_words(value: &serde_json::Value) -> String {
    match value {
        serde_json::Value::String(text) if !text.is_empty() && !text.contains('\n') => text.clone(),
        serde_json::Value::Null => "none".into(),
        other => other.to_string(),
    }
}

fn in_words<S: Serializer>(origin: &Origin, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(origin)
}
