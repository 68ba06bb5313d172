//! The charts of a run: titles, units, and the metrics that each one shows.

use std::collections::BTreeSet;

use serde::Serialize;

use super::rows::MetricRows;
use super::unit::MetricUnit;

/// Chart of one or more metrics.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Chart {
    /// Title.
    pub title: String,
    /// Unit of all lines.
    pub unit: MetricUnit,
    /// Metrics, the most important first.
    pub lines: Vec<ChartLine>,
}

/// Metric in a chart.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ChartLine {
    /// Name of the metric in metrics.jsonl. The parts of a nested name are joined by `/`.
    pub key: String,
    /// Name in the legend.
    pub label: String,
}

/// Title, unit, and the metrics with their labels.
type ChartEntry = (&'static str, MetricUnit, &'static [(&'static str, &'static str)]);

const LOSS: [ChartEntry; 1] = [("Loss", MetricUnit::Plain, &[("loss", "train"), ("loss/eval", "eval")])];
const OTHERS: [ChartEntry; 12] = [
    ("Learning rate", MetricUnit::Exponent, &[("lr", "learning rate")]),
    ("Gradient norm", MetricUnit::Plain, &[("grad_norm", "before clipping")]),
    ("Throughput, tokens/s", MetricUnit::Count, &[("tokens_per_second", "tokens/s")]),
    ("Step time", MetricUnit::Seconds, &[("step_time", "step")]),
    ("Model FLOPs utilization", MetricUnit::Percent, &[("mfu", "MFU")]),
    ("TFLOPS per rank", MetricUnit::Plain, &[("step_tflops", "TFLOPS")]),
    ("Memory", MetricUnit::Bytes, &[("rss_bytes", "process"), ("gpu_used_bytes", "GPU")]),
    ("Expert balance", MetricUnit::Plain, &[("expert_load/max_over_mean", "busiest expert over mean")]),
    (
        "Expert selections",
        MetricUnit::Percent,
        &[("expert_load/entropy", "entropy"), ("expert_load/unused", "unused"), ("expert_load/dropped", "dropped")],
    ),
    ("Loss scale", MetricUnit::Count, &[("loss_scale", "loss scale")]),
    ("Zero gradients", MetricUnit::Count, &[("num_zeros", "elements")]),
    ("GPU energy per step, joules", MetricUnit::Plain, &[("gpu_energy_joules", "joules")]),
];

/// Number of charts of task metrics. The table of results has all metrics.
const MOST_TASK_CHARTS: usize = 12;

/// Returns the charts that have a point in one of the runs.
pub fn charts<'r>(runs: impl IntoIterator<Item = &'r MetricRows>) -> Vec<Chart> {
    let names: BTreeSet<&str> = runs.into_iter().flat_map(MetricRows::names).collect();
    let group = |prefix: &str| {
        let named = names.iter().filter_map(|name| Some((*name, name.strip_prefix(prefix)?)));
        named.map(|(name, label)| ChartLine { key: name.to_owned(), label: label.to_owned() }).collect::<Vec<_>>()
    };
    let fixed = |entry: &ChartEntry| {
        let (title, unit, lines) = *entry;
        let known = lines.iter().filter(|(key, _)| names.contains(key));
        let line = |(key, label): &(&str, &str)| ChartLine { key: (*key).to_owned(), label: (*label).to_owned() };
        Chart { title: title.to_owned(), unit, lines: known.map(line).collect() }
    };
    let auxiliary =
        Chart { title: "Auxiliary losses".into(), unit: MetricUnit::Plain, lines: group("auxiliary_losses/") };
    let is_value = |line: &ChartLine| !line.label.split(',').next().unwrap_or_default().ends_with("_stderr");
    let tasks = group("eval/").into_iter().filter(is_value).take(MOST_TASK_CHARTS);
    let task = |line: ChartLine| Chart {
        title: line.label.replacen('/', ": ", 1),
        unit: MetricUnit::Plain,
        lines: vec![line],
    };
    let all = LOSS.iter().map(fixed).chain([auxiliary]).chain(OTHERS.iter().map(fixed)).chain(tasks.map(task));
    all.filter(|chart| !chart.lines.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(lines: &[&str], want: &[(&str, &[&str])]) {
        let mut rows = MetricRows::default();
        lines.iter().for_each(|line| rows.push(line.as_bytes()));
        let found = charts([&rows]);
        let found: Vec<(&str, Vec<&str>)> = found
            .iter()
            .map(|chart| (chart.title.as_str(), chart.lines.iter().map(|line| line.key.as_str()).collect()))
            .collect();
        let want: Vec<(&str, Vec<&str>)> = want.iter().map(|(title, keys)| (*title, keys.to_vec())).collect();
        assert_eq!(found, want);
    }

    #[test]
    fn a_chart_without_data_is_left_out() {
        check(&[], &[]);
        check(&[r#"{"iter":1,"loss":1.0,"tokens":5}"#], &[("Loss", &["loss"])]);
        check(&[r#"{"iter":1,"loss/eval":1.0}"#], &[("Loss", &["loss/eval"])]);
    }

    #[test]
    fn losses_by_name_and_task_metrics_have_charts() {
        check(
            &[
                r#"{"iter":1,"loss":1.0,"auxiliary_losses":{"a":1.0,"b":1.0}}"#,
                r#"{"iter":1,"eval/piqa/acc":0.5,"eval/piqa/acc_stderr":0.5,"eval_time":1.0}"#,
            ],
            &[
                ("Loss", &["loss"]),
                ("Auxiliary losses", &["auxiliary_losses/a", "auxiliary_losses/b"]),
                ("piqa: acc", &["eval/piqa/acc"]),
            ],
        );
    }
}
