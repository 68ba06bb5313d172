//! MMLU-Pro: up to ten choices in the prompt, and chain-of-thought responses.

use serde_json::{Value as Json, json};

use super::{BuiltIn, Doc, ProcessDocs, text, texts};
use crate::task::python::text::strip;

pub(super) const BUILT_INS: &[(&str, BuiltIn)] = &[
    ("mmlu_pro/utils.doc_to_text", BuiltIn::Field(question)),
    ("mmlu_pro/utils.fewshot_to_text", BuiltIn::Field(question)),
    ("mmlu_pro/utils.fewshot_to_target", BuiltIn::Field(reasoning)),
    ("mmlu_pro/utils.process_biology", only("biology")),
    ("mmlu_pro/utils.process_business", only("business")),
    ("mmlu_pro/utils.process_chemistry", only("chemistry")),
    ("mmlu_pro/utils.process_computer_science", only("computer science")),
    ("mmlu_pro/utils.process_economics", only("economics")),
    ("mmlu_pro/utils.process_engineering", only("engineering")),
    ("mmlu_pro/utils.process_health", only("health")),
    ("mmlu_pro/utils.process_history", only("history")),
    ("mmlu_pro/utils.process_law", only("law")),
    ("mmlu_pro/utils.process_math", only("math")),
    ("mmlu_pro/utils.process_other", only("other")),
    ("mmlu_pro/utils.process_philosophy", only("philosophy")),
    ("mmlu_pro/utils.process_physics", only("physics")),
    ("mmlu_pro/utils.process_psychology", only("psychology")),
];

const fn only(subject: &'static str) -> BuiltIn {
    BuiltIn::Docs(ProcessDocs::ColumnEquals("category", subject))
}

fn question(doc: &Doc) -> Result<Json, String> {
    let options = texts(doc, "options")?;
    let lines = options.iter().zip('A'..='J').map(|(option, letter)| format!("{letter}. {}\n", strip(option)));
    let options: String = lines.collect();
    let question = text(doc, "question")?;
    Ok(json!(format!("Question:\n{question}\nOptions:\n{options}Answer: Let's think step by step.")))
}

fn reasoning(doc: &Doc) -> Result<Json, String> {
    Ok(json!(text(doc, "cot_content")?.replace("A: Let's think step by step. ", "")))
}
