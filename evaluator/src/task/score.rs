//! Scoring: filters, per-document metrics and aggregation.

use std::collections::BTreeMap;

use serde_json::Value as Json;

use super::builtin::count_words;
use super::error::TaskError;
use super::field::as_index;
use super::instance::{Instance, Task, is_empty};
use super::instance_responses::InstanceResponses;
use super::metric::{Aggregation, Metric, MetricConfig, MetricValue, stderr};
use super::output_type::OutputType;
use super::prompt::PromptOptions;
use super::python::{repr, text};
use super::response_value::ResponseValue;
use super::sample::{ChoiceTargets, SampleRecord};
use super::unsafe_code::UnsafeCodePolicy;
use candlewick_inference::request::Response;

/// Scores of one task.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskScores {
    /// Aggregate of each metric and filter.
    pub metrics: Vec<MetricScore>,
    /// Sample records, one for each document and filter.
    pub samples: Vec<SampleRecord>,
    /// Number of scored documents (lm-eval's `effective`).
    pub sample_len: usize,
    /// Number of documents in the split (lm-eval's `original`).
    pub original: usize,
    /// Numbers of documents that were skipped, are empty, or have no correct choice.
    pub counts: DocCounts,
}

/// Numbers of documents that were skipped, are empty, or have no correct choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct DocCounts {
    /// Number of documents without text to score, which were skipped.
    pub skipped: usize,
    /// Number of documents without text to score, which were scored as in lm-eval.
    pub empty: usize,
    /// Number of documents without a correct choice.
    pub no_target: usize,
}

/// Aggregate of one metric over all documents, for one filter.
#[derive(Clone, Debug, PartialEq)]
pub struct MetricScore {
    /// Metric name.
    pub metric: String,
    /// Filter name.
    pub filter: String,
    /// Aggregate value.
    pub value: f64,
    /// Standard error; `None` if unknown.
    pub stderr: Option<f64>,
    /// Number of documents with a value.
    pub n: usize,
    /// True if a higher value is better; `None` if unknown.
    pub higher_is_better: Option<bool>,
}

/// Metrics of multiple-choice tasks, in lm-eval's order.
const CHOICE_METRICS: [&str; 8] =
    ["acc", "f1", "mcc", "acc_norm", "acc_bytes", "exact_match", "brier_score", "acc_mutual_info"];

/// Metric names and values of one document.
type Scored = Vec<(String, MetricValue)>;

impl Task {
    /// Scores the responses to [`Task::instances`], in the same order. Standard errors without a formula use
    /// `n_resamples` bootstrap resamples.
    pub fn score(
        &self,
        options: &PromptOptions,
        instances: &[Instance],
        responses: &[Response],
        n_resamples: usize,
    ) -> Result<TaskScores, TaskError> {
        self.config.check_unsafe_code(options.unsafe_code)?;
        if instances.len() != responses.len() {
            let problem = format!("there are {} responses to {} requests", responses.len(), instances.len());
            return Err(self.unscored(problem));
        }
        let asked = InstanceResponses::group(instances, responses);
        let kwargs = self.generation_kwargs(options);
        let mut samples = Vec::new();
        let mut values: Vec<(String, String, Vec<MetricValue>)> = Vec::new();
        for filter in &self.config.filters {
            for (doc_id, requests) in &asked {
                let doc = &self.docs()[*doc_id];
                let document_error = |problem| self.document_error(*doc_id, problem);
                let apply = |request: &InstanceResponses| filter.apply(request.answers.clone(), doc);
                let filtered = requests.iter().map(apply).collect::<Result<Vec<_>, _>>().map_err(document_error)?;
                let scored = self.process(*doc_id, &filtered, options.unsafe_code).map_err(document_error)?;
                let target = self.target(*doc_id)?;
                let (name, choices) = (&filter.name, self.correct_choices(*doc_id)?);
                samples.push(SampleRecord::new(
                    *doc_id, doc, &target, requests, &kwargs, &filtered, name, &scored, choices,
                ));
                for (metric, score) in scored {
                    match values.iter_mut().find(|(m, f, _)| *m == metric && *f == filter.name) {
                        Some((_, _, scores)) => scores.push(score),
                        None => values.push((metric, filter.name.clone(), vec![score])),
                    }
                }
            }
        }
        let metrics =
            values.into_iter().map(|(metric, filter, scores)| self.aggregate(metric, filter, &scores, n_resamples));
        let metrics = metrics.collect::<Result<Vec<_>, _>>()?;
        let n_asked = self.doc_ids(options)?.len();
        Ok(TaskScores {
            sample_len: metrics.iter().map(|metric| metric.n).max().unwrap_or(0),
            metrics,
            samples,
            original: self.docs().len(),
            counts: self.counts(&asked, n_asked)?,
        })
    }

