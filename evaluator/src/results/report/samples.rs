//! Documents in the HTML report: prompt, requests, responses and metric values.

use std::collections::BTreeMap;

use candlewick_html::script_json;
use serde::Serialize;
use serde_json::{Map, Value as Json};

use super::histogram::logprob;
use crate::task::{MetricValue, SampleRecord};

/// Document in the report.
#[derive(Serialize)]
struct Document<'s> {
    id: usize,
    /// Prompt shared by the first requests.
    prompt: &'s str,
    target: &'s str,
    asked: Vec<ReportRequest<'s>>,
    filters: Vec<Filtered<'s>>,
}

/// Request of a document.
#[derive(Serialize)]
struct ReportRequest<'s> {
    /// Prompt, if it differs from the document's.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt: Option<&'s str>,
    /// Scored continuation.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'s str>,
    /// True for a correct choice; absent if the request is not a choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    right: Option<bool>,
    /// Log-probability; `null` if it is not finite.
    #[serde(skip_serializing_if = "Option::is_none")]
    logprob: Option<Json>,
    /// True if greedy decoding would generate the continuation.
    #[serde(skip_serializing_if = "Option::is_none")]
    greedy: Option<bool>,
    /// Generated responses.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    answers: Vec<&'s str>,
}

/// Result of one filter: the filtered responses and their metric values.
#[derive(Serialize)]
struct Filtered<'s> {
    name: &'s str,
    #[serde(skip_serializing_if = "Option::is_none")]
    answer: Option<&'s Json>,
    metrics: Map<String, Json>,
}

/// Serializes a task's documents in order, each as JSON escaped for a `<script>` element.
pub(super) fn documents(samples: &[SampleRecord]) -> Vec<String> {
    let mut docs: BTreeMap<usize, Vec<&SampleRecord>> = BTreeMap::new();
    samples.iter().for_each(|sample| docs.entry(sample.doc_id).or_default().push(sample));
    docs.values().filter_map(|filters| script_json(&document(filters)?).ok()).collect()
}

fn document<'s>(filters: &[&'s SampleRecord]) -> Option<Document<'s>> {
    let first = *filters.first()?;
    let prompt = first.arguments.first().and_then(|arguments| arguments.first()?.as_str()).unwrap_or_default();
    let answers = first.resps.as_array().map(Vec::as_slice).unwrap_or_default();
    let asked: Vec<ReportRequest> = first
        .arguments
        .iter()
        .zip(answers)
        .enumerate()
        .map(|(i, (args, answer))| asked(first, i, args, answer))
        .collect();
    let is_text = asked.iter().any(|asked| !asked.answers.is_empty());
    let filtered = |sample: &&'s SampleRecord| Filtered {
        name: &sample.filter,
        answer: is_text.then_some(&sample.filtered_resps),
        metrics: sample.metrics.iter().map(|(name, score)| (name.clone(), json(score))).collect(),
    };
    let asked =
        asked.into_iter().map(|asked| ReportRequest { prompt: asked.prompt.filter(|own| *own != prompt), ..asked });
    Some(Document {
        id: first.doc_id,
        prompt,
        target: &first.target,
        asked: asked.collect(),
        filters: filters.iter().map(filtered).collect(),
    })
}

fn asked<'s>(sample: &'s SampleRecord, i: usize, arguments: &'s [Json], answer: &'s Json) -> ReportRequest<'s> {
    let number = logprob(answer);
    let is_scored = !matches!(arguments.get(1), Some(Json::Object(_)));
    let choices = sample.choices.as_ref().filter(|choices| i < choices.n_choices);
    let said = answer.as_array().map(Vec::as_slice).unwrap_or_default();
    ReportRequest {
        prompt: arguments.first().and_then(Json::as_str),
        text: arguments.get(1).and_then(Json::as_str),
        right: choices.map(|choices| choices.correct.contains(&i)),
        logprob: is_scored.then(|| number.and_then(serde_json::Number::from_f64).map_or(Json::Null, Json::Number)),
        greedy: answer.pointer("/0/1").and_then(Json::as_str).filter(|_| is_scored).map(|truth| truth == "True"),
        answers: if is_scored { Vec::new() } else { said.iter().filter_map(Json::as_str).collect() },
    }
}

fn json(score: &MetricValue) -> Json {
    serde_json::to_value(score).unwrap_or(Json::Null)
}

/// Splits a byte budget among tasks: each gets its size, or an equal share of the remaining budget.
pub(super) fn byte_budgets(sizes: &[usize], total: usize) -> Vec<usize> {
    let mut by_size: Vec<usize> = (0..sizes.len()).collect();
    by_size.sort_by_key(|task| sizes[*task]);
    let (mut shares, mut left) = (vec![0; sizes.len()], total);
    for (i, task) in by_size.iter().enumerate() {
        shares[*task] = sizes[*task].min(left / (sizes.len() - i));
        left -= shares[*task];
    }
    shares
}

/// Returns the number of leading documents that fit into `n_bytes`.
pub(super) fn n_fitting(docs: &[String], n_bytes: usize) -> usize {
    let ends = docs.iter().scan(0, |end, doc| {
        *end += doc.len();
        Some(*end)
    });
    ends.take_while(|end| *end <= n_bytes).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unused_columns_of_a_task_are_left_for_the_others() {
        assert_eq!(byte_budgets(&[10, 100, 200], 150), [10, 70, 70]);
        assert_eq!(byte_budgets(&[10, 20], 150), [10, 20]);
        assert_eq!(byte_budgets(&[10, 20], 0), [0, 0]);
        assert!(byte_budgets(&[], 5).is_empty());
    }

    #[test]
    fn documents_are_whole_or_left_out() {
        let docs = ["12345", "123", "1"].map(str::to_owned);
        assert_eq!([0, 4, 5, 8, 9].map(|n| n_fitting(&docs, n)), [0, 0, 1, 2, 3]);
    }
}
