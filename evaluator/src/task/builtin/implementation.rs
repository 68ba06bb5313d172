//! The roles of built-in implementations, and access to a document's columns.

use std::sync::Arc;

use candlewick_text::suggestion::did_you_mean;
use serde_json::{Map, Value as Json};

use super::pass_at_k::GenerationMetric;
use crate::task::error::ConfigError;
use crate::task::filter::Filter;
use crate::task::function::PythonFunction;
use crate::task::keys::YamlMap;
use crate::task::metric::{Aggregation, MetricValue};
use crate::task::python_random::PythonRandom;
use crate::task::response_value::ResponseValue;

/// A document: column names to values.
pub(crate) type Doc = Map<String, Json>;

/// What becomes of a split's documents. Random choices run through all documents in their order.
#[derive(Clone, Copy)]
pub(crate) enum ProcessDocs {
    /// Each document is changed by itself.
    Each(fn(Doc) -> Result<Doc, String>),
    /// Each is changed with random choices.
    Random(u64, fn(Doc, &mut PythonRandom) -> Result<Doc, String>),
    /// Some are left out, the others changed.
    Some(fn(Doc) -> Result<Option<Doc>, String>),
    /// Those stay whose column has the value.
    Where(&'static str, &'static str),
}

/// Finds a document's metrics from the answers to its requests.
pub(crate) type ProcessResults = fn(&Doc, &[ResponseValue]) -> Result<Vec<(String, MetricValue)>, String>;

/// A text, a number or a list, from a document.
pub(crate) type FieldFunction = fn(&Doc) -> Result<Json, String>;

/// A built-in implementation.
#[derive(Clone, Copy)]
pub(super) enum BuiltIn {
    Docs(ProcessDocs),
    Results(ProcessResults),
    Field(FieldFunction),
    /// A class of filters, built from the keys beside `function`.
    FilterClass(fn(&YamlMap) -> Result<Arc<dyn Filter>, ConfigError>),
    /// The `filter_fn` of a custom filter.
    FilterFunction(fn() -> Arc<dyn Filter>),
    /// Examples that are written into a Python file.
    Samples(fn(&PythonFunction) -> Result<Vec<Doc>, String>),
    Metric(fn(&YamlMap) -> Result<GenerationMetric, ConfigError>),
    Aggregation(Aggregation),
}

/// A text of a document.
pub(super) fn text<'a>(doc: &'a Doc, column: &str) -> Result<&'a str, String> {
    doc.get(column).and_then(Json::as_str).ok_or_else(|| missing(doc, column, "a text"))
}

/// The texts of a column that is a list.
pub(super) fn texts<'a>(doc: &'a Doc, column: &str) -> Result<Vec<&'a str>, String> {
    let list = doc.get(column).and_then(Json::as_array);
    let list = list.and_then(|list| list.iter().map(Json::as_str).collect());
    list.ok_or_else(|| missing(doc, column, "a list of texts"))
}

fn missing(doc: &Doc, column: &str, wanted: &str) -> String {
    match doc.get(column) {
        None => {
            let near = did_you_mean(column, doc.keys().map(String::as_str));
            let columns: Vec<&str> = doc.keys().map(String::as_str).collect();
            format!("there is no column `{column}`{near}; columns are {}", columns.join(", "))
        }
        Some(_) => format!("the column `{column}` is not {wanted}"),
    }
}
