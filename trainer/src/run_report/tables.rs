//! Rows of the tables of a report.

use candlewick_text::quantity::{counted, grouped};
use jiff::Timestamp;
use serde::Serialize;

use super::reported_run::{ReportedRun, RunsReport};
use crate::data::{DatasetCounts, TokenCount, TokenStats};
use crate::metrics::{clock, duration, quantity};
use crate::plan::value_in_words;
use crate::run_history::{HistorySummary, RunStatus, SavedRun};

/// Row with a cell for each run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct TableRow {
    pub(super) label: String,
    pub(super) cells: Vec<TableCell>,
}

/// Text of a run in a row.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct TableCell {
    pub(super) text: String,
    /// True for the best value of a row.
    pub(super) is_best: bool,
}

/// Head of a run: its status, and where it is.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct RunHead {
    label: String,
    path: String,
    status: &'static str,
    reason: String,
    steps: String,
}

/// Row of the token statistics: samples and tokens of the training and of the evaluation data.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct TokenRow {
    label: &'static str,
    counts: Vec<String>,
}

/// Checkpoint or resume of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct RunEvent {
    step: String,
    what: &'static str,
    path: String,
    duration: String,
    /// The time in UTC; empty for a run of an earlier version.
    time: String,
}

impl RunHead {
    pub(super) fn of(run: &ReportedRun, report: &RunsReport) -> Self {
        let status = run.history.status(report.now);
        let (done, total) = (run.history.steps_done(), run.history.total_steps());
        let total = total.map_or_else(String::new, |total| format!(" of {}", grouped(total as usize)));
        Self {
            label: run.label.clone(),
            path: run.history.path.display().to_string(),
            status: status.word(),
            reason: if status == RunStatus::Running { String::new() } else { status.reason() },
            steps: grouped(done as usize) + &total,
        }
    }
}

/// Returns the rows of final and best values. The best of several runs is marked.
pub(super) fn results(report: &RunsReport) -> Vec<TableRow> {
    let summaries: Vec<HistorySummary> = report.runs.iter().map(|run| HistorySummary::of(&run.history)).collect();
    let mut rows: Vec<(&str, &str)> = Vec::new();
    for number in summaries.iter().flat_map(|summary| &summary.0) {
        if !rows.iter().any(|(key, _)| *key == number.key) {
            rows.push((&number.key, &number.label));
        }
    }
    let row = |(key, label): (&str, &str)| {
        let numbers: Vec<_> = summaries.iter().map(|summary| summary.get(key)).collect();
        let is_best = |idx: usize| {
            let others = || numbers.iter().enumerate().filter(|(other, _)| *other != idx).filter_map(|(_, it)| *it);
            let better = numbers[idx].map(|number| others().all(|other| number.is_better_than(other.value)));
            better == Some(true) && others().next().is_some()
        };
        let cell = |idx: usize| {
            let text = numbers[idx].map_or_else(String::new, |number| number.text());
            TableCell { text, is_best: is_best(idx) }
        };
        TableRow { label: label.to_owned(), cells: (0..numbers.len()).map(cell).collect() }
    };
    rows.into_iter().map(row).collect()
}

/// Returns the rows of settings that differ.
pub(super) fn differences(report: &RunsReport) -> Vec<TableRow> {
    let cell = |value: &Option<_>| {
        let text = value.as_ref().map_or_else(|| "not set".to_owned(), value_in_words);
        TableCell { text, is_best: false }
    };
    let row = |difference: &super::reported_run::SettingDifference| TableRow {
        label: difference.key.clone(),
        cells: difference.values.iter().map(cell).collect(),
    };
    report.differences.iter().map(row).collect()
}

/// Returns the rows of the environment: model size, mesh, machine, versions, times.
pub(super) fn environment(report: &RunsReport) -> Vec<TableRow> {
    let facts: Vec<Vec<(&str, String)>> = report.runs.iter().map(facts_of).collect();
    let mut labels: Vec<&str> = Vec::new();
    for (label, _) in facts.iter().flatten() {
        if !labels.contains(label) {
            labels.push(label);
        }
    }
    let text = |facts: &Vec<(&str, String)>, label: &str| {
        facts.iter().find(|(other, _)| *other == label).map(|(_, text)| text.clone()).unwrap_or_default()
    };
    let row = |label: &str| TableRow {
        label: label.to_owned(),
        cells: facts.iter().map(|facts| TableCell { text: text(facts, label), is_best: false }).collect(),
    };
    labels.into_iter().map(row).collect()
}

