//! `evaluator compare`: compares two runs, sample by sample.

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow};
use candlewick_text::files::write_atomically;
use candlewick_text::quantity::counted;
use clap::Args;

use crate::results::{Comparison, IntervalMethod, MetricDifference, SkippedMetric, compare, comparison_page};
use candlewick_runtime::exit::ExitCode;
use candlewick_runtime::terminal::print_line;

#[derive(Debug, Args)]
pub(super) struct CompareArgs {
    /// First run: a folder with samples_*.jsonl, or one such file
    a: PathBuf,
    /// Second run
    b: PathBuf,
    /// Fail with exit code 1 if a metric improves by less than CHANGE, such as acc=-0.01. Samples, filters and tasks of
    /// one run only fail too. For a metric where lower is better, a decrease is an improvement
    #[arg(long, alias = "fail_below", value_name = "[TASK:]METRIC=CHANGE")]
    fail_below: Vec<MinChange>,
    /// Apply --fail-below to the paired samples, even if one run has further samples, filters or tasks
    #[arg(long, alias = "allow_unpaired", requires = "fail_below")]
    allow_unpaired: bool,
    /// Maximum number of flipped samples listed for each metric
    #[arg(long, default_value_t = 20, value_name = "N")]
    flips: usize,
    /// Print the comparison as JSON
    #[arg(long)]
    json: bool,
    /// Also write the comparison as an HTML page
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Lower bound on a metric's improvement, from `--fail-below`.
#[derive(Clone, Debug, PartialEq)]
struct MinChange {
    task: Option<String>,
    metric: String,
    change: f64,
}

pub(super) fn run(args: &CompareArgs) -> Result<()> {
    let comparison = compare(&args.a, &args.b)?;
    if let Some(unknown) = args.fail_below.iter().find(|bound| !bound.applies(&comparison, args)) {
        let problem = format!("failed to compare: no task in both runs has the metric of --fail-below {unknown}");
        return Err(anyhow!(problem).context(ExitCode::Usage));
    }
    if let Some(path) = &args.html {
        let names = [&args.a, &args.b].map(|path| path.display().to_string());
        let page = comparison_page(&comparison, [&names[0], &names[1]])?;
        let written = write_atomically(path, |file| file.write_all(page.as_bytes()));
        written.with_context(|| format!("failed to write {}", path.display()))?;
    }
    print_line(&match args.json {
        true => serde_json::to_string_pretty(&comparison)?,
        false => text(&comparison, args.flips),
    })?;
    let problems = [
        comparison.differences.iter().filter_map(|d| problem(d, args)).collect::<Vec<_>>(),
        comparison.left_out.iter().filter_map(|skipped| skipped_problem(skipped, args)).collect(),
    ]
    .concat();
    match problems.is_empty() {
        true => Ok(()),
        false => Err(anyhow!(problems.join("\n")).context(ExitCode::Failed)),
    }
}

/// Returns the problem of a metric that improved by less than its bound, or that has unpaired samples.
fn problem(difference: &MetricDifference, args: &CompareArgs) -> Option<String> {
    let MetricDifference { task, metric, filter, n, n_unpaired, .. } = difference;
    let mut bounds = args.fail_below.iter().filter(|bound| bound.is_about(task, metric)).peekable();
    bounds.peek()?;
    if *n_unpaired > 0 && !args.allow_unpaired {
        let are = if *n_unpaired == 1 { "is" } else { "are" };
        return Some(format!(
            "{task}: {} of {metric},{filter} {are} in one run only, {n} in both; compare runs over the same documents, or \
             add --allow-unpaired",
            counted(*n_unpaired, "sample")
        ));
    }
    // A NaN improvement is below any bound.
    let is_crossed = bounds.any(|bound| difference.gain().is_nan() || difference.gain() < bound.change);
    is_crossed.then(|| {
        format!("{task}: {metric},{filter} changed by {:+.4}, which is below the bound", difference.difference)
    })
}

/// Returns the problem of a metric with a bound that could not be compared.
fn skipped_problem(skipped: &SkippedMetric, args: &CompareArgs) -> Option<String> {
    let SkippedMetric { task, metric, filter, why, in_one_run } = skipped;
    let has_bound = args.fail_below.iter().any(|bound| bound.is_about(task, metric));
    let remedy = match in_one_run {
        true => "compare runs of the same tasks, or add --allow-unpaired",
        false => "name the tasks to compare: --fail-below TASK:METRIC=CHANGE",
    };
    (has_bound && !args.accepts(skipped)).then(|| format!("{task}: {metric},{filter} is not compared: {why}; {remedy}"))
}

fn text(comparison: &Comparison, most_flips: usize) -> String {
    let mut lines = Vec::new();
    for d in &comparison.differences {
        let [low, high] = d.interval;
        let lower = if d.higher_is_better { "" } else { ", lower is better" };
        let by = if d.interval_by == IntervalMethod::Bootstrap { ", interval by bootstrap" } else { "" };
        let unpaired = if d.n_unpaired == 0 { String::new() } else { format!(", {} unpaired", d.n_unpaired) };
        lines.push(format!(
            "{} {},{}: {:.4} -> {:.4}  {:+.4} [{low:+.4}, {high:+.4}]  {}{unpaired}{lower}{by}",
            d.task,
            d.metric,
            d.filter,
            d.a,
            d.b,
            d.difference,
            counted(d.n, "sample")
        ));
        let ids = |gained: bool| -> Vec<String> {
            let flips = d.flips.iter().filter(|flip| (flip.b > flip.a) == gained);
            flips.map(|flip| flip.doc_id.to_string()).collect()
        };
        for (word, ids) in [("gained", ids(true)), ("lost", ids(false))] {
            if !ids.is_empty() {
                let more = ids.len().saturating_sub(most_flips);
                let more = if more == 0 { String::new() } else { format!(" and {more} more") };
                let shown: Vec<&str> = ids.iter().take(most_flips).map(String::as_str).collect();
                lines.push(format!("  {word} {}: {}{more}", ids.len(), shown.join(" ")));
            }
        }
    }
    for SkippedMetric { task, metric, filter, why, .. } in &comparison.left_out {
        lines.push(format!("{task} {metric},{filter}: not compared: {why}"));
    }
    if !comparison.unpaired.is_empty() {
        lines.push(format!("only in one run: {}", comparison.unpaired.join(", ")));
    }
    lines.join("\n")
}

impl CompareArgs {
    /// Returns true if a metric may be left out: only one run has it, and `--allow-unpaired` is given.
    fn accepts(&self, skipped: &SkippedMetric) -> bool {
        self.allow_unpaired && skipped.in_one_run
    }
}

impl MinChange {
    fn is_about(&self, task: &str, metric: &str) -> bool {
        self.metric == metric && self.task.as_ref().is_none_or(|name| name == task)
    }

    /// Returns true if a metric of the comparison passes or fails by this bound.
    fn applies(&self, comparison: &Comparison, args: &CompareArgs) -> bool {
        let mut skipped = comparison.left_out.iter().filter(|skipped| !args.accepts(skipped));
        comparison.differences.iter().any(|d| self.is_about(&d.task, &d.metric))
            || skipped.any(|skipped| self.is_about(&skipped.task, &skipped.metric))
    }
}

impl std::fmt::Display for MinChange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(task) = &self.task {
            write!(f, "{task}:")?;
        }
        write!(f, "{}={}", self.metric, self.change)
    }
}

impl std::str::FromStr for MinChange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not METRIC=CHANGE, such as acc=-0.01");
        let (name, change) = text.split_once('=').ok_or_else(wrong)?;
        let change = change.trim().parse().ok().filter(|change: &f64| change.is_finite()).ok_or_else(wrong)?;
        let (task, metric) = match name.split_once(':') {
            Some((task, metric)) => (Some(task.trim().to_owned()), metric),
            None => (None, name),
        };
        Ok(Self { task, metric: metric.trim().to_owned(), change })
    }
}
