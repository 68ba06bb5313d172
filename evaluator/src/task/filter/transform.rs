//! Filters that change each answer by itself.

use serde_json::{Map, Value as Json};

use super::{Filter, each_text};
use crate::task::answer::Answer;
use crate::task::error::Fault;
use crate::task::keys::Keys;

/// Changes texts by a plain function.
#[derive(Debug)]
pub(super) struct Texts(pub(super) fn(&str) -> String);

/// Puts a value in the place of each text.
#[derive(Debug)]
pub(super) struct Mapped {
    values: Map<String, Json>,
    default: Json,
}

impl Filter for Texts {
    fn apply(&self, answers: Answer, _: &Map<String, Json>) -> Result<Answer, String> {
        each_text(answers, |text| Ok(Answer::Text((self.0)(text))))
    }
}

impl Mapped {
    pub(super) fn read(keys: &Keys) -> Result<Self, Fault> {
        keys.only(&["function", "mapping_dict", "default_value"])?;
        let values = keys.map("mapping_dict")?.unwrap_or_default();
        let default = keys.get("default_value").map_or(Json::Null, |entry| entry.node.json());
        Ok(Self { values, default })
    }
}

impl Filter for Mapped {
    fn apply(&self, answers: Answer, _: &Map<String, Json>) -> Result<Answer, String> {
        each_text(answers, |text| {
            Ok(match self.values.get(text).unwrap_or(&self.default) {
                Json::String(text) => Answer::Text(text.clone()),
                value => Answer::Value(value.clone()),
            })
        })
    }
}
