//! The numbers of a report as JSON: every recorded point, not the downsampled ones.

use serde_json::{Map, Value, json};

use super::reported_run::{ReportedRun, RunsReport};
use crate::run_history::HistorySummary;

/// Returns the numbers of a report as JSON.
pub fn numbers(report: &RunsReport) -> Value {
    let runs: Vec<Value> = report.runs.iter().map(|run| of_run(run, report)).collect();
    json!({ "runs": runs, "differences": report.differences })
}

fn of_run(run: &ReportedRun, report: &RunsReport) -> Value {
    let history = &run.history;
    let series: Map<String, Value> = history
        .rows
        .names()
        .map(|name| {
            let points = history.rows.series(name);
            let steps: Vec<u64> = points.iter().map(|point| point.step).collect();
            let values: Vec<f64> = points.iter().map(|point| point.value).collect();
            (name.to_owned(), json!({ "step": steps, "value": values }))
        })
        .collect();
    let status = history.status(report.now);
    json!({
        "label": run.label,
        "path": history.path,
        "status": status.word(),
        "reason": status.reason(),
        "steps_done": history.steps_done(),
        "total_steps": history.total_steps(),
        "summary": HistorySummary::of(history),
        "axis": history.rows.axis(),
        "series": series,
        "expert_load": history.rows.expert_load(),
        "checkpoints": history.rows.checkpoints(),
        "resumes": history.rows.resumes(),
        "token_statistics": history.saved.as_ref().and_then(|saved| saved.token_stats()),
        "settings": run.settings,
        "lines_without_record": history.rows.malformed(),
    })
}
