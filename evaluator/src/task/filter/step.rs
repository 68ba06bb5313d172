//! Interface of filters.

use std::fmt::Debug;

use serde_json::{Map, Value as Json};

use crate::task::response_value::ResponseValue;

/// Filter of a pipeline. Its input is a [`ResponseValue::Many`] with all responses, until `take_first` reduces it to
/// one.
pub(crate) trait Filter: Debug + Send + Sync {
    fn apply(&self, answers: ResponseValue, doc: &Map<String, Json>) -> Result<ResponseValue, String>;
}

/// Applies `change` to each of several texts.
pub(crate) fn each_text(
    answers: ResponseValue,
    change: impl Fn(&str) -> Result<ResponseValue, String>,
) -> Result<ResponseValue, String> {
    match answers {
        ResponseValue::Many(answers) => {
            let changed = answers.iter().map(|answer| change(answer.text())).collect::<Result<_, _>>()?;
            Ok(ResponseValue::Many(changed))
        }
        _ => Err("it must come before take_first".into()),
    }
}
