//! Final and best values of a run.

use serde::Serialize;

use super::history::RunHistory;
use super::rows::MetricPoint;
use super::unit::MetricUnit;

/// Final and best values of a run, in the order of a table.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct HistorySummary(pub Vec<SummaryNumber>);

/// Final or best value of a metric.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SummaryNumber {
    /// Name, equal in all runs.
    pub key: String,
    /// Name for people.
    pub label: String,
    /// Unit.
    pub unit: MetricUnit,
    /// Better direction, if there is one.
    pub better: Option<BetterValue>,
    /// Value.
    pub value: f64,
    /// Step of the value, if it belongs to one.
    pub step: Option<u64>,
}

/// Better direction of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum BetterValue {
    /// A lower value is better.
    Lower,
    /// A higher value is better.
    Higher,
}

/// Records over whose losses the final train loss is a mean.
const LAST_RECORDS: usize = 10;

impl HistorySummary {
    /// Summarizes a run.
    pub fn of(run: &RunHistory) -> Self {
        let mut summary = Self::default();
        summary.add_progress(run);
        summary.add_losses(run);
        summary.add_speed(run);
        summary.add_experts_and_tasks(run);
        summary
    }

    /// Returns the value with this key.
    pub fn get(&self, key: &str) -> Option<&SummaryNumber> {
        self.0.iter().find(|number| number.key == key)
    }

    fn add_progress(&mut self, run: &RunHistory) {
        let axis = run.rows.axis();
        let positive = |values: &[f64]| values.last().copied().filter(|value| *value > 0.0);
        self.add(number("steps", "Steps", MetricUnit::Integer), Some(run.steps_done() as f64));
        // run.json also counts the tokens of the steps that are not recorded.
        let exact = run.saved.as_ref().and_then(|saved| saved.number("/ledger/seen/read/tokens"));
        let tokens = exact.filter(|tokens| *tokens > 0.0).or(positive(&axis.tokens));
        self.add(number("tokens", "Tokens trained on", MetricUnit::Count), tokens);
        let time = number("training_seconds", "Training time, without evaluations", MetricUnit::Seconds);
        self.add(time, positive(&axis.seconds));
    }

    fn add_losses(&mut self, run: &RunHistory) {
        let evals = run.rows.series("loss/eval");
        self.add_point(plain("eval_loss", "Eval loss, final").lower(), evals.last());
        self.add_point(plain("eval_loss_best", "Eval loss, best").lower(), lowest(evals));
        let losses = run.rows.series("loss");
        let last: Vec<f64> = finite(losses).rev().take(LAST_RECORDS).map(|point| point.value).collect();
        let mean = (!last.is_empty()).then(|| last.iter().sum::<f64>() / last.len() as f64);
        self.add(plain("train_loss", &format!("Train loss, mean of last {LAST_RECORDS} records")).lower(), mean);
        self.add_point(plain("train_loss_last", "Train loss, last step"), losses.last());
        for name in run.rows.names().filter(|name| name.starts_with("auxiliary_losses/")) {
            let label = format!("{}, last step", name.trim_start_matches("auxiliary_losses/"));
            self.add_point(plain(name, &label), run.rows.series(name).last());
        }
        let positive = |value: f64| (value > 0.0).then_some(value);
        let n_not_finite = positive((losses.len() - finite(losses).count()) as f64);
        self.add(number("losses_not_finite", "Losses that are not finite", MetricUnit::Integer).lower(), n_not_finite);
        let skipped = run.saved.as_ref().and_then(|saved| saved.number("/skipped_steps")).and_then(positive);
        self.add(number("skipped_steps", "Skipped steps", MetricUnit::Integer).lower(), skipped);
        let norms = run.rows.series("grad_norm");
        self.add_point(plain("grad_norm_highest", "Gradient norm, highest"), highest(norms));
        self.add_point(plain("grad_norm", "Gradient norm, last step"), norms.last());
    }

