//! Response values, as filters and metrics read them.

use serde_json::{Value as Json, json};

use super::python::repr;
use candlewick_inference::request::Response;

/// Response value, possibly changed by a filter.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ResponseValue {
    /// Text.
    Text(String),
    /// A log-probability, and whether every token was the likeliest.
    Loglikelihood(f64, bool),
    /// The log-probability of a whole text.
    Rolling(f64),
    /// Value that the filter `map` substitutes for a text.
    Value(Json),
    /// Texts that belong together: what stays of several answers, or all programs for one problem.
    Many(Vec<ResponseValue>),
}

impl From<&Response> for ResponseValue {
    fn from(response: &Response) -> Self {
        match response {
            Response::Loglikelihood { logprob, is_greedy } => Self::Loglikelihood(*logprob, *is_greedy),
            Response::LoglikelihoodRolling(logprob) => Self::Rolling(*logprob),
            Response::Text(text) => Self::Text(text.clone()),
        }
    }
}

impl ResponseValue {
    /// As the records of samples list it: every part as Python's `str` prints it.
    pub(crate) fn listed(&self) -> Json {
        match self {
            Self::Text(text) => json!(text),
            Self::Loglikelihood(logprob, is_greedy) => {
                json!([repr::float(*logprob), if *is_greedy { "True" } else { "False" }])
            }
            Self::Rolling(logprob) => json!(repr::float(*logprob)),
            Self::Value(Json::Array(items)) => items.iter().map(repr::str).collect(),
            Self::Value(value) => json!(repr::str(value)),
            Self::Many(answers) => answers.iter().map(Self::listed).collect(),
        }
    }

    /// The text, empty for what is none.
    pub(crate) fn text(&self) -> &str {
        match self {
            Self::Text(text) => text,
            _ => "",
        }
    }
}
