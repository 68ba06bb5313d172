//! HumanEval: programs that the model wrote are run against the tests of the problem, each in a child of its own.

use std::sync::Arc;

use super::pass_at_k::GenerationMetric;
use super::{BuiltIn, Doc, text};
use crate::task::filter::{Filter, each_text};
use crate::task::response_value::ResponseValue;

pub(super) const BUILT_INS: &[(&str, BuiltIn)] = &[
    ("humaneval/utils.pass_at_k", BuiltIn::Metric(GenerationMetric::read)),
    ("humaneval/utils.build_predictions", BuiltIn::FilterFunction(|| Arc::new(Programs { in_fence: false }))),
    ("humaneval/utils.build_predictions_instruct", BuiltIn::FilterFunction(|| Arc::new(Programs { in_fence: true }))),
];

/// Puts the problem before what the model wrote, up to the end of the code if it stands in a fence.
#[derive(Debug)]
struct Programs {
    in_fence: bool,
}

impl Filter for Programs {
    fn apply(&self, answers: ResponseValue, doc: &Doc) -> Result<ResponseValue, String> {
        let prompt = text(doc, "prompt")?;
        let code = |text: &'_ str| match text.find("```").filter(|_| self.in_fence) {
            Some(end) => text[..end].to_owned(),
            None => text.to_owned(),
        };
        each_text(answers, |text| Ok(ResponseValue::Text(format!("{prompt}{}", code(text)))))
    }
}
