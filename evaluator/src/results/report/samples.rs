//! What the page holds of each document: the prompt once, what was asked behind it, the answers and their values.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Map, Value as Json};

use super::histogram::logprob;
use crate::task::{MetricValue, SampleRecord};

/// A document.
#[derive(Serialize)]
struct Document<'s> {
    id: usize,
    /// The prompt that the first requests have in common.
    prompt: &'s str,
    target: &'s str,
    asked: Vec<ReportRequest<'s>>,
    filters: Vec<Filtered<'s>>,
}

/// A request.
#[derive(Serialize)]
struct ReportRequest<'s> {
    /// The prompt, if it is another than the document's.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt: Option<&'s str>,
    /// What was scored behind the prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'s str>,
    /// Whether this choice is right, if it is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    right: Option<bool>,
    /// How likely it is; `null` if that is no number.
    #[serde(skip_serializing_if = "Option::is_none")]
    logprob: Option<Json>,
    /// Whether each of its tokens was the likeliest.
    #[serde(skip_serializing_if = "Option::is_none")]
    greedy: Option<bool>,
    /// Texts that were generated.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    answers: Vec<&'s str>,
}

/// What a filter made of the answers.
#[derive(Serialize)]
struct Filtered<'s> {
    name: &'s str,
    #[serde(skip_serializing_if = "Option::is_none")]
    answer: Option<&'s Json>,
    metrics: Map<String, Json>,
}

/// The documents of a task in their order, each as JSON that may stand in a script.
pub(super) fn documents(samples: &[SampleRecord]) -> Vec<String> {
    let mut docs: BTreeMap<usize, Vec<&SampleRecord>> = BTreeMap::new();
    samples.iter().for_each(|sample| docs.entry(sample.doc_id).or_default().push(sample));
    let written = docs.values().filter_map(|filters| serde_json::to_string(&document(filters)?).ok());
    // No text ends the script that it stands in.
    written.map(|json| json.replace('<', "\\u003c")).collect()
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
    let choices = sample.choices.as_ref().filter(|choices| i < choices.n);
    let said = answer.as_array().map(Vec::as_slice).unwrap_or_default();
    ReportRequest {
        prompt: arguments.first().and_then(Json::as_str),
        text: arguments.get(1).and_then(Json::as_str),
        right: choices.map(|choices| choices.right.contains(&i)),
        logprob: is_scored.then(|| number.and_then(serde_json::Number::from_f64).map_or(Json::Null, Json::Number)),
        greedy: answer.pointer("/0/1").and_then(Json::as_str).filter(|_| is_scored).map(|truth| truth == "True"),
        answers: if is_scored { Vec::new() } else { said.iter().filter_map(Json::as_str).collect() },
    }
}

fn json(score: &MetricValue) -> Json {
    serde_json::to_value(score).unwrap_or(Json::Null)
}

/// How many bytes each of the tasks may have: as many as it needs, or as any other that needs more.
pub(super) fn shares(sizes: &[usize], total: usize) -> Vec<usize> {
    let mut by_size: Vec<usize> = (0..sizes.len()).collect();
    by_size.sort_by_key(|task| sizes[*task]);
    let (mut shares, mut left) = (vec![0; sizes.len()], total);
    for (i, task) in by_size.iter().enumerate() {
        shares[*task] = sizes[*task].min(left / (sizes.len() - i));
        left -= shares[*task];
    }
    shares
}

/// How many of the documents, from the first on, have room.
pub(super) fn n_within(docs: &[String], n_bytes: usize) -> usize {
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
    fn what_a_task_does_not_need_is_the_others() {
        assert_eq!(shares(&[10, 100, 200], 150), [10, 70, 70]);
        assert_eq!(shares(&[10, 20], 150), [10, 20]);
        assert_eq!(shares(&[10, 20], 0), [0, 0]);
        assert!(shares(&[], 5).is_empty());
    }

    #[test]
    fn documents_are_whole_or_left_out() {
        let docs = ["12345", "123", "1"].map(str::to_owned);
        assert_eq!([0, 4, 5, 8, 9].map(|n| n_within(&docs, n)), [0, 0, 1, 2, 3]);
    }
}
