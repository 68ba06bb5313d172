//! Rendering of the page.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use candlewick_html::{Page, script_json};
use candlewick_text::quantity::grouped;
use minijinja::context;
use minijinja::value::Serde;
use serde::Serialize;

use super::curves::{MOST_POINTS, ReportCurves};
use super::reported_run::{ReportedRun, RunsReport};
use super::tables::{
    RunEvent, RunHead, TokenRow, differences, environment, events, results, token_statistics, trained,
};
use crate::metrics::{ExpertLoad, LayerLoad};
use crate::plan::value_in_words;
use crate::run_history::SavedRun;

/// Value of the page's meta element `generator`. It distinguishes a report from other HTML files.
pub const GENERATOR: &str = "candlewick trainer report";

const TEMPLATES: [(&str, &str); 1] = [("report.html", include_str!("report.html"))];

/// Sections of a run.
#[derive(Serialize)]
struct RunDetails<'r> {
    label: &'r str,
    token_columns: Vec<&'static str>,
    token_rows: Vec<TokenRow>,
    trained: Vec<(&'static str, String)>,
    events: Vec<RunEvent>,
    /// Key, value and origin of each setting.
    settings: Vec<[String; 3]>,
    experts: ExpertTable,
    notes: Vec<String>,
}

/// Load, logits and losses of each MoE layer at the last step.
#[derive(Default, Serialize)]
struct ExpertTable {
    columns: Vec<String>,
    rows: Vec<Vec<String>>,
}

/// Renders a report as HTML.
pub fn page(report: &RunsReport) -> Result<String> {
    let data = script_json(&ReportCurves::of(report)).context("failed to write the curves as JSON")?;
    let heads: Vec<RunHead> = report.runs.iter().map(|run| RunHead::of(run, report)).collect();
    let details: Vec<RunDetails> = report.runs.iter().map(RunDetails::of).collect();
    let title = match report.runs.as_slice() {
        [run] => run.label.clone(),
        runs => format!("Comparison of {} runs", runs.len()),
    };
    let values = context! {
        title, data, generator => GENERATOR, heads => Serde(heads), results => Serde(results(report)),
        differences => Serde(differences(report)), environment => Serde(environment(report)),
        details => Serde(details),
    };
    let (style, script) = (include_str!("style.css"), include_str!("script.js"));
    let page = Page { name: "report.html", templates: &TEMPLATES, style, script };
    page.render(values).context("failed to render the template report.html")
}

impl<'r> RunDetails<'r> {
    fn of(run: &'r ReportedRun) -> Self {
        let stats = run.history.saved.as_ref().and_then(SavedRun::token_stats);
        let (token_columns, token_rows) = stats.as_ref().map(token_statistics).unwrap_or_default();
        let setting =
            |it: &super::reported_run::ReportSetting| [it.key.clone(), value_in_words(&it.value), it.origin.clone()];
        Self {
            label: &run.label,
            token_columns,
            token_rows,
            trained: stats.as_ref().map(trained).unwrap_or_default(),
            events: events(run),
            settings: run.settings.iter().map(setting).collect(),
            experts: ExpertTable::of(run),
            notes: notes(run),
        }
    }
}

impl ExpertTable {
    /// Returns the table of the last step. Records of earlier versions have no logits and losses of layers.
    fn of(run: &ReportedRun) -> Self {
        let Some(ExpertLoad { layers, .. }) = run.history.rows.expert_load() else { return Self::default() };
        let has_logits = layers.iter().any(|layer| layer.logit_std > 0.0);
        let logits: &[&str] = if has_logits { &["Mean of logits", "Std of logits"] } else { &[] };
        let losses: BTreeSet<&str> = layers.iter().flat_map(|layer| layer.losses.keys().map(String::as_str)).collect();
        let columns = ["Layer", "Busiest over mean", "Entropy", "Without tokens", "Dropped"].into_iter();
        let columns = columns.chain(logits.iter().copied()).chain(losses.iter().copied()).map(str::to_owned).collect();
        let row = |layer: &LayerLoad| {
            let of_logits = [layer.logit_mean, layer.logit_std].map(|logit| format!("{logit:.3}"));
            let of_loss = |name: &&str| layer.losses.get(*name).map_or_else(String::new, |loss| format!("{loss:.4}"));
            let load = [
                layer.layer.to_string(),
                format!("{:.3}", layer.max_over_mean),
                format!("{:.3}", layer.entropy),
                format!("{:.1}%", 100.0 * layer.unused),
                format!("{:.1}%", 100.0 * layer.dropped),
            ];
            let of_logits = of_logits.into_iter().take(logits.len());
            load.into_iter().chain(of_logits).chain(losses.iter().map(of_loss)).collect()
        };
        Self { columns, rows: layers.iter().map(row).collect() }
    }
}

/// Returns the notes of a run, and those about its files.
fn notes(run: &ReportedRun) -> Vec<String> {
    let rows = &run.history.rows;
    let metrics = run.history.files.metrics.display();
    let n_records = rows.series("loss").len();
    let mut notes = Vec::new();
    if run.history.saved.is_none() {
        let path = run.history.files.run_json.display();
        notes.push(format!("There is no {path}: settings, environment and token statistics are unknown."));
    }
    if n_records == 0 {
        notes.push(format!("{metrics} has no step. train_log_iter_interval selects the steps that a run records."));
    }
    if let [first, ..] = rows.malformed() {
        let left_out = match rows.malformed().len() {
            1 => format!("1 line of {metrics} is no record and is left out"),
            n => format!("{n} lines of {metrics} are no records and are left out"),
        };
        notes.push(format!("{left_out}; the first is line {first}."));
    }
    if n_records > MOST_POINTS {
        let n = grouped(n_records);
        notes.push(format!(
            "The curves show {n} records as {MOST_POINTS} means; the shaded area has the lowest and highest values. \
             `trainer report --json` prints all."
        ));
    }
    notes.extend(run.history.saved.iter().flat_map(SavedRun::notes).map(str::to_owned));
    notes
}
