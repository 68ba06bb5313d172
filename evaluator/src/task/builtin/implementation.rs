//! Kinds of built-in implementations, and access to a document's columns.

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

/// Document: values by column name.
pub(crate) type Doc = Map<String, Json>;

/// Implementation of `process_docs`. `MapWithRng` uses one random generator for all documents, in order.
#[derive(Clone, Copy)]
pub(crate) enum ProcessDocs {
    /// Function that changes each document.
    Map(fn(Doc) -> Result<Doc, String>),
    /// Seed, and a function that changes each document with random numbers.
    MapWithRng(u64, fn(Doc, &mut PythonRandom) -> Result<Doc, String>),
    /// Function that changes or removes each document.
    FilterMap(fn(Doc) -> Result<Option<Doc>, String>),
    /// Column and value; documents with another value in the column are removed.
    ColumnEquals(&'static str, &'static str),
}

/// Implementation of `process_results`: computes a document's metrics from the responses.
pub(crate) type ProcessResults = fn(&Doc, &[ResponseValue]) -> Result<Vec<(String, MetricValue)>, String>;

/// Implementation of a field: returns a text, a number or a list for a document.
pub(crate) type FieldFunction = fn(&Doc) -> Result<Json, String>;

/// Built-in implementation of a Python function or class.
#[derive(Clone, Copy)]
pub(super) enum BuiltIn {
    Docs(ProcessDocs),
    Results(ProcessResults),
    Field(FieldFunction),
    /// Class of filters, built from the other keys of the filter's map.
    FilterClass(fn(&YamlMap) -> Result<Arc<dyn Filter>, ConfigError>),
    /// Function `filter_fn` of a custom filter.
    FilterFunction(fn() -> Arc<dyn Filter>),
    /// Few-shot examples in a Python file.
    Samples(fn(&PythonFunction) -> Result<Vec<Doc>, String>),
    Metric(fn(&YamlMap) -> Result<GenerationMetric, ConfigError>),
    Aggregation(Aggregation),
}

/// Returns the text in a column.
pub(super) fn text<'a>(doc: &'a Doc, column: &str) -> Result<&'a str, String> {
    doc.get(column).and_then(Json::as_str).ok_or_else(|| missing(doc, column, "a text"))
}

/// Returns the list of texts in a column.
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
