//! IFEval: whether an answer keeps to instructions that can be checked. Strictly, and loosely: with the first line, the last
//! line or the asterisks taken off.

mod instruction;
mod language;
mod sentences;
mod tokens;

use serde_json::{Map, Value as Json};

use self::instruction::follows;
use super::{BuiltIn, Doc};
use crate::task::metric::{Aggregation, MetricValue};
use crate::task::python::text::strip;
use crate::task::response_value::ResponseValue;

pub(super) const BUILT_INS: &[(&str, BuiltIn)] = &[
    ("ifeval/utils.process_results", BuiltIn::Results(results)),
    ("ifeval/utils.agg_inst_level_acc", BuiltIn::Aggregation(Aggregation::FlatMean)),
];

fn results(doc: &Doc, answers: &[ResponseValue]) -> Result<Vec<(String, MetricValue)>, String> {
    let said = answers.first().map_or("", ResponseValue::text);
    let strict = followed(doc, &[said.to_owned()])?;
    let loose = followed(doc, &loosened(said))?;
    let all = |list: &[bool]| MetricValue::Flag(list.iter().all(|followed| *followed));
    let each = |list: &[bool]| MetricValue::List(list.iter().map(|followed| MetricValue::Flag(*followed)).collect());
    Ok(vec![
        ("prompt_level_strict_acc".into(), all(&strict)),
        ("inst_level_strict_acc".into(), each(&strict)),
        ("prompt_level_loose_acc".into(), all(&loose)),
        ("inst_level_loose_acc".into(), each(&loose)),
    ])
}

/// For each instruction, whether one of the texts follows it.
fn followed(doc: &Doc, texts: &[String]) -> Result<Vec<bool>, String> {
    let names = super::texts(doc, "instruction_id_list")?;
    let none = Map::new();
    let kwargs = doc.get("kwargs").and_then(Json::as_array).ok_or("there is no list `kwargs`")?;
    let check = |(i, name): (usize, &&str)| {
        let kwargs = kwargs.get(i).and_then(Json::as_object).unwrap_or(&none);
        for text in texts.iter().filter(|text| !strip(text).is_empty()) {
            if follows(name, kwargs, text)? {
                return Ok(true);
            }
        }
        Ok(false)
    };
    names.iter().enumerate().map(check).collect()
}

/// The text, and what may be meant by it.
fn loosened(text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.split('\n').collect();
    let joined = |lines: &[&str]| strip(&lines.join("\n")).to_owned();
    let without_first = joined(&lines[1..]);
    let without_last = joined(&lines[..lines.len() - 1]);
    let without_both = if lines.len() > 1 { joined(&lines[1..lines.len() - 1]) } else { String::new() };
    let whole = [text.to_owned(), without_first, without_last, without_both];
    let plain = whole.clone().map(|text| text.replace('*', ""));
    whole.into_iter().chain(plain).collect()
}