    fn unscored(&self, problem: String) -> TaskError {
        TaskError::Score { task: self.config.task.clone(), problem }
    }

    fn aggregate(
        &self,
        metric: String,
        filter: String,
        scores: &[MetricValue],
        n_resamples: usize,
    ) -> Result<MetricScore, TaskError> {
        let config = self.metric_of(&metric);
        let aggregation = config.map_or(Aggregation::Mean, |config| config.aggregation);
        let fail = |problem| self.unscored(format!("metric {metric}: {problem}"));
        let value = aggregation.aggregate(scores).map_err(fail)?;
        let stderr = stderr(aggregation, scores, n_resamples).map_err(fail)?;
        let higher_is_better = config.map(|config| config.higher_is_better);
        Ok(MetricScore { metric, filter, value, stderr, n: scores.len(), higher_is_better })
    }

    /// Returns the configuration of a metric. Names such as `pass@1` belong to the task's built-in metric.
    fn metric_of(&self, name: &str) -> Option<&MetricConfig> {
        let own = self.config.metrics.iter().find(|metric| metric.name == name);
        own.or_else(|| self.config.metrics.iter().find(|metric| matches!(metric.kind, Metric::BuiltIn(_))))
    }

    fn process(&self, doc_id: usize, answers: &[ResponseValue], policy: UnsafeCodePolicy) -> Result<Scored, String> {
        let doc = &self.docs()[doc_id];
        if let Some(process) = self.process_results {
            return process(doc, answers);
        }
        match (self.config.output_type, answers) {
            (OutputType::Loglikelihood, [ResponseValue::Loglikelihood(logprob, is_greedy)]) => Ok(self
                .values_in_order(&["perplexity", "acc"], |name| match name {
                    "perplexity" => Some(MetricValue::Number(*logprob)),
                    "acc" => Some(MetricValue::Count(i64::from(*is_greedy))),
                    _ => None,
                })),
            (OutputType::LoglikelihoodRolling, [ResponseValue::Rolling(logprob)]) => {
                let target = repr::str(&self.doc_to_target.target(doc, self.doc_to_choice.is_some())?);
                let (n_words, n_bytes) = (count_words(&target)?, target.len());
                let weighted =
                    |n: usize| Some(MetricValue::pair(MetricValue::Number(*logprob), MetricValue::Count(n as i64)));
                let order = ["word_perplexity", "byte_perplexity", "bits_per_byte"];
                Ok(self.values_in_order(&order, |name| match name {
                    "word_perplexity" => weighted(n_words),
                    "byte_perplexity" | "bits_per_byte" => weighted(n_bytes),
                    _ => None,
                }))
            }
            (OutputType::MultipleChoice, answers) => self.choose(doc_id, answers),
            (OutputType::GenerateUntil, [answer]) => self.compare(doc_id, answer, policy),
            _ => Err("the filters' results do not match the output type; end each filter with take_first".into()),
        }
    }

    /// Returns the values of the task's metrics, in lm-eval's order.
    fn values_in_order(&self, order: &[&str], value: impl Fn(&str) -> Option<MetricValue>) -> Scored {
        let has = |name: &&&str| self.config.metrics.iter().any(|metric| metric.name == **name);
        order.iter().filter(has).filter_map(|name| Some(((*name).to_owned(), value(name)?))).collect()
    }

