//! Histogram of a task's documents. The axis is the log-probability margin between the correct choice
//! and the likeliest wrong one, else the log-likelihood, else the score.

use serde::Serialize;
use serde_json::Value as Json;

use super::interval::round_up;
use crate::task::{MetricValue, SampleRecord, TaskScores};

/// Bars over a line of values. Places are parts of 100 of the width and of the height.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Histogram {
    title: String,
    bars: Vec<Bar>,
    /// The numbers under the line: place and text.
    ticks: Vec<(f64, String)>,
    /// How many documents the highest bar stands for.
    most: usize,
    /// Documents without a number.
    n_without: usize,
}

#[derive(Debug, PartialEq, Serialize)]
struct Bar {
    x: f64,
    width: f64,
    height: f64,
    /// What side of zero it is on, where that means right and wrong.
    kind: &'static str,
    label: String,
}

/// What is counted.
struct Measure {
    title: String,
    values: Vec<Option<f64>>,
    /// Whether what is above zero is right and what is below is wrong.
    is_margin: bool,
}

/// Bars are as wide as a round number of which at most so many are needed.
const MOST_BARS: f64 = 32.0;
const FEWEST_BARS: f64 = 9.0;

impl Histogram {
    /// Counts a task's documents by its first filter; `None` if nothing about them is a number.
    pub(super) fn of(scores: &TaskScores) -> Option<Self> {
        let filter = &scores.samples.first()?.filter;
        let samples: Vec<&SampleRecord> = scores.samples.iter().filter(|sample| sample.filter == *filter).collect();
        let measure = measures(&samples).into_iter().find(|measure| measure.values.iter().any(Option::is_some))?;
        Some(Self::counting(&measure))
    }

    fn counting(Measure { title, values, is_margin }: &Measure) -> Self {
        let known: Vec<f64> = values.iter().flatten().copied().collect();
        let (low, high) = known.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(*v), h.max(*v)));
        let spread = if high > low { (high - low) / (MOST_BARS - 2.0) } else { low.abs() };
        let width = if spread > 0.0 { round_up(spread) } else { 1.0 };
        // Zero is the border of two bars. Few bars have room around them.
        let n_needed = (high / width).floor() - (low / width).floor() + 1.0;
        let n_around = ((FEWEST_BARS - n_needed) / 2.0).max(0.0).floor();
        let first = (low / width).floor() - n_around;
        let bin = |value: f64| (value / width).floor() - first;
        let n_bins = (n_needed + 2.0 * n_around) as usize;
        let mut counts = vec![0; n_bins];
        known.iter().for_each(|value| counts[bin(*value) as usize] += 1);
        let most = counts.iter().copied().max().unwrap_or(0);
        let edge = |i: usize| (first + i as f64) * width;
        let place = |i: usize| 100.0 * i as f64 / n_bins as f64;
        let decimals = (-width.log10().floor()).max(0.0) as usize;
        let bar = |(i, n): (usize, &usize)| Bar {
            x: place(i),
            width: 100.0 / n_bins as f64,
            height: 100.0 * *n as f64 / most as f64,
            kind: if !is_margin {
                "plain"
            } else if edge(i) < 0.0 {
                "wrong"
            } else {
                "right"
            },
            label: format!("{:.decimals$} to {:.decimals$}: {n}", edge(i), edge(i + 1)),
        };
        let every = n_bins.div_ceil(6);
        let tick = |i: usize| (place(i), format!("{:.decimals$}", edge(i) + 0.0));
        Self {
            title: title.clone(),
            bars: counts.iter().enumerate().filter(|(_, n)| **n > 0).map(bar).collect(),
            ticks: (0..=n_bins).filter(|i| (first as i64 + *i as i64) % every as i64 == 0).map(tick).collect(),
            most,
            n_without: values.len() - known.len(),
        }
    }
}

fn measures(samples: &[&SampleRecord]) -> Vec<Measure> {
    let of_all = |title: String, is_margin, value: &dyn Fn(&SampleRecord) -> Option<f64>| {
        let values = samples.iter().map(|sample| value(sample).filter(|value| value.is_finite())).collect();
        Measure { title, values, is_margin }
    };
    let margin = "log-likelihood of the right choice less that of the likeliest wrong one".to_owned();
    let per_part = "log-likelihood per byte or word of a text, in nats".to_owned();
    let mut all = vec![of_all(margin, true, &margin_of), of_all(per_part, false, &likelihood_per_part)];
    if let Some(first) = samples.first() {
        for (i, (metric, _)) in first.metrics.iter().enumerate() {
            // What a perplexity is the mean of.
            let title = if metric == "perplexity" { "log-likelihood of the answer, in nats" } else { metric.as_str() };
            all.push(of_all(title.to_owned(), false, &|sample| sample.metrics.get(i)?.1.number()));
        }
    }
    all
}

