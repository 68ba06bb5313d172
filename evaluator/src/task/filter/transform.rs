//! Filters that change each answer by itself.

use serde_json::{Map, Value as Json};

use super::{Filter, each_text};
use crate::task::error::ConfigError;
use crate::task::keys::YamlMap;
use crate::task::response_value::ResponseValue;

/// Changes texts by a plain function.
#[derive(Debug)]
pub(super) struct Texts(pub(super) fn(&str) -> String);

/// Puts a value in the place of each text.
#[derive(Debug)]
pub(super) struct ValueMap {
    values: Map<String, Json>,
    default: Json,
}

impl Filter for Texts {
    fn apply(&self, answers: ResponseValue, _: &Map<String, Json>) -> Result<ResponseValue, String> {
        each_text(answers, |text| Ok(ResponseValue::Text((self.0)(text))))
    }
}

impl ValueMap {
    pub(super) fn read(keys: &YamlMap) -> Result<Self, ConfigError> {
        keys.only(&["function", "mapping_dict", "default_value"])?;
        let values = keys.map("mapping_dict")?.unwrap_or_default();
        let default = keys.get("default_value").map_or(Json::Null, |entry| entry.node.json());
        Ok(Self { values, default })
    }
}

impl Filter for ValueMap {
    fn apply(&self, answers: ResponseValue, _: &Map<String, Json>) -> Result<ResponseValue, String> {
        each_text(answers, |text| {
            Ok(match self.values.get(text).unwrap_or(&self.default) {
                Json::String(text) => ResponseValue::Text(text.clone()),
                value => ResponseValue::Value(value.clone()),
            })
        })
    }
}
