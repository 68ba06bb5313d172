//! WinoGrande: each choice is a context, and both have the same continuation.

use serde_json::{Value as Json, json};

use super::{BuiltIn, Doc, text};
use crate::task::python::text::strip;

pub(super) const BUILT_INS: &[(&str, BuiltIn)] = &[
    ("winogrande/preprocess_winogrande.doc_to_text", BuiltIn::Field(right_choice)),
    ("winogrande/preprocess_winogrande.doc_to_target", BuiltIn::Field(continuation)),
    ("winogrande/preprocess_winogrande.doc_to_choice", BuiltIn::Field(beginnings)),
];

fn right_choice(doc: &Doc) -> Result<Json, String> {
    match text(doc, "answer")? {
        "1" => Ok(json!(0)),
        "2" => Ok(json!(1)),
        other => Err(format!("the answer {other:?} is neither \"1\" nor \"2\"")),
    }
}

fn halves(doc: &Doc) -> Result<(&str, &str), String> {
    let sentence = text(doc, "sentence")?;
    sentence.split_once('_').ok_or_else(|| format!("the sentence {sentence:?} has no gap `_`"))
}

fn continuation(doc: &Doc) -> Result<Json, String> {
    Ok(json!(strip(halves(doc)?.1)))
}

fn beginnings(doc: &Doc) -> Result<Json, String> {
    let (before, _) = halves(doc)?;
    let options = [text(doc, "option1")?, text(doc, "option2")?];
    Ok(options.iter().map(|option| format!("{before}{option}")).collect())
}
