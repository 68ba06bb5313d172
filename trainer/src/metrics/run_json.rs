//! run.json: the plan, versions, machine, latest metrics and exit of a run.
//!
//! Each update replaces the file atomically, so a reader never sees a partial file.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

use candlewick_text::files::{MAX_GENERATED_FILE_BYTES, read_regular_file, write_atomically};
use jiff::Timestamp;
use serde::Serialize;
use serde_json::{Value, json};

use super::description::RunDescription;
use super::earlier_files::{earlier_run_json, exist, unused_name};
use super::host::{HostInfo, Versions};
use super::plan::LogPlan;

/// Writes and updates run.json.
#[derive(Debug)]
pub struct RunJson {
    path: Option<PathBuf>,
    report: RunReport,
    /// The report of an earlier run that did not finish.
    unfinished: Option<Value>,
    /// The end of an earlier run that had trained, as the end of a clause.
    earlier_end: Option<String>,
    started: Instant,
    /// True if the last write failed.
    is_failing: bool,
}

/// The contents of run.json.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunReport {
    /// The version of this format.
    pub format: u32,
    /// The id of the run: its start in milliseconds since 1970. A run that resumes, or restarts before its first checkpoint,
    /// keeps it.
    pub run_id: Option<u64>,
    /// The folder of this file. A copy of the file is in another one.
    pub folder: Option<PathBuf>,
    /// The start of the process, in UTC.
    pub started_at: String,
    /// The time of the last update, in UTC. With `exit`, the end of the run.
    pub updated_at: String,
    /// Seconds from `started_at` to `updated_at`.
    pub elapsed_s: f64,
    /// The end of the run; null while it runs, and if it was killed.
    pub exit: Option<RunExit>,
    /// The checkpoint from which the run resumed.
    pub resumed_from: Option<PathBuf>,
    /// Size, mesh and batch of the run; null until they are known.
    pub run: Option<RunDescription>,
    /// The folders of exported models, which may be outside of the run's folder.
    pub export_folders: Vec<PathBuf>,
    /// The resolved plan.
    pub plan: Value,
    /// The versions of the program.
    pub versions: Versions,
    /// The machine.
    pub host: HostInfo,
    /// Notes about the data (detected formats, cache hits, anomalies) and the attention kernel.
    pub notes: Vec<String>,
    /// The token statistics.
    #[serde(rename = "ledger")]
    pub token_stats: Value,
    /// The number of steps skipped because of a non-finite loss or gradient.
    pub skipped_steps: usize,
    /// The records of the last step and evaluation, and other metrics of the training loop.
    pub metrics: Value,
}

/// The end of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RunExit {
    /// The process's exit code.
    pub code: u8,
    /// The reason.
    pub reason: String,
}

impl RunJson {
    /// Creates run.json in `log.output_dir`; writes nothing if that is `None`. Renames the file of a finished run to
    /// `run.1.json`, `.2`, and so on.
    pub fn start(log: &LogPlan, plan: Value) -> io::Result<Self> {
        let now = utc(SystemTime::now());
        let path = log.output_dir.as_ref().map(|dir| dir.join("run.json"));
        let folder = log.output_dir.as_ref().and_then(|dir| dir.canonicalize().ok());
        let previous = path.as_deref().map(read).unwrap_or_default();
        let is_unfinished = previous["exit"]["code"] != 0 && previous["folder"] == json!(folder);
        let report = RunReport {
            format: 1,
            run_id: previous["run_id"].as_u64().filter(|_| is_unfinished),
            folder,
            started_at: now.clone(),
            updated_at: now,
            elapsed_s: 0.0,
            exit: None,
            resumed_from: None,
            run: None,
            export_folders: Vec::new(),
            plan,
            versions: Versions::this(),
            host: HostInfo::this(),
            notes: Vec::new(),
            token_stats: Value::Null,
            skipped_steps: 0,
            metrics: Value::Null,
        };
        let is_finished = previous["exit"]["code"] == 0;
        let earlier_end = end_of(&previous).or_else(|| exist(log).then(|| "has ended".to_owned()));
        if let Some(path) = path.as_deref().filter(|_| is_finished) {
            let earlier = Some(earlier_run_json(log, path)).filter(|earlier| !earlier.exists());
            fs::rename(path, earlier.unwrap_or_else(|| unused_name(path)))?;
        }
        let unfinished = (!is_finished && previous.is_object()).then_some(previous);
        let mut run_json = Self { path, report, unfinished, earlier_end, started: Instant::now(), is_failing: false };
        run_json.update(|_| ())?;
        Ok(run_json)
    }

    /// Keeps the report of an unfinished run next to its other files, which [`super::Reporter::open`] renames.
    pub fn set_aside_unfinished(&mut self, log: &LogPlan) -> io::Result<()> {
        let Some((path, report)) = self.path.as_deref().zip(self.unfinished.take()) else { return Ok(()) };
        let earlier = earlier_run_json(log, path);
        if !exist(log) || earlier.exists() {
            return Ok(());
        }
        let report = serde_json::to_vec_pretty(&report)?;
        write_atomically(&earlier, |file| file.write_all(&report))
    }

    /// Returns the id of the run; at the start, that of an unfinished run in the folder.
    pub fn run_id(&self) -> Option<u64> {
        self.report.run_id
    }

    /// Returns a line about an earlier run in the folder that had trained, for a run that does not continue it.
    pub fn describe_earlier_run(&self) -> Option<String> {
        let end = self.earlier_end.as_deref()?;
        Some(format!("a new run begins: the earlier one in this folder {end}, and no checkpoint of it is resumed"))
    }

