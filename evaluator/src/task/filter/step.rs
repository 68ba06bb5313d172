//! The interface of filters.

use std::fmt::Debug;

use serde_json::{Map, Value as Json};

use crate::task::response_value::ResponseValue;

/// A step of a pipeline. It gets all answers to one request: a [`ResponseValue::Many`], until a step takes one of them.
pub(crate) trait Filter: Debug + Send + Sync {
    fn apply(&self, answers: ResponseValue, doc: &Map<String, Json>) -> Result<ResponseValue, String>;
}

/// Runs `change` on each text of several answers.
pub(crate) fn each_text(
    answers: ResponseValue,
    change: impl Fn(&str) -> Result<ResponseValue, String>,
) -> Result<ResponseValue, String> {
    match answers {
        ResponseValue::Many(answers) => {
            let changed = answers.iter().map(|answer| change(answer.text())).collect::<Result<_, _>>()?;
            Ok(ResponseValue::Many(changed))
        }
        _ => Err("it works on lists of texts; put it before take_first".into()),
    }
}
