//! The interface of filters.

use std::fmt::Debug;

use serde_json::{Map, Value as Json};

use crate::task::answer::Answer;

/// A step of a pipeline. It gets all answers to one request: a [`Answer::Many`], until a step takes one of them.
pub(crate) trait Filter: Debug + Send + Sync {
    fn apply(&self, answers: Answer, doc: &Map<String, Json>) -> Result<Answer, String>;
}

/// Runs `change` on each text of several answers.
pub(crate) fn each_text(answers: Answer, change: impl Fn(&str) -> Result<Answer, String>) -> Result<Answer, String> {
    match answers {
        Answer::Many(answers) => {
            let changed = answers.iter().map(|answer| change(answer.text())).collect::<Result<_, _>>()?;
            Ok(Answer::Many(changed))
        }
        _ => Err("it works on lists of texts; put it before take_first".into()),
    }
}
