//! A run with its metrics, read once or followed while it grows.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Result, anyhow};
use candlewick_text::files::without_links;

use super::files::RunFiles;
use super::rows::MetricRows;
use super::saved_run::SavedRun;
use super::status::RunStatus;
use super::tail::{LastLine, MetricsTail};
use crate::exit::ExitCode;

/// A run's run.json and metrics.
#[derive(Clone, Debug)]
pub struct RunHistory {
    /// Path that the user gave.
    pub path: PathBuf,
    /// Paths of the files.
    pub files: RunFiles,
    /// Contents of run.json, if there is one.
    pub saved: Option<SavedRun>,
    /// Metrics by name and step.
    pub rows: MetricRows,
    tail: MetricsTail,
}

impl RunHistory {
    /// Returns the history of a run that may not have started. It is empty until [`Self::update`].
    pub fn following(path: &Path) -> Self {
        let (rows, tail) = (MetricRows::default(), MetricsTail::default());
        Self { path: path.to_owned(), files: RunFiles::of(path), saved: None, rows, tail }
    }

    /// Reads a run, which has started.
    pub fn read(path: &Path) -> Result<Self> {
        let mut history = Self::following(path);
        history.files.require(path)?;
        history.load(LastLine::Final)?;
        Ok(history)
    }

    /// Reads the lines that are new. Returns true if anything has changed.
    pub fn update(&mut self) -> Result<bool> {
        self.load(LastLine::Growing)
    }

    fn load(&mut self, last: LastLine) -> Result<bool> {
        self.files = RunFiles::of(&self.path);
        let saved = SavedRun::read(&self.files.run_json)?;
        let has_new_saved = saved != self.saved;
        self.saved = saved;
        let path = &self.files.metrics;
        let read = self.tail.read_into(path, &mut self.rows, last);
        let has_new_rows = read.map_err(|error| {
            let advice = "name a run's output_dir or its metrics.jsonl";
            anyhow!("failed to read {}: {error}; {advice}", path.display()).context(ExitCode::Usage)
        })?;
        Ok(has_new_saved || has_new_rows)
    }

    /// Returns the name of the run: its `run_name`, else the name of its folder.
    pub fn name(&self) -> String {
        let own = self.saved.as_ref().and_then(|saved| saved.text("/run/name")).map(str::to_owned);
        own.unwrap_or_else(|| {
            let folder = without_links(&self.files.folder);
            let name = folder.file_name().map(|name| name.to_string_lossy().into_owned());
            name.unwrap_or_else(|| self.path.display().to_string())
        })
    }

    /// Returns the status of the run at `now`.
    pub fn status(&self, now: SystemTime) -> RunStatus {
        match &self.saved {
            Some(saved) => RunStatus::of(saved, &self.files.folder, self.step_seconds().unwrap_or(0.0), now),
            None if self.rows.is_empty() => RunStatus::Waiting,
            None => RunStatus::Unknown,
        }
    }

    /// Returns the steps done. Not every step is recorded.
    pub fn steps_done(&self) -> u64 {
        let saved = self.saved.as_ref().and_then(|saved| saved.count("/metrics/step/iter"));
        saved.unwrap_or(0).max(self.rows.last_step().unwrap_or(0))
    }

    /// Returns the steps of the whole run, if run.json has them.
    pub fn total_steps(&self) -> Option<u64> {
        self.saved.as_ref()?.count("/run/total_steps")
    }

    /// Returns the mean seconds of the last recorded steps.
    pub fn step_seconds(&self) -> Option<f64> {
        const LAST: usize = 20;
        let points = self.rows.series("step_time");
        let last = &points[points.len().saturating_sub(LAST)..];
        (!last.is_empty()).then(|| last.iter().map(|point| point.value).sum::<f64>() / last.len() as f64)
    }

    /// Estimates the seconds of the remaining steps, without evaluations and checkpoints.
    pub fn seconds_left(&self) -> Option<f64> {
        let n_left = self.total_steps()?.saturating_sub(self.steps_done());
        Some(n_left as f64 * self.step_seconds()?)
    }
}
