//! GPQA: choices in random order. lm-eval shuffles them with Python's global generator, seeded with 0 by default; the
//! `n_shot` variants have their own generator.

use std::sync::LazyLock;

use serde_json::{Value as Json, json};

use super::{BuiltIn, Doc, ProcessDocs};
use crate::task::python::pattern::PythonRegex;
use crate::task::python::text::strip;
use crate::task::python_random::PythonRandom;

pub(super) const BUILT_INS: &[(&str, BuiltIn)] = &[
    ("gpqa/zeroshot/utils.process_docs", BuiltIn::Docs(ProcessDocs::MapWithRng(0, plain))),
    ("gpqa/n_shot/utils.process_docs", BuiltIn::Docs(ProcessDocs::MapWithRng(42, plain))),
    ("gpqa/cot_zeroshot/utils.process_docs", BuiltIn::Docs(ProcessDocs::MapWithRng(0, with_list))),
    ("gpqa/cot_n_shot/utils.process_docs", BuiltIn::Docs(ProcessDocs::MapWithRng(0, with_list))),
    ("gpqa/generative/utils.process_docs", BuiltIn::Docs(ProcessDocs::MapWithRng(0, with_list))),
];

const ANSWERS: [&str; 4] = ["Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3", "Correct Answer"];

fn plain(doc: Doc, random: &mut PythonRandom) -> Result<Doc, String> {
    shuffled(doc, random, false)
}

fn with_list(doc: Doc, random: &mut PythonRandom) -> Result<Doc, String> {
    shuffled(doc, random, true)
}

/// Removes text in brackets from the choices, and shuffles them.
pub(super) fn without_brackets(mut doc: Doc, random: &mut PythonRandom) -> Result<Doc, String> {
    static BRACKETS: LazyLock<PythonRegex> =
        LazyLock::new(|| PythonRegex::new(r"\[.*?\]").expect("the pattern is a constant"));
    let written: Vec<Option<Json>> = ANSWERS.iter().map(|column| doc.get(*column).cloned()).collect();
    for column in ANSWERS {
        if let Some(answer) = doc.get(column).and_then(Json::as_str) {
            let answer = BRACKETS.remove(&strip(answer).replace(" [title]", ". "))?;
            doc.insert(column.into(), json!(answer));
        }
    }
    let mut doc = shuffled(doc, random, false)?;
    for (column, answer) in ANSWERS.iter().zip(written) {
        doc.extend(answer.map(|answer| ((*column).to_owned(), answer)));
    }
    Ok(doc)
}

fn shuffled(mut doc: Doc, random: &mut PythonRandom, with_list: bool) -> Result<Doc, String> {
    let mut choices = ANSWERS.map(|column| clean(doc.get(column)));
    let right = choices[3].clone();
    random.shuffle(&mut choices);
    let at = choices.iter().position(|choice| *choice == right).unwrap_or(0);
    for (i, choice) in choices.iter().enumerate() {
        doc.insert(format!("choice{}", i + 1), json!(choice));
    }
    if with_list {
        doc.insert("choices".into(), json!(choices));
    }
    doc.insert("answer".into(), json!(format!("({})", ["A", "B", "C", "D"][at])));
    Ok(doc)
}

fn clean(text: Option<&Json>) -> String {
    let Some(text) = text.and_then(Json::as_str) else { return " ".into() };
    strip(text).replace(" [title]", ". ").replace("  ", " ")
}
