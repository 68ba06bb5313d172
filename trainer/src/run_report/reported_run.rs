//! Input of a report.

use std::time::SystemTime;

use serde::Serialize;
use serde_json::Value;

use crate::run_history::RunHistory;

/// Contents of a report.
#[derive(Clone, Debug)]
pub struct RunsReport {
    /// Runs, in the order of the command line.
    pub runs: Vec<ReportedRun>,
    /// Settings that differ between the runs.
    pub differences: Vec<SettingDifference>,
    /// Time of the report.
    pub now: SystemTime,
}

/// Run of a report.
#[derive(Clone, Debug)]
pub struct ReportedRun {
    /// Name, which no other run of the report has.
    pub label: String,
    /// Files of the run.
    pub history: RunHistory,
    /// Resolved settings; empty without run.json.
    pub settings: Vec<ReportSetting>,
}

/// Setting of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReportSetting {
    /// Key of the recipe.
    pub key: String,
    /// Value.
    pub value: Value,
    /// Origin of the value, such as `recipe.yaml:12` or `default`.
    pub origin: String,
}

/// Key whose values differ.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SettingDifference {
    /// Key of the recipe.
    pub key: String,
    /// Value in each run; null if it is not set, or if the run has no run.json.
    pub values: Vec<Option<Value>>,
}

impl RunsReport {
    /// Returns a report of these runs. Runs with equal names are labelled with their paths.
    pub fn new(runs: Vec<(RunHistory, Vec<ReportSetting>)>, differences: Vec<SettingDifference>) -> Self {
        let names: Vec<String> = runs.iter().map(|(history, _)| history.name()).collect();
        let is_unique = |name: &String| names.iter().filter(|other| *other == name).count() == 1;
        let named = runs.into_iter().zip(&names).map(|((history, settings), name)| {
            let label = if is_unique(name) { name.clone() } else { history.path.display().to_string() };
            ReportedRun { label, history, settings }
        });
        Self { runs: named.collect(), differences, now: SystemTime::now() }
    }
}
