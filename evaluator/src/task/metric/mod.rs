//! Metrics: per-document values, aggregations and standard errors.

mod aggregate;
mod bleu;
mod chrf;
mod exact_match;
mod score;
mod statistic;
mod stderr;

use candlewick_text::suggestion::did_you_mean;

use super::builtin;
use super::error::ConfigError;
use super::function::as_function;
use super::keys::{YamlMap, type_error};
use super::output_type::OutputType;
use super::yaml::{TaskEntry, TaskNode, TaskValue};

pub(crate) use aggregate::Aggregation;
pub(crate) use exact_match::ExactMatch;
pub use score::MetricValue;
pub(crate) use stderr::{pooled_stderr, stderr, unweighted_stderr};

/// Metric of a task, as configured in `metric_list`.
#[derive(Clone, Debug)]
pub(crate) struct MetricConfig {
    pub(crate) name: String,
    pub(crate) kind: Metric,
    pub(crate) aggregation: Aggregation,
    pub(crate) higher_is_better: bool,
}

/// Source of a metric's per-document values.
#[derive(Clone, Debug)]
pub(crate) enum Metric {
    /// Computed from log-probabilities according to the output type.
    ByName,
    /// Exact match of text and target.
    ExactMatch(ExactMatch),
    /// Pair of target and text, compared by the aggregation (BLEU, chrF).
    TextPair,
    /// Computed by the task's `process_results`.
    Processed,
    /// Computed by a built-in implementation, which may return several values.
    BuiltIn(builtin::GenerationMetric),
    /// `bypass`: no value.
    Bypass,
}

/// Metric registered by lm-eval: name, default aggregation and `higher_is_better`.
struct RegisteredMetric {
    name: &'static str,
    aggregation: Aggregation,
    higher_is_better: bool,
    outputs: &'static [OutputType],
}

const CHOICE: &[OutputType] = &[OutputType::MultipleChoice];
const LIKELY: &[OutputType] = &[OutputType::Loglikelihood];
const ROLLING: &[OutputType] = &[OutputType::LoglikelihoodRolling];
const TEXT: &[OutputType] = &[OutputType::GenerateUntil];

const KNOWN: [RegisteredMetric; 16] = [
    known("acc", Aggregation::Mean, true, &[OutputType::MultipleChoice, OutputType::Loglikelihood]),
    known("acc_norm", Aggregation::Mean, true, CHOICE),
    known("acc_bytes", Aggregation::Mean, true, CHOICE),
    known("acc_mutual_info", Aggregation::Mean, true, CHOICE),
    known("exact_match", Aggregation::Mean, true, &[OutputType::GenerateUntil, OutputType::MultipleChoice]),
    known("f1", Aggregation::F1, true, CHOICE),
    known("mcc", Aggregation::Matthews, true, CHOICE),
    known("brier_score", Aggregation::Brier, false, CHOICE),
    known("perplexity", Aggregation::Perplexity, false, LIKELY),
    known("word_perplexity", Aggregation::WeightedPerplexity, false, ROLLING),
    known("byte_perplexity", Aggregation::WeightedPerplexity, false, ROLLING),
    known("bits_per_byte", Aggregation::BitsPerByte, false, ROLLING),
    known("bleu", Aggregation::Bleu, true, TEXT),
    known("chrf", Aggregation::Chrf, true, TEXT),
    known("chrf++", Aggregation::ChrfWords, true, TEXT),
    known("bypass", Aggregation::Bypass, true, &[]),
];

/// Unsupported metrics of lm-eval, with the reason.
const REFUSED: [(&str, &str); 3] = [
    ("ter", "translation error rate is not supported; use bleu, chrf or chrf++"),
    ("likelihood", "lm-eval cannot aggregate it either; use brier_score"),
    ("acc_all", "only the Python task multirc uses it"),
];

const fn known(
    name: &'static str,
    aggregation: Aggregation,
    higher_is_better: bool,
    outputs: &'static [OutputType],
) -> RegisteredMetric {
    RegisteredMetric { name, aggregation, higher_is_better, outputs }
}

/// Reads `metric_list`, or returns lm-eval's default metrics of the output type. `processed` is true for a task with
/// `process_results`.
pub(crate) fn metric_list(
    entry: Option<&TaskEntry>,
    output: OutputType,
    processed: bool,
) -> Result<Vec<MetricConfig>, ConfigError> {
    let Some(entry) = entry else { return Ok(default_metrics(output)) };
    let TaskValue::List(items) = &entry.node.value else { return Err(type_error(entry, "a list of metrics")) };
    items.iter().map(|item| metric(item, output, processed)).collect()
}

/// Returns the metric `bypass`, which `--predict-only` uses.
pub(crate) fn bypass() -> MetricConfig {
    let (kind, aggregation) = (Metric::Bypass, Aggregation::Bypass);
    MetricConfig { name: "bypass".into(), kind, aggregation, higher_is_better: true }
}

