//! `evaluator compare`: what changed between two runs, sample by sample.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow};
use clap::Args;

use crate::results::{Comparison, IntervalBy, MetricDifference, SkippedMetric, compare, comparison_page};
use candlewick_runtime::exit::ExitCode;
use candlewick_runtime::stdout::print_line;

#[derive(Debug, Args)]
pub(super) struct Compare {
    /// The first run: a folder with samples_*.jsonl, or such a file
    a: PathBuf,
    /// The second
    b: PathBuf,
    /// Fail with exit code 1 if a metric gained less than this, such as acc=-0.01, or if some of its samples are in one run
    /// only; with TASK: for one task only. Where a lower value is better, it gains by falling
    #[arg(long, alias = "fail_below", value_name = "[TASK:]METRIC=CHANGE")]
    fail_below: Vec<MinChange>,
    /// Let --fail-below look at the samples that both runs have, even if one has others
    #[arg(long, alias = "allow_unpaired", requires = "fail_below")]
    allow_unpaired: bool,
    /// Maximum number of flipped samples listed for each metric
    #[arg(long, default_value_t = 20, value_name = "N")]
    flips: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Write a page for a browser, too
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// The least gain of a metric that is not a failure.
#[derive(Clone, Debug, PartialEq)]
struct MinChange {
    task: Option<String>,
    metric: String,
    change: f64,
}

pub(super) fn run(args: &Compare) -> Result<()> {
    let comparison = compare(&args.a, &args.b)?;
    if let Some(unknown) =
        args.fail_below.iter().find(|bound| !comparison.differences.iter().any(|d| bound.is_about(d)))
    {
        let problem = format!("failed to compare: no task of both runs has the metric of --fail-below {unknown}");
        return Err(anyhow!(problem).context(ExitCode::Usage));
    }
    if let Some(path) = &args.html {
        let names = [&args.a, &args.b].map(|path| path.display().to_string());
        let page = comparison_page(&comparison, [&names[0], &names[1]])?;
        fs::write(path, page).with_context(|| format!("failed to write {}", path.display()))?;
    }
    print_line(&match args.json {
        true => serde_json::to_string_pretty(&comparison)?,
        false => text(&comparison, args.flips),
    })?;
    let bounded = comparison.differences.iter().filter(|d| args.fail_below.iter().any(|bound| bound.is_about(d)));
    for difference in bounded {
        check(difference, args)?;
    }
    Ok(())
}

/// Fails if a metric with a bound gained less, or if that cannot be told of all its samples.
fn check(difference: &MetricDifference, args: &Compare) -> Result<()> {
    let MetricDifference { task, metric, filter, n, n_unpaired, .. } = difference;
    let problem = if *n_unpaired > 0 && !args.allow_unpaired {
        format!(
            "{task}: {n_unpaired} samples of {metric},{filter} are in one run only, {n} in both; compare runs over the same \
             documents, or add --allow-unpaired"
        )
    } else if args.fail_below.iter().any(|bound| bound.is_crossed(difference)) {
        format!("{task}: {metric},{filter} changed by {:+.4}, which is below the bound", difference.difference)
    } else {
        return Ok(());
    };
    Err(anyhow!(problem).context(ExitCode::Failed))
}

fn text(comparison: &Comparison, most_flips: usize) -> String {
    let mut lines = Vec::new();
    for d in &comparison.differences {
        let [low, high] = d.interval;
        let lower = if d.higher_is_better { "" } else { ", lower is better" };
        let by = if d.interval_by == IntervalBy::Bootstrap { ", interval by bootstrap" } else { "" };
        let unpaired = if d.n_unpaired == 0 { String::new() } else { format!(", {} not paired", d.n_unpaired) };
        lines.push(format!(
            "{} {},{}: {:.4} -> {:.4}  {:+.4} [{low:+.4}, {high:+.4}]  {} samples{unpaired}{lower}{by}",
            d.task, d.metric, d.filter, d.a, d.b, d.difference, d.n
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
    for SkippedMetric { task, metric, filter, why } in &comparison.left_out {
        lines.push(format!("{task} {metric},{filter}: not compared: {why}"));
    }
    if !comparison.unpaired.is_empty() {
        lines.push(format!("only in one of the two: {}", comparison.unpaired.join(", ")));
    }
    lines.join("\n")
}

impl MinChange {
    fn is_about(&self, difference: &MetricDifference) -> bool {
        self.metric == difference.metric && self.task.as_ref().is_none_or(|task| *task == difference.task)
    }

    fn is_crossed(&self, difference: &MetricDifference) -> bool {
        // A gain that is no number is below any bound.
        let is_enough = difference.gain() >= self.change;
        self.is_about(difference) && !is_enough
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