    /// Scores a multiple-choice document. The prediction is the likeliest choice, and the first of several equal
    /// ones.
    fn choose(&self, doc_id: usize, answers: &[ResponseValue]) -> Result<Scored, String> {
        let doc = &self.docs()[doc_id];
        let choices = self.doc_to_choice.as_ref().map(|reader| reader.choices(doc)).transpose()?.unwrap_or_default();
        let likely = |answer: &ResponseValue| match answer {
            ResponseValue::Loglikelihood(logprob, is_greedy) => Ok((*logprob, *is_greedy)),
            _ => Err("a response is not a log-probability; end each filter with take_first".to_owned()),
        };
        let answers = answers.iter().map(likely).collect::<Result<Vec<_>, _>>()?;
        let is_mutual =
            answers.len() == 2 * choices.len() && self.config.metrics.iter().any(|m| m.name == "acc_mutual_info");
        let (asked, alone) = answers.split_at(if is_mutual { choices.len() } else { answers.len() });
        let logprobs: Vec<f64> = asked.iter().map(|(logprob, _)| *logprob).collect();
        let gold = self.gold(doc_id, &choices)?;
        let by_length = |length: fn(&str) -> usize| {
            let per = |(logprob, choice): (&f64, &String)| logprob / length(choice) as f64;
            gold.holds(likeliest(logprobs.iter().zip(&choices).map(per)))
        };
        let guess = likeliest(logprobs.iter().copied());
        Ok(self.values_in_order(&CHOICE_METRICS, |name| {
            Some(match name {
                "acc" => MetricValue::from_bool(gold.holds(guess)),
                "acc_norm" => MetricValue::from_bool(by_length(text::len)),
                "acc_bytes" => MetricValue::from_bool(by_length(str::len)),
                "acc_mutual_info" => {
                    let gains = asked.iter().zip(alone).map(|((with, _), (without, _))| with - without);
                    MetricValue::from_bool(gold.holds(likeliest(gains)))
                }
                "exact_match" => {
                    MetricValue::Count(i64::from(gold.any(|at| asked.get(at).is_some_and(|(_, greedy)| *greedy))))
                }
                "f1" | "mcc" => MetricValue::pair(gold.to_metric_value(), MetricValue::Count(guess as i64)),
                // The Brier score needs exactly one correct choice.
                "brier_score" => match gold {
                    Gold::One(Some(_)) => MetricValue::pair(gold.to_metric_value(), probabilities(&logprobs)),
                    _ => return None,
                },
                _ => return None,
            })
        }))
    }

    fn gold(&self, doc_id: usize, choices: &[String]) -> Result<Gold, String> {
        let doc = &self.docs()[doc_id];
        let target = match self.has_several_inputs {
            true => self.doc_to_text.text(doc, true)?,
            false => self.doc_to_target.target(doc, true)?,
        };
        let index = |target: &Json| match (as_index(target), target.as_str()) {
            (Some(at), _) => usize::try_from(at).ok().filter(|at| *at < choices.len()),
            (None, Some(text)) => choices.iter().position(|choice| choice == text),
            _ => None,
        };
        Ok(match (&target, self.has_several_targets) {
            (Json::Array(list), true) => Gold::Any(list.iter().filter_map(index).collect()),
            (Json::Array(_), false) => return Err("the target is a list, but the first document's is not".into()),
            (target, _) => Gold::One(index(target)),
        })
    }

    /// Scores a generated text against the target.
    fn compare(&self, doc_id: usize, answer: &ResponseValue, policy: UnsafeCodePolicy) -> Result<Scored, String> {
        let doc = &self.docs()[doc_id];
        let target = self.doc_to_target.target(doc, self.doc_to_choice.is_some())?;
        let choices = self.doc_to_choice.as_ref().map(|reader| reader.choices(doc)).transpose()?;
        let targets = match (choices, &target) {
            (Some(choices), target) => vec![chosen(&choices, target)?],
            (None, Json::Array(list)) if self.has_several_targets => list.iter().map(repr::str).collect(),
            (None, target) => vec![repr::str(target)],
        };
        let mut scored = Vec::new();
        for metric in &self.config.metrics {
            let one = |score| vec![(metric.name.clone(), score)];
            scored.extend(match (&metric.kind, answer) {
                (Metric::Bypass, _) => one(MetricValue::None),
                (Metric::BuiltIn(metric), answer) => metric.score(&targets[0], answer, policy)?,
                (_, ResponseValue::Many(_)) => {
                    return Err("a filter returns several responses; end it with take_first".into());
                }
                (Metric::ExactMatch(exact), answer) => {
                    let mut is_match = false;
                    for target in &targets {
                        is_match |= exact.is_match(&plain(answer), target)?;
                    }
                    one(MetricValue::from_bool(is_match))
                }
                (Metric::TextPair, answer) => {
                    let [target] = targets.as_slice() else {
                        return Err(format!(
                            "the metric {} supports a single target, but there are several",
                            metric.name
                        ));
                    };
                    one(MetricValue::pair(MetricValue::Text(target.clone()), MetricValue::Text(plain(answer))))
                }
                (Metric::ByName | Metric::Processed, _) => Vec::new(),
            });
        }
        Ok(scored)
    }