fn facts_of(run: &ReportedRun) -> Vec<(&'static str, String)> {
    let Some(saved) = &run.history.saved else { return Vec::new() };
    let count = |pointer: &str| saved.count(pointer).map(|n| quantity(n as f64));
    let text = |pointer: &str| saved.text(pointer).map(str::to_owned);
    let tokens = saved.count("/run/global_batch_tokens").map(|n| format!(", at most {} tokens", quantity(n as f64)));
    let batch = saved.count("/run/global_batch_size").map(|n| counted(n, "row") + &tokens.unwrap_or_default());
    let cpus = saved.count("/host/n_cpus").map_or_else(String::new, |n| format!(" ({n} threads)"));
    let all = [
        ("parameters", count("/run/parameters")),
        ("active parameters", count("/run/active_parameters")),
        ("trained parameters", count("/run/trained_parameters")),
        ("global batch", batch),
        ("device mesh", mesh(saved)),
        ("device", text("/run/device")),
        ("host", text("/host/name")),
        ("system", text("/host/system")),
        ("CPU", text("/host/cpu").map(|cpu| cpu + &cpus)),
        ("host memory", saved.number("/host/memory_bytes").map(|bytes| format!("{:.1} GB", bytes / 1e9))),
        ("candlewick", version(saved)),
        ("recipe", text("/plan/recipe")),
        ("resumed from", text("/resumed_from")),
        ("started", text("/started_at")),
        ("last update", text("/updated_at")),
        ("time of the process", saved.number("/elapsed_s").map(clock)),
    ];
    all.into_iter().filter_map(|(label, fact)| Some((label, fact?))).collect()
}

fn version(saved: &SavedRun) -> Option<String> {
    let commit = saved.text("/versions/commit").map_or_else(String::new, |commit| format!(" ({commit})"));
    saved.text("/versions/candlewick").map(|version| version.to_owned() + &commit)
}

/// Returns the degrees of the mesh that are not 1, and the number of ranks.
fn mesh(saved: &SavedRun) -> Option<String> {
    let degrees = saved.value("/run/mesh")?.as_object()?;
    let is_shown = |(axis, degree): &(&String, &serde_json::Value)| *axis == "world_size" || **degree != 1;
    let mut shown: Vec<_> = degrees.iter().filter(is_shown).collect();
    shown.sort_by_key(|(axis, _)| *axis != "world_size");
    Some(shown.into_iter().map(|(axis, degree)| format!("{axis} {degree}")).collect::<Vec<_>>().join(", "))
}

/// Returns the rows of the token statistics, and the labels of their columns.
pub(super) fn token_statistics(stats: &TokenStats) -> (Vec<&'static str>, Vec<TokenRow>) {
    let mut columns = vec!["train samples", "train tokens"];
    if stats.eval.is_some() {
        columns.extend(["eval samples", "eval tokens"]);
    }
    type Count = fn(&DatasetCounts) -> TokenCount;
    let counts: [(&str, Count); 8] = [
        ("read", |counts| counts.read),
        ("kept", |counts| counts.kept),
        ("truncated", |counts| counts.truncated),
        ("dropped", |counts| counts.dropped),
        ("supervised: the loss is computed", |counts| counts.supervised),
        ("masked", |counts| counts.masked),
        ("without targets, dropped", |counts| counts.without_targets),
        ("with an empty answer", |counts| counts.empty_answers),
    ];
    let sets = || [Some(&stats.train), stats.eval.as_ref()].into_iter().flatten();
    let row = |(label, count): (&'static str, Count)| TokenRow {
        label,
        counts: sets().map(count).flat_map(|it| [it.samples, it.tokens]).map(|n| grouped(n as usize)).collect(),
    };
    let is_shown = |(label, count): &(&str, Count)| {
        !label.contains("answer") && !label.contains("without") || sets().any(|set| count(set).samples > 0)
    };
    (columns, counts.into_iter().filter(is_shown).map(row).collect())
}

/// Returns the counts of the training steps.
pub(super) fn trained(stats: &TokenStats) -> Vec<(&'static str, String)> {
    let seen = &stats.seen;
    let all = [
        ("steps", seen.steps),
        ("sequences", seen.read.samples),
        ("tokens", seen.read.tokens),
        ("target tokens", seen.supervised),
        ("pad tokens", seen.padded),
        ("tokens left over at the ends of epochs", seen.left_over.tokens),
    ];
    all.into_iter().map(|(label, n)| (label, grouped(n as usize))).collect()
}

/// Returns the checkpoints and resumes by step.
pub(super) fn events(run: &ReportedRun) -> Vec<RunEvent> {
    let rows = &run.history.rows;
    let saved = rows.checkpoints().iter().map(|it| (it.iter, "checkpoint", &it.saved, it.save_time, &it.time));
    let resumed = rows.resumes().iter();
    let resumed = resumed.map(|it| (it.iter, "resumed from", &it.resumed_from, Some(it.resume_time), &it.time));
    let mut all: Vec<_> = saved.chain(resumed).collect();
    all.sort_by_key(|(step, ..)| *step);
    let event =
        |(step, what, path, seconds, time): (usize, _, &std::path::PathBuf, Option<f64>, &Option<String>)| RunEvent {
            step: grouped(step),
            what,
            path: path.display().to_string(),
            duration: seconds.map_or_else(String::new, duration),
            time: time.as_deref().and_then(|time| time.parse().ok()).map_or_else(String::new, table_time),
        };
    all.into_iter().map(event).collect()
}

/// Formats a time for a table: `2026-11-21 02:03:04`.
fn table_time(time: Timestamp) -> String {
    time.strftime("%Y-%m-%d %H:%M:%S").to_string()
}
