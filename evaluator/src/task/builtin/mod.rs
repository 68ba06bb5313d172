//! Built-in implementations of the Python functions that lm-eval's popular tasks name with `!function`.
//!
//! A function is identified by its path in lm-eval's `tasks` folder. Functions without a built-in implementation are
//! errors.

mod bbh;
mod gpqa;
mod hellaswag;
mod hendrycks_math;
mod humaneval;
mod ifeval;
mod implementation;
mod leaderboard;
mod mmlu_pro;
mod pass_at_k;
mod python_file;
mod sandbox;
mod truthfulqa;
mod wikitext;
mod winogrande;

use std::sync::Arc;

use candlewick_text::suggestion::did_you_mean;

use super::error::ConfigError;
use super::filter::Filter;
use super::function::PythonFunction;
use super::keys::YamlMap;
use super::metric::Aggregation;

use implementation::{BuiltIn, text, texts};
pub(crate) use implementation::{Doc, FieldFunction, ProcessDocs, ProcessResults};
pub(crate) use pass_at_k::GenerationMetric;
pub use python_file::allow_modified_python;
pub(crate) use python_file::hex;
pub(crate) use sandbox::check as check_sandbox;
pub(crate) use wikitext::count_words;

/// All built-in implementations, one list for each module.
const MODULES: [&[(&str, BuiltIn)]; 11] = [
    hellaswag::BUILT_INS,
    winogrande::BUILT_INS,
    wikitext::BUILT_INS,
    truthfulqa::BUILT_INS,
    ifeval::BUILT_INS,
    humaneval::BUILT_INS,
    gpqa::BUILT_INS,
    mmlu_pro::BUILT_INS,
    hendrycks_math::BUILT_INS,
    bbh::BUILT_INS,
    leaderboard::BUILT_INS,
];

pub(crate) fn process_docs(function: &PythonFunction) -> Result<ProcessDocs, ConfigError> {
    find(function, "process_docs", |built_in| match built_in {
        BuiltIn::Docs(it) => Some(it),
        _ => None,
    })
}

pub(crate) fn process_results(function: &PythonFunction) -> Result<ProcessResults, ConfigError> {
    find(function, "process_results", |built_in| match built_in {
        BuiltIn::Results(it) => Some(it),
        _ => None,
    })
}

pub(crate) fn field(function: &PythonFunction) -> Result<FieldFunction, ConfigError> {
    find(function, "a field", |built_in| match built_in {
        BuiltIn::Field(it) => Some(it),
        _ => None,
    })
}

/// Returns the few-shot examples that a function lists.
pub(crate) fn samples(function: &PythonFunction) -> Result<Vec<Doc>, ConfigError> {
    let samples = find(function, "samples", |built_in| match built_in {
        BuiltIn::Samples(it) => Some(it),
        _ => None,
    });
    samples?(function).map_err(|problem| ConfigError::at(function.place.clone(), format!("samples: {problem}")))
}

pub(crate) fn filter_class(function: &PythonFunction, keys: &YamlMap) -> Result<Arc<dyn Filter>, ConfigError> {
    let class = find(function, "a filter", |built_in| match built_in {
        BuiltIn::FilterClass(it) => Some(it),
        _ => None,
    });
    class?(keys)
}

pub(crate) fn filter_function(function: &PythonFunction) -> Result<Arc<dyn Filter>, ConfigError> {
    let filter = find(function, "filter_fn", |built_in| match built_in {
        BuiltIn::FilterFunction(it) => Some(it),
        _ => None,
    });
    Ok(filter?())
}

pub(crate) fn generation_metric(function: &PythonFunction, keys: &YamlMap) -> Result<GenerationMetric, ConfigError> {
    let metric = find(function, "a metric", |built_in| match built_in {
        BuiltIn::Metric(it) => Some(it),
        _ => None,
    });
    metric?(keys)
}

pub(crate) fn aggregation(function: &PythonFunction) -> Result<Aggregation, ConfigError> {
    find(function, "an aggregation", |built_in| match built_in {
        BuiltIn::Aggregation(it) => Some(it),
        _ => None,
    })
}

/// Finds the built-in implementation of a function for a role.
fn find<T>(function: &PythonFunction, role: &str, take: impl Fn(BuiltIn) -> Option<T>) -> Result<T, ConfigError> {
    let is_named =
        |name: &str| function.name.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('/'));
    let built_ins = || MODULES.iter().copied().flatten();
    // The longest path matches best, because several tasks have an `mmlu_pro/utils`.
    let Some((name, built_in)) = built_ins().filter(|(name, _)| is_named(name)).max_by_key(|(name, _)| name.len())
    else {
        let of_role = || built_ins().filter(|(_, built_in)| take(*built_in).is_some()).map(|(name, _)| *name);
        let near = did_you_mean(&function.name, of_role());
        let mut modules: Vec<&str> = of_role().filter_map(|name| Some(name.rsplit_once('.')?.0)).collect();
        modules.dedup();
        let message = format!(
            "!function {}: Python code is not run, and this function has no built-in implementation",
            function.name
        );
        let fault = ConfigError::at(function.place.clone(), message + &near);
        return Err(
            fault.with_remedy(format!("built-in implementations of {role} are those of {}", modules.join(", ")))
        );
    };
    let wrong = || ConfigError::at(function.place.clone(), format!("!function {name} is not {role}"));
    let found = take(*built_in).ok_or_else(wrong)?;
    python_file::check(function, name)?;
    Ok(found)
}