fn default_metrics(output: OutputType) -> Vec<MetricConfig> {
    let names: &[&str] = match output {
        OutputType::Loglikelihood => &["perplexity", "acc"],
        OutputType::LoglikelihoodRolling => &["word_perplexity", "byte_perplexity", "bits_per_byte"],
        OutputType::MultipleChoice => &["acc", "acc_norm"],
        OutputType::GenerateUntil => &["exact_match"],
    };
    let find = |name: &&str| KNOWN.iter().find(|known| known.name == *name);
    let config = |known: &RegisteredMetric| MetricConfig {
        name: known.name.into(),
        kind: if output == OutputType::GenerateUntil {
            Metric::ExactMatch(ExactMatch::default())
        } else {
            Metric::ByName
        },
        aggregation: known.aggregation,
        higher_is_better: known.higher_is_better,
    };
    names.iter().filter_map(find).map(config).collect()
}

const KEYS: [&str; 4] = ["metric", "aggregation", "higher_is_better", "hf_evaluate"];

fn metric(node: &TaskNode, output: OutputType, processed: bool) -> Result<MetricConfig, ConfigError> {
    let keys = YamlMap::with_any_keys(node, "a metric")?;
    let entry = keys.get("metric").ok_or_else(|| keys.error("an entry of metric_list needs the key `metric`"))?;
    let function = as_function(entry);
    // The package's exact_match equals lm-eval's own.
    if keys.flag("hf_evaluate", false)? && entry.node.text_or_empty() != "exact_match" {
        return Err(keys.error(
            "hf_evaluate: only exact_match of the package evaluate is supported; its other metrics are Python code",
        ));
    }
    let name = match &function {
        Some(function) => function.name.rsplit('.').next().unwrap_or_default().to_owned(),
        None => keys.required_text("metric")?,
    };
    let known = KNOWN.iter().find(|known| known.name == name);
    let kind = match function {
        Some(function) => Metric::BuiltIn(builtin::generation_metric(&function, &keys)?),
        None if processed => unscored(&keys)?,
        None => scored(&keys, entry, &name, output)?,
    };
    let aggregation = match keys.get("aggregation") {
        Some(entry) => aggregation(entry)?,
        None => known.map(|known| known.aggregation).ok_or_else(|| keys.error(needs(&name, "aggregation")))?,
    };
    let higher_is_better = match known {
        _ if keys.get("higher_is_better").is_some() => keys.flag("higher_is_better", true)?,
        Some(known) => known.higher_is_better,
        None => return Err(keys.error(needs(&name, "higher_is_better"))),
    };
    Ok(MetricConfig { name, kind, aggregation, higher_is_better })
}

fn needs(name: &str, key: &str) -> String {
    format!("the metric {name} has no default {key}; set the key `{key}`")
}

/// Returns an error for metric options of a task with `process_results`, which ignores them.
fn unscored(keys: &YamlMap) -> Result<Metric, ConfigError> {
    keys.deny_unknown(&[&KEYS[..], &exact_match::KEYS].concat())?;
    Ok(Metric::Processed)
}

fn scored(keys: &YamlMap, entry: &TaskEntry, name: &str, output: OutputType) -> Result<Metric, ConfigError> {
    let refuse = |problem: String| ConfigError::at(entry.node.place.clone(), problem);
    if let Some((_, why)) = REFUSED.iter().find(|(refused, _)| *refused == name) {
        return Err(refuse(format!("metric {name}: {why}")));
    }
    let Some(known) = KNOWN.iter().find(|known| known.name == name) else {
        let names: Vec<&str> = KNOWN.iter().map(|known| known.name).collect();
        let near = did_you_mean(name, names.iter().copied());
        return Err(
            refuse(format!("unknown metric {name:?}{near}")).with_remedy(format!("known are {}", names.join(", ")))
        );
    };
    if name == "bypass" {
        return Ok(Metric::Bypass);
    }
    if !known.outputs.contains(&output) {
        let outputs: Vec<&str> = known.outputs.iter().map(|output| output.name()).collect();
        let problem =
            format!("metric {name} cannot score output_type {}; it is for {}", output.name(), outputs.join(", "));
        return Err(refuse(problem));
    }
    if output != OutputType::GenerateUntil {
        keys.deny_unknown(&KEYS)?;
        return Ok(Metric::ByName);
    }
    if name == "exact_match" {
        return Ok(Metric::ExactMatch(ExactMatch::read(keys, &KEYS)?));
    }
    keys.deny_unknown(&KEYS)?;
    Ok(Metric::TextPair)
}

/// Returns lm-eval's default aggregation and `higher_is_better` of a metric.
pub(crate) fn default_aggregation(name: &str) -> Option<(Aggregation, bool)> {
    KNOWN.iter().find(|known| known.name == name).map(|known| (known.aggregation, known.higher_is_better))
}

/// Reads the aggregation of a metric: a name, or a `!function` with a built-in implementation.
fn aggregation(entry: &TaskEntry) -> Result<Aggregation, ConfigError> {
    if let Some(function) = as_function(entry) {
        return builtin::aggregation(&function);
    }
    let TaskValue::Text(name) = &entry.node.value else { return Err(type_error(entry, "the name of an aggregation")) };
    Aggregation::from_name(name).ok_or_else(|| {
        let names = Aggregation::names();
        let near = did_you_mean(name, names);
        let fault = ConfigError::at(entry.node.place.clone(), format!("unknown aggregation {name:?}{near}"));
        fault.with_remedy(format!("known are {}", names.join(", ")))
    })
}