    fn counts(&self, asked: &BTreeMap<usize, Vec<InstanceResponses>>, n_asked: usize) -> Result<DocCounts, TaskError> {
        let mut counts = DocCounts { skipped: n_asked - asked.len(), ..DocCounts::default() };
        for (doc_id, requests) in asked {
            counts.empty += usize::from(requests.iter().all(|asked| is_empty(&asked.instance.request)));
            let choices = self.correct_choices(*doc_id)?;
            counts.no_target += usize::from(choices.is_some_and(|choices| choices.correct.is_empty()));
        }
        Ok(counts)
    }

    /// Returns the correct choices; `None` if the task has no choices or scores with `process_results`.
    fn correct_choices(&self, doc_id: usize) -> Result<Option<ChoiceTargets>, TaskError> {
        let is_choice = self.config.output_type == OutputType::MultipleChoice && self.process_results.is_none();
        let Some(choices) = self.choices(doc_id)?.filter(|_| is_choice) else { return Ok(None) };
        let gold = self.gold(doc_id, &choices).map_err(|problem| self.document_error(doc_id, problem))?;
        Ok(Some(ChoiceTargets { n_choices: choices.len(), correct: gold.indices() }))
    }
}

/// Indices of the correct choices: one at most, or several of which any counts.
enum Gold {
    One(Option<usize>),
    Any(Vec<usize>),
}

impl Gold {
    fn holds(&self, guess: usize) -> bool {
        self.any(|at| at == guess)
    }

    fn any(&self, is: impl Fn(usize) -> bool) -> bool {
        match self {
            Self::One(gold) => gold.is_some_and(is),
            Self::Any(golds) => golds.iter().any(|at| is(*at)),
        }
    }

    fn indices(&self) -> Vec<usize> {
        match self {
            Self::One(gold) => gold.iter().copied().collect(),
            Self::Any(golds) => golds.clone(),
        }
    }

    /// Returns the indices as sample records list them: -100 if there is no correct choice, as in lm-eval.
    fn to_metric_value(&self) -> MetricValue {
        match self {
            Self::One(gold) => MetricValue::Count(gold.map_or(-100, |at| at as i64)),
            Self::Any(golds) => MetricValue::List(golds.iter().map(|at| MetricValue::Count(*at as i64)).collect()),
        }
    }
}

/// Returns the index of the first maximum.
fn likeliest(values: impl Iterator<Item = f64>) -> usize {
    let larger = |best: (usize, f64), (at, value): (usize, f64)| {
        // As in numpy, NaN is the maximum.
        if value > best.1 || value.is_nan() && !best.1.is_nan() { (at, value) } else { best }
    };
    let mut values = values.enumerate();
    let first = values.next().unwrap_or((0, f64::NEG_INFINITY));
    values.fold(first, larger).0
}

fn probabilities(logprobs: &[f64]) -> MetricValue {
    let most = logprobs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let powers: Vec<f64> = logprobs.iter().map(|logprob| (logprob - most).exp()).collect();
    let sum: f64 = powers.iter().sum();
    MetricValue::List(powers.iter().map(|power| MetricValue::Number(power / sum)).collect())
}

fn chosen(choices: &[String], target: &Json) -> Result<String, String> {
    let at = as_index(target).and_then(|at| usize::try_from(at).ok());
    at.and_then(|at| choices.get(at).cloned())
        .ok_or_else(|| format!("the target {target} is not one of the {} choices", choices.len()))
}

fn plain(answer: &ResponseValue) -> String {
    match answer {
        ResponseValue::Value(value) => repr::str(value),
        other => other.text().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_the_likeliest_is_taken() {
        assert_eq!(likeliest([-2.0, -1.0, -1.0].into_iter()), 1);
        assert_eq!(likeliest([f64::NEG_INFINITY, f64::NEG_INFINITY].into_iter()), 0);
        assert_eq!(likeliest([-1.0, f64::NAN, 2.0].into_iter()), 1);
    }
}
