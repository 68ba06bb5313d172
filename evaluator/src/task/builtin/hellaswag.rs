//! HellaSwag: removes WikiHow's markup from contexts and endings.

use std::sync::LazyLock;

use serde_json::{Value as Json, json};

use super::{BuiltIn, Doc, ProcessDocs, text, texts};
use crate::task::python::pattern::PythonRegex;
use crate::task::python::{repr, text as python};

pub(super) const BUILT_INS: &[(&str, BuiltIn)] =
    &[("hellaswag/utils.process_docs", BuiltIn::Docs(ProcessDocs::Map(process)))];

fn process(mut doc: Doc) -> Result<Doc, String> {
    let context = format!("{} {}", text(&doc, "ctx_a")?, python::capitalize(text(&doc, "ctx_b")?));
    let query = clean(&format!("{}: {context}", text(&doc, "activity_label")?))?;
    let choices = texts(&doc, "endings")?.into_iter().map(clean).collect::<Result<Vec<_>, _>>()?;
    let label = repr::str(doc.get("label").unwrap_or(&Json::Null));
    let gold: i64 = label.trim().parse().map_err(|_| format!("the label {label:?} is not a number"))?;
    doc.insert("query".into(), json!(query));
    doc.insert("choices".into(), json!(choices));
    doc.insert("gold".into(), json!(gold));
    Ok(doc)
}

fn clean(text: &str) -> Result<String, String> {
    static BRACKETS: LazyLock<PythonRegex> =
        LazyLock::new(|| PythonRegex::new(r"\[.*?\]").expect("the pattern is a constant"));
    let text = python::strip(text).replace(" [title]", ". ");
    Ok(BRACKETS.remove(&text)?.replace("  ", " "))
}
