//! Sample records, with lm-eval's fields and hashes.

use candlewick_text::template::python::{from_json, indented_json};
use minijinja::Value;
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::{Map, Value as Json, json};
use sha2::{Digest, Sha256};

use super::builtin::{Doc, hex};
use super::instance_responses::InstanceResponses;
use super::metric::MetricValue;
use super::python::repr;
use super::response_value::ResponseValue;
use candlewick_inference::request::Request;

/// Sample record of one document and filter, as in lm-eval's `samples_*.jsonl`.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleRecord {
    /// Index of the document in its split.
    pub doc_id: usize,
    /// Columns of the document.
    pub doc: Map<String, Json>,
    /// Target as text.
    pub target: String,
    /// Arguments of each request: the prompt, and the continuation or the generation settings.
    pub arguments: Vec<Vec<Json>>,
    /// Responses to each request.
    pub resps: Json,
    /// Responses after the filter.
    pub filtered_resps: Json,
    /// Filter name.
    pub filter: String,
    /// SHA-256 of the document as JSON.
    pub doc_hash: String,
    /// SHA-256 of the first request's prompt.
    pub prompt_hash: String,
    /// SHA-256 of the target.
    pub target_hash: String,
    /// Name and value of each metric.
    pub metrics: Vec<(String, MetricValue)>,
    /// Correct choices, if known; omitted from the record.
    pub choices: Option<ChoiceTargets>,
}

/// Number of choices of a document, and the correct ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChoiceTargets {
    /// Number of choices. The first `n_choices` requests score them, one each.
    pub n_choices: usize,
    /// Indices of the correct choices; any of them counts.
    pub correct: Vec<usize>,
}

impl SampleRecord {
    #[allow(clippy::too_many_arguments, reason = "the record has these fields")]
    pub(crate) fn new(
        doc_id: usize,
        doc: &Doc,
        target: &Json,
        requests: &[InstanceResponses],
        kwargs: &Map<String, Json>,
        filtered: &[ResponseValue],
        filter: &str,
        metrics: &[(String, MetricValue)],
        choices: Option<ChoiceTargets>,
    ) -> Self {
        let arguments: Vec<Vec<Json>> =
            requests.iter().map(|asked| arguments(&asked.instance.request, kwargs)).collect();
        let prompt = arguments.first().and_then(|first| first[0].as_str()).unwrap_or_default();
        let target = repr::str(target);
        let listed =
            |asked: &InstanceResponses| asked.answers.iter().map(ResponseValue::to_record_json).collect::<Json>();
        Self {
            doc_id,
            doc_hash: hash(&document_json(doc)),
            prompt_hash: hash(prompt),
            target_hash: hash(&target),
            doc: doc.clone(),
            target,
            arguments,
            resps: requests.iter().map(listed).collect(),
            filtered_resps: filtered.iter().map(ResponseValue::to_record_json).collect(),
            filter: filter.to_owned(),
            metrics: metrics.to_vec(),
            choices,
        }
    }
}

impl Serialize for SampleRecord {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let names: Vec<&str> = self.metrics.iter().map(|(name, _)| name.as_str()).collect();
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("doc_id", &self.doc_id)?;
        map.serialize_entry("doc", &self.doc)?;
        map.serialize_entry("target", &self.target)?;
        map.serialize_entry(
            "arguments",
            &numbered(
                "gen_args_",
                self.arguments.iter().map(|args| Json::Object(numbered("arg_", args.iter().cloned()))),
            ),
        )?;
        map.serialize_entry("resps", &self.resps)?;
        map.serialize_entry("filtered_resps", &self.filtered_resps)?;
        map.serialize_entry("filter", &self.filter)?;
        map.serialize_entry("metrics", &names)?;
        map.serialize_entry("doc_hash", &self.doc_hash)?;
        map.serialize_entry("prompt_hash", &self.prompt_hash)?;
        map.serialize_entry("target_hash", &self.target_hash)?;
        for (name, score) in &self.metrics {
            map.serialize_entry(name, score)?;
        }
        map.end()
    }
}

/// Returns lm-eval's task hash, computed over the hashes of all records.
pub fn task_hash(samples: &[SampleRecord]) -> String {
    let hashes = samples.iter().flat_map(|sample| [&sample.doc_hash, &sample.prompt_hash, &sample.target_hash]);
    hash(&hashes.map(String::as_str).collect::<String>())
}

/// Returns the SHA-256 of a text as hexadecimal digits.
pub(crate) fn hash(text: &str) -> String {
    hex(&Sha256::digest(text.as_bytes()))
}

/// Returns a document as Python's `json.dumps` writes it, which lm-eval hashes.
fn document_json(doc: &Doc) -> String {
    let columns = Value::from_pairs(doc.iter().map(|(name, value)| (name.as_str(), from_json(value))));
    indented_json(&columns).unwrap_or_default()
}

fn arguments(request: &Request, kwargs: &Map<String, Json>) -> Vec<Json> {
    match request {
        Request::Loglikelihood { context, continuation } => vec![json!(context), json!(continuation)],
        Request::LoglikelihoodRolling { text } => vec![json!(text)],
        Request::GenerateUntil { context, .. } => vec![json!(context), json!(kwargs)],
    }
}

fn numbered(prefix: &str, values: impl Iterator<Item = Json>) -> Map<String, Json> {
    values.enumerate().map(|(i, value)| (format!("{prefix}{i}"), value)).collect()
}
