//! `trainer report`: an HTML page of one or more runs.

use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use candlewick_text::files::{open_regular_file, write_atomically};
use clap::Args;

use super::Ui;
use super::config::diff::differences;
use super::config::settings::{ResolvedSettings, WordedSetting};
use crate::exit::ExitCode;
use crate::run_history::{RunFiles, RunHistory};
use crate::run_report::{GENERATOR, ReportSetting, RunsReport, SettingDifference, numbers, page};

#[derive(Debug, Args)]
pub(super) struct ReportArgs {
    /// Output folders of runs, or their metrics.jsonl. Several runs are compared
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,
    /// HTML file [default: report.html in the folder of the first run]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print all numbers as JSON, and write no page
    #[arg(long, conflicts_with = "output")]
    json: bool,
}

/// Examples for the long help.
pub(super) const EXAMPLES: &str = "\
Examples:
  trainer report runs/quickstart
  trainer report runs/first runs/second --output comparison.html
  trainer report runs/quickstart --json > numbers.json";

pub(super) fn run(args: &ReportArgs, ui: &Ui) -> Result<ExitCode> {
    let histories: Vec<RunHistory> = args.runs.iter().map(|path| RunHistory::read(path)).collect::<Result<_>>()?;
    // Metrics without a run.json have no settings.
    let settings: Vec<Option<ResolvedSettings>> = histories.iter().map(|run| settings_of(&run.files)).collect();
    let differences = compared(&settings);
    let listed = |settings: Option<ResolvedSettings>| settings.map_or_else(Vec::new, |of| of.settings);
    let settings = settings.into_iter().map(|of| listed(of).into_iter().map(reported).collect());
    let report = RunsReport::new(histories.into_iter().zip(settings).collect(), differences);
    if args.json {
        return ui.print(&numbers(&report).to_string());
    }
    let path = match &args.output {
        Some(path) => path.clone(),
        None => default_path(&report.runs[0].history.files.folder)?,
    };
    let html = page(&report)?;
    let written = write_atomically(&path, |file| file.write_all(html.as_bytes()));
    written.with_context(|| format!("failed to write {}; --output names another file", path.display()))?;
    ui.print(&format!("wrote {}", path.display()))
}

fn settings_of(files: &RunFiles) -> Option<ResolvedSettings> {
    ResolvedSettings::of_run(&files.run_json).ok()
}

fn reported(setting: WordedSetting) -> ReportSetting {
    let WordedSetting { key, value, origin } = setting;
    ReportSetting { key, value, origin }
}

/// Returns the settings that differ between the runs that have settings.
fn compared(settings: &[Option<ResolvedSettings>]) -> Vec<SettingDifference> {
    let known: Vec<&ResolvedSettings> = settings.iter().flatten().collect();
    let differing = |(key, found): (&str, Vec<Option<&WordedSetting>>)| {
        let mut found = found.into_iter();
        let of_run = |run: &Option<_>| run.as_ref().and_then(|_: &ResolvedSettings| found.next()?);
        let values = settings.iter().map(of_run).map(|setting| setting.map(|it| it.value.clone())).collect();
        SettingDifference { key: key.to_owned(), values }
    };
    differences(&known).into_iter().map(differing).collect()
}

/// Returns the path of a run's report. Fails if another program wrote a file of that name.
fn default_path(folder: &Path) -> Result<PathBuf> {
    const HEAD_BYTES: u64 = 4096;
    let path = folder.join("report.html");
    let file = match open_regular_file(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(path),
        Err(error) => return Err(error).with_context(|| format!("failed to read {}", path.display())),
    };
    let mut head = Vec::new();
    // An unreadable file is not a report.
    let _ = file.take(HEAD_BYTES).read_to_end(&mut head);
    match String::from_utf8_lossy(&head).contains(GENERATOR) {
        true => Ok(path),
        false => {
            let problem = format!("{} exists and is no report of this program", path.display());
            Err(anyhow!("failed to write the report: {problem}; --output names another file").context(ExitCode::Usage))
        }
    }
}