    /// Changes the report and writes it.
    pub fn update(&mut self, change: impl FnOnce(&mut RunReport)) -> io::Result<()> {
        change(&mut self.report);
        self.report.updated_at = utc(SystemTime::now());
        self.report.elapsed_s = self.started.elapsed().as_secs_f64();
        let report = serde_json::to_vec_pretty(&self.report)?;
        // Not synced: it is written at every step, and a power failure may lose the last versions.
        self.path.as_deref().map_or(Ok(()), |path| write_atomically(path, |file| file.write_all(&report)))
    }

    /// Changes the report and writes it. The first of several failed writes is a warning.
    pub fn update_or_warn(&mut self, change: impl FnOnce(&mut RunReport)) {
        let written = self.update(change);
        let was_failing = std::mem::replace(&mut self.is_failing, written.is_err());
        if let Err(error) = written
            && !was_failing
        {
            tracing::warn!("failed to write run.json: {error}; the run continues");
        }
    }

    /// Writes the final version, with the exit.
    pub fn finish(&mut self, exit: RunExit) -> io::Result<()> {
        self.update(|report| report.exit = Some(exit))
    }
}

/// Describes the end of a run that had trained, with the first sentence of the reason. `None` for a start that failed before.
fn end_of(report: &Value) -> Option<String> {
    report["metrics"]["step"].as_object()?;
    let reason = report["exit"]["reason"].as_str().and_then(|reason| reason.split(". ").next());
    Some(reason.map_or_else(|| "was killed".to_owned(), |reason| format!("ended ({reason})")))
}

/// Reads a report; null if there is none.
fn read(path: &Path) -> Value {
    read_regular_file(path, MAX_GENERATED_FILE_BYTES)
        .ok()
        .and_then(|bytes| serde_json::from_slice(&bytes).ok())
        .unwrap_or_default()
}

/// Formats a time as 2026-11-21T02:03:04Z.
fn utc(time: SystemTime) -> String {
    Timestamp::try_from(time).unwrap_or_default().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::metrics::plan::Console;
    use crate::metrics::tracking_plan::TrackingPlan;
    use std::time::{Duration, UNIX_EPOCH};

    fn log(output_dir: Option<PathBuf>) -> LogPlan {
        LogPlan {
            metrics_path: None,
            samples_path: None,
            output_dir,
            loss_log_interval: 1,
            train_log_iter_interval: 1,
            eval_log_iter_interval: 1,
            log_num_zeros_in_grad: false,
            console: Console::Quiet,
            tracking: TrackingPlan::default(),
        }
    }

    #[test]
    fn times_are_formatted_in_utc() {
        let cases = [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_709_251_200, "2024-03-01T00:00:00Z"),
            (1_767_225_599, "2025-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ];
        for (seconds, want) in cases {
            assert_eq!(utc(UNIX_EPOCH + Duration::from_secs(seconds)), want);
        }
    }

    #[test]
    fn run_json_has_no_exit_until_the_run_finishes() {
        let dir = tempfile::tempdir().unwrap();
        let output_dir = dir.path().join("out");
        let read = || -> Value { serde_json::from_slice(&fs::read(output_dir.join("run.json")).unwrap()).unwrap() };
        let mut run = RunJson::start(&log(Some(output_dir.clone())), json!({"seed": 42})).unwrap();
        assert_eq!(read()["exit"], Value::Null);
        assert_eq!(read()["plan"], json!({"seed": 42}));
        assert_eq!(read()["versions"]["candlewick"], env!("CARGO_PKG_VERSION"));
        assert!(read()["host"]["n_cpus"].as_u64().unwrap() > 0);

        run.update(|report| report.token_stats = json!({"read": 10})).unwrap();
        run.finish(RunExit { code: 75, reason: "SIGTERM, saved at step 3".to_owned() }).unwrap();
        assert_eq!(read()["ledger"]["read"], 10);
        assert_eq!(read()["exit"], json!({"code": 75, "reason": "SIGTERM, saved at step 3"}));
        assert_eq!(fs::read_dir(&output_dir).unwrap().count(), 1);
    }

    #[test]
    fn a_restarted_run_keeps_its_id_and_a_copied_or_finished_one_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let [folder, copy] = ["out", "copy"].map(|name| dir.path().join(name));
        let start = |folder: &Path| {
            fs::create_dir_all(folder).unwrap();
            RunJson::start(&log(Some(folder.to_owned())), json!({})).unwrap()
        };
        let mut first = start(&folder);
        assert_eq!(first.run_id(), None);
        first.update(|report| report.run_id = Some(7)).unwrap();
        fs::create_dir(&copy).unwrap();
        fs::copy(folder.join("run.json"), copy.join("run.json")).unwrap();
        assert_eq!([&folder, &copy].map(|folder| start(folder).run_id()), [Some(7), None]);
        start(&folder).finish(RunExit { code: 3, reason: "data".to_owned() }).unwrap();
        let mut again = start(&folder);
        assert_eq!(again.run_id(), Some(7));
        again.finish(RunExit { code: 0, reason: "done".to_owned() }).unwrap();
        assert_eq!(start(&folder).run_id(), None);
        assert!(folder.join("run.1.json").exists());
    }

    #[test]
    fn without_a_folder_run_json_is_not_written() {
        let mut run = RunJson::start(&log(None), json!({})).unwrap();
        run.finish(RunExit { code: 0, reason: "done".to_owned() }).unwrap();
    }
}
