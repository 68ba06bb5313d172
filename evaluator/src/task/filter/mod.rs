//! Filters: transformations of responses before scoring. A task may have several filter pipelines, each with its own
//! scores.

mod multi_choice;
mod regex;
mod select;
mod step;
mod transform;

use std::sync::Arc;

use candlewick_text::suggestion::did_you_mean;
use serde_json::{Map, Value as Json};

use super::builtin;
use super::error::ConfigError;
use super::function::as_function;
use super::keys::{YamlMap, type_error};
use super::python::text;
use super::response_value::ResponseValue;
use super::yaml::{TaskEntry, TaskNode, TaskValue};

pub(crate) use multi_choice::{RegexFilterConfig, multi_choice_in_input};
pub(crate) use regex::RegexExtract;
pub(crate) use select::TakeFirst;
pub(crate) use step::{Filter, each_text};

/// Named filter pipeline, an entry of `filter_list`.
#[derive(Clone, Debug)]
pub(crate) struct FilterConfig {
    pub(crate) name: String,
    steps: Vec<Arc<dyn Filter>>,
}

const KNOWN: [&str; 9] = [
    "regex",
    "multi_choice_regex",
    "take_first",
    "take_first_k",
    "majority_vote",
    "lowercase",
    "uppercase",
    "remove_whitespace",
    "map",
];

/// Unsupported filters of lm-eval.
const REFUSED: [&str; 3] = ["decontaminate", "format_span", "regex_pos"];

impl FilterConfig {
    /// Applies the pipeline to the responses to one request.
    pub(crate) fn apply(&self, answers: Vec<ResponseValue>, doc: &Map<String, Json>) -> Result<ResponseValue, String> {
        let run = |answers, step: &Arc<dyn Filter>| step.apply(answers, doc);
        let fail = |problem| format!("filter {}: {problem}", self.name);
        self.steps.iter().try_fold(ResponseValue::Many(answers), run).map_err(fail)
    }
}

/// Reads `filter_list`. The default is the pipeline `none` with the filter `take_first`.
pub(crate) fn filter_list(entry: Option<&TaskEntry>) -> Result<Vec<FilterConfig>, ConfigError> {
    let Some(entry) = entry else {
        return Ok(vec![FilterConfig { name: "none".into(), steps: vec![Arc::new(TakeFirst)] }]);
    };
    let TaskValue::List(pipelines) = &entry.node.value else { return Err(type_error(entry, "a list of filters")) };
    pipelines.iter().map(pipeline).collect()
}

fn pipeline(node: &TaskNode) -> Result<FilterConfig, ConfigError> {
    let keys = YamlMap::new(node, "an entry of filter_list", &["name", "filter"])?;
    let name = keys.required_text("name")?;
    let steps = keys.list("filter")?.ok_or_else(|| keys.error("an entry of filter_list needs the key `filter`"))?;
    Ok(FilterConfig { name, steps: steps.iter().map(step).collect::<Result<_, _>>()? })
}

fn step(node: &TaskNode) -> Result<Arc<dyn Filter>, ConfigError> {
    let keys = YamlMap::with_any_keys(node, "a filter")?;
    let entry = keys.get("function").ok_or_else(|| keys.error("a filter needs the key `function`"))?;
    if let Some(function) = as_function(entry) {
        return builtin::filter_class(&function, &keys);
    }
    let name = keys.required_text("function")?;
    if ["take_first", "majority_vote", "lowercase", "uppercase", "remove_whitespace"].contains(&name.as_str()) {
        keys.deny_unknown(&["function"])?;
    }
    Ok(match name.as_str() {
        "take_first" => Arc::new(TakeFirst),
        "take_first_k" => Arc::new(select::TakeFirstK::read(&keys)?),
        "majority_vote" => Arc::new(select::MajorityVote),
        "lowercase" => Arc::new(transform::MapText(|text| text.to_lowercase())),
        "uppercase" => Arc::new(transform::MapText(|text| text.to_uppercase())),
        "remove_whitespace" => Arc::new(transform::MapText(|text| text::strip(text).to_owned())),
        "map" => Arc::new(transform::ValueMap::read(&keys)?),
        "regex" => Arc::new(RegexExtract::read(&keys)?),
        "multi_choice_regex" => {
            Arc::new(multi_choice::MultiChoiceRegexFilter::read(&keys, multi_choice::ChoiceSource::Column)?)
        }
        "custom" => custom(&keys)?,
        other => return Err(unknown(entry, other)),
    })
}

fn custom(keys: &YamlMap) -> Result<Arc<dyn Filter>, ConfigError> {
    let entry = keys.get("filter_fn").ok_or_else(|| keys.error("the filter custom needs the key `filter_fn`"))?;
    let function = as_function(entry).ok_or_else(|| type_error(entry, "a !function"))?;
    builtin::filter_function(&function)
}

fn unknown(entry: &TaskEntry, name: &str) -> ConfigError {
    let place = entry.node.place.clone();
    if REFUSED.contains(&name) {
        return ConfigError::at(place, format!("lm-eval's filter {name} is not supported"));
    }
    let near = did_you_mean(name, KNOWN);
    ConfigError::at(place, format!("unknown filter {name:?}{near}"))
        .with_remedy(format!("known are {}, custom", KNOWN.join(", ")))
}