    fn add_speed(&mut self, run: &RunHistory) {
        let axis = run.rows.axis();
        let rate = axis.tokens.last().zip(axis.seconds.last()).map(|(tokens, seconds)| tokens / seconds);
        let rate = rate.filter(|rate| rate.is_finite() && *rate > 0.0);
        self.add(number("tokens_per_second", "Throughput, mean, tokens/s", MetricUnit::Count).higher(), rate);
        let time = median(run.rows.series("step_time"));
        self.add(number("step_time", "Step time, median", MetricUnit::Seconds).lower(), time);
        let mfu = median(run.rows.series("mfu"));
        self.add(number("mfu", "Model FLOPs utilization, median", MetricUnit::Percent).higher(), mfu);
        for (key, name, label) in [
            ("peak_rss_bytes", "peak_rss_bytes", "Memory of the process, peak"),
            ("peak_gpu_bytes", "gpu_used_bytes", "GPU memory, highest"),
        ] {
            let value = highest(run.rows.series(name)).map(|point| point.value);
            self.add(number(key, label, MetricUnit::Bytes).lower(), value);
        }
    }

    fn add_experts_and_tasks(&mut self, run: &RunHistory) {
        let last = |name: &str| run.rows.series(name).last();
        let balance = plain("expert_balance", "Busiest expert over mean, last step").lower();
        self.add_point(balance, last("expert_load/max_over_mean"));
        let unused = number("experts_unused", "Experts without tokens, last step", MetricUnit::Percent).lower();
        self.add_point(unused, last("expert_load/unused"));
        for name in run.rows.names().filter(|name| name.starts_with("eval/")) {
            let label = name.trim_start_matches("eval/").replacen('/', ": ", 1);
            self.add_point(plain(name, &label), last(name));
        }
    }

    fn add(&mut self, number: SummaryNumber, value: Option<f64>) {
        self.0.extend(value.map(|value| SummaryNumber { value, ..number }));
    }

    fn add_point(&mut self, number: SummaryNumber, point: Option<&MetricPoint>) {
        let step = point.map(|point| point.step);
        self.add(SummaryNumber { step, ..number }, point.map(|point| point.value));
    }
}

/// Returns a number without a value.
fn number(key: &str, label: &str, unit: MetricUnit) -> SummaryNumber {
    SummaryNumber { key: key.to_owned(), label: label.to_owned(), unit, better: None, value: f64::NAN, step: None }
}

fn plain(key: &str, label: &str) -> SummaryNumber {
    number(key, label, MetricUnit::Plain)
}

impl SummaryNumber {
    fn lower(self) -> Self {
        Self { better: Some(BetterValue::Lower), ..self }
    }

    fn higher(self) -> Self {
        Self { better: Some(BetterValue::Higher), ..self }
    }

    /// Returns the value in words, with the step of a best value.
    pub fn text(&self) -> String {
        let is_best = self.key.ends_with("_best") || self.key.ends_with("_highest");
        let step = self.step.filter(|_| is_best).map_or_else(String::new, |step| format!(" (step {step})"));
        self.unit.format(self.value) + &step
    }

    /// Returns true if the value is better than another one of the same metric.
    pub fn is_better_than(&self, other: f64) -> bool {
        match self.better {
            Some(BetterValue::Lower) => self.value < other,
            Some(BetterValue::Higher) => self.value > other,
            None => false,
        }
    }
}

fn finite(points: &[MetricPoint]) -> impl DoubleEndedIterator<Item = &MetricPoint> {
    points.iter().filter(|point| point.value.is_finite())
}

fn lowest(points: &[MetricPoint]) -> Option<&MetricPoint> {
    finite(points).min_by(|a, b| a.value.total_cmp(&b.value))
}

fn highest(points: &[MetricPoint]) -> Option<&MetricPoint> {
    finite(points).rev().max_by(|a, b| a.value.total_cmp(&b.value))
}

fn median(points: &[MetricPoint]) -> Option<f64> {
    let mut values: Vec<f64> = finite(points).map(|point| point.value).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}