/// By how much the likeliest right choice is likelier than the likeliest wrong one; negative if it is not.
fn margin_of(sample: &SampleRecord) -> Option<f64> {
    let choices = sample.choices.as_ref()?;
    let answers = sample.resps.as_array()?;
    let best = |is_right: bool| {
        let own = (0..choices.n).filter(|i| choices.right.contains(i) == is_right);
        own.filter_map(|i| logprob(answers.get(i)?)).reduce(f64::max)
    };
    Some(best(true)? - best(false)?)
}

/// The number in an answer as records list it: `[["-1.5", "True"]]`.
pub(super) fn logprob(answer: &Json) -> Option<f64> {
    let first = answer.get(0)?;
    first.get(0).unwrap_or(first).as_str()?.parse().ok()
}

/// The pair of a text's log-likelihood and its length that perplexities are made of.
fn likelihood_per_part(sample: &SampleRecord) -> Option<f64> {
    sample.metrics.iter().find_map(|(_, score)| match score {
        MetricValue::List(pair) => match pair.as_slice() {
            [MetricValue::Number(logprob), MetricValue::Count(n)] if *n > 0 => Some(logprob / *n as f64),
            _ => None,
        },
        _ => None,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::task::ChoiceTargets;

    fn sample(resps: Json, right: &[usize], metrics: Vec<(String, MetricValue)>) -> SampleRecord {
        let n = resps.as_array().map_or(0, Vec::len);
        let [target, filter, doc_hash, prompt_hash, target_hash] = ["t", "none", "a", "b", "c"].map(str::to_owned);
        SampleRecord {
            doc_id: 0,
            doc: serde_json::Map::new(),
            target,
            arguments: Vec::new(),
            filtered_resps: resps.clone(),
            resps,
            filter,
            doc_hash,
            prompt_hash,
            target_hash,
            metrics,
            choices: Some(ChoiceTargets { n, right: right.to_vec() }).filter(|choices| choices.n > 1),
        }
    }

    fn scores(samples: Vec<SampleRecord>) -> TaskScores {
        let counts = crate::task::DocCounts::default();
        TaskScores { metrics: Vec::new(), sample_len: samples.len(), original: samples.len(), counts, samples }
    }

    #[test]
    fn a_margin_is_over_the_likeliest_wrong_choice() {
        let resps = json!([[["-1.5", "True"]], [["-4.0", "False"]], [["-3.0", "False"]]]);
        let margin = |right: &[usize]| margin_of(&sample(resps.clone(), right, Vec::new()));
        assert_eq!([margin(&[0]), margin(&[1]), margin(&[1, 2])], [Some(1.5), Some(-2.5), Some(-1.5)]);
        assert_eq!([margin(&[]), margin(&[0, 1, 2])], [None, None]);
    }

    #[test]
    fn zero_parts_the_bars() {
        let with = |gap: f64| sample(json!([[["0.0", "True"]], [[gap.to_string(), "False"]]]), &[0], Vec::new());
        let gaps = [0.1, 0.2, -0.1, -2.9, -3.0, f64::NEG_INFINITY];
        let histogram = Histogram::of(&scores(gaps.map(with).to_vec())).unwrap();
        let kinds: Vec<&str> = histogram.bars.iter().map(|bar| bar.kind).collect();
        assert_eq!(kinds, ["wrong", "right", "right", "right"], "{histogram:?}");
        assert_eq!((histogram.most, histogram.n_without), (2, 1));
        assert!(histogram.ticks.iter().any(|(_, text)| text == "0.0"), "{:?}", histogram.ticks);
    }

    #[test]
    fn one_value_is_one_bar() {
        for value in [0.0, 1.0, -3.0] {
            let metrics = vec![("acc".to_owned(), MetricValue::Number(value))];
            let histogram = Histogram::of(&scores(vec![sample(json!([["text"]]), &[], metrics)])).unwrap();
            assert_eq!((histogram.title.as_str(), histogram.bars.len()), ("acc", 1), "{value}");
        }
        let texts = vec![("exact".to_owned(), MetricValue::Text("a".into()))];
        assert_eq!(Histogram::of(&scores(vec![sample(json!([["text"]]), &[], texts)])), None);
        assert_eq!(Histogram::of(&scores(Vec::new())), None);
    }
}
