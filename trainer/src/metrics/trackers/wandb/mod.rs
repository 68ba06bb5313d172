//! Weights and Biases.
//!
//! The tracker writes a run folder for `wandb sync` in any case. Online, a thread uploads the same rows. W&B has one row a
//! step, so the records of a step are collected until the step is complete.

mod api;
mod files;
mod records;
mod transaction_log;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use candlewick_runtime::exit::ExitCode;
use jiff::Timestamp;
use serde_json::{Map, Value, json};

use self::api::{WandbRow, WandbRun};
use self::files::{FileFields, WandbFile, WandbFolder, items, step_of};
use self::records::{WandbRunRecord, WandbTimestamp};
use super::http::HttpClient;
use super::uploader::Uploader;
use crate::metrics::console::Terminal;
use crate::metrics::description::{RunDescription, base36};
use crate::metrics::earlier_files::unused_name;
use crate::metrics::host::HostInfo;
use crate::metrics::jsonl::records_until;
use crate::metrics::tracker::{MetricsRecord, RecordKind, RunStart, Tracker};
use crate::metrics::tracking_plan::{Credentials, WandbMode, WandbPlan};

/// Logs a run to Weights and Biases.
#[derive(Debug)]
pub(super) struct Wandb {
    plan: WandbPlan,
    metrics_path: Option<PathBuf>,
    terminal: Terminal,
    folder: Option<PathBuf>,
    file: Option<WandbFile>,
    uploader: Option<Uploader<WandbRow>>,
    /// The step whose records are collected.
    step: usize,
    /// True if the row of that step is written. Later records of the step join the next row.
    is_written: bool,
    /// The metrics of that step.
    row: FileFields,
    /// The time of the last of them.
    row_time: Timestamp,
    /// The last value of each metric.
    summary: FileFields,
    started: Instant,
    /// The running time of earlier processes.
    before: Duration,
}

impl Wandb {
    /// Returns a tracker with the settings of `plan`. The metrics file has the records of earlier processes.
    pub(super) fn new(plan: &WandbPlan, metrics_path: Option<PathBuf>, terminal: Terminal) -> Self {
        Self {
            plan: plan.clone(),
            metrics_path,
            terminal,
            folder: None,
            file: None,
            uploader: None,
            step: 0,
            is_written: false,
            row: Map::new(),
            row_time: Timestamp::now(),
            summary: Map::new(),
            started: Instant::now(),
            before: Duration::ZERO,
        }
    }

    fn runtime(&self) -> f64 {
        (self.before + self.started.elapsed()).as_secs_f64()
    }

    /// Returns the run folder and the id of the W&B run: those of an earlier process of the run, or new ones.
    fn run_folder(&self, run: &RunDescription) -> (Option<WandbFolder>, String) {
        // The output folder of an earlier process may have had another name.
        let is_own = |run_id: &str| match &self.plan.run_id {
            Some(own) => run_id == own,
            None => run_id.starts_with(&format!("{}-", base36(run.run_id))),
        };
        let run_id = self.plan.run_id.clone().unwrap_or_else(|| run.unique_id());
        let Some(parent) = &self.plan.folder else { return (None, run_id) };
        if let Some(found) = WandbFolder::find(parent, is_own) {
            let run_id = found.run_id.clone();
            return (Some(found), run_id);
        }
        let start = Timestamp::from_millisecond(run.run_id as i64).unwrap_or_default();
        let prefix = if self.plan.mode == WandbMode::Offline { "offline-" } else { "" };
        let name = format!("{prefix}run-{}-{run_id}", start.strftime("%Y%m%d_%H%M%S"));
        (Some(WandbFolder { path: parent.join(name), run_id: run_id.clone() }), run_id)
    }

    /// Opens the file of a run folder, and reads the summary and the running time of earlier processes from it.
    fn open_file(&mut self, folder: &WandbFolder, start: RunStart, record: &WandbRunRecord) -> io::Result<WandbFile> {
        if start == RunStart::Fresh && folder.path.exists() {
            fs::rename(&folder.path, unused_name(&folder.path))?;
        }
        let mut rows = folder.rows(start.step() as i64);
        if let (RunStart::Resumed(step), Some(path)) = (start, &self.metrics_path) {
            rows.extend(rows_after(rows.last(), &records_until(path, step)));
        }
        rows.iter().for_each(|row| self.summary.extend(row.clone()));
        let runtime = self.summary.get("_runtime").and_then(Value::as_f64).unwrap_or(0.0);
        self.before = Duration::try_from_secs_f64(runtime).unwrap_or_default();
        WandbFile::create(folder, record, &rows)
    }

    /// Starts the upload. `earlier` has the rows of earlier processes.
    fn upload(
        &self,
        run_id: &str,
        record: &WandbRunRecord,
        config: &FileFields,
        earlier: Option<(WandbFolder, i64)>,
    ) -> Option<Uploader<WandbRow>> {
        let api_key = self.plan.api_key.clone().filter(|_| self.plan.mode == WandbMode::Online)?;
        let credentials = Credentials::Basic { username: "api".to_owned(), password: api_key };
        let client = HttpClient::new(&self.plan.base_url, credentials)
            .inspect_err(|error| tracing::warn!("W&B: failed to start the upload: {error}; {}", self.advice()))
            .ok()?;
        // W&B's clients regard a run without the telemetry `t` as not started.
        let internal = json!({"value": {"t": {}}});
        let values = config.iter().map(|(key, value)| (key.clone(), json!({"desc": null, "value": value})));
        let config: FileFields = values.chain([("_wandb".to_owned(), internal)]).collect();
        let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        let description = json!({
            "displayName": text(&record.display_name),
            "groupName": text(&record.run_group),
            "jobType": text(&record.job_type),
            "notes": text(&record.notes),
            "tags": record.tags,
            "host": text(&record.host),
            "program": "trainer",
            "config": json!(config).to_string(),
        });
        let remote = WandbRun {
            client,
            app_url: self.plan.base_url.replace("//api.wandb.ai", "//wandb.ai"),
            entity: self.plan.entity.clone(),
            project: self.plan.project.clone(),
            description,
            run_id: run_id.to_owned(),
            summary: self.summary.clone(),
            earlier,
            opened: None,
        };
        Uploader::start("W&B", remote, self.terminal.clone(), self.advice())
    }

    fn advice(&self) -> String {
        self.folder.as_ref().map_or_else(
            || "the run has no output folder, so its W&B metrics are lost".to_owned(),
            |folder| format!("upload the run with `wandb sync {}`", folder.display()),
        )
    }

    /// Writes and sends the row of the step, unless it is written.
    fn write_row(&mut self) {
        if self.row.is_empty() || self.is_written {
            return;
        }
        self.is_written = true;
        let mut fields = std::mem::take(&mut self.row);
        fields.extend(position(self.step, self.row_time, self.runtime()));
        self.summary.extend(fields.clone());
        if let Some(uploader) = &self.uploader {
            uploader.push(WandbRow(json!(fields).to_string()));
        }
        let summary = &self.summary;
        let written = self.file.as_mut().map_or(Ok(()), |file| file.append_row(&fields, summary));
        self.disable_file_after(written);
    }

    /// Warns of an error and closes the file.
    fn disable_file_after(&mut self, written: io::Result<()>) {
        if let Err(error) = written {
            let folder = self.folder.clone().unwrap_or_default();
            tracing::warn!("W&B's files are disabled: failed to write {}: {error}", folder.display());
            self.file = None;
        }
    }
}

impl Tracker for Wandb {
    fn destination(&self) -> PathBuf {
        self.folder.clone().unwrap_or_default()
    }

    fn describe(&mut self, start: RunStart, run: &RunDescription) -> io::Result<()> {
        let (folder, run_id) = self.run_folder(run);
        self.folder = folder.as_ref().map(|folder| folder.path.clone());
        let config = run.parameters_by_name();
        let record = run_record(&self.plan, &run_id, run, &config);
        (self.step, self.is_written) = (start.step(), start != RunStart::Fresh);
        let created = folder.as_ref().map(|folder| self.open_file(folder, start, &record)).transpose();
        let created = created.map(|file| self.file = file);
        self.disable_file_after(created);
        let earlier = folder.filter(|_| start != RunStart::Fresh).map(|folder| (folder, start.step() as i64));
        self.uploader = self.upload(&run_id, &record, &config, earlier);
        if self.uploader.is_none() {
            self.terminal.line(&format!("W&B: offline; {}", self.advice()));
        }
        Ok(())
    }

    fn log(&mut self, record: &MetricsRecord) -> io::Result<()> {
        if record.kind == RecordKind::Step && record.step > self.step {
            self.write_row();
            (self.step, self.is_written) = (record.step, false);
        }
        self.row.extend(fields_of(record));
        self.row_time = record.time;
        // A process that resumes after this checkpoint needs the row of its step.
        if record.kind == RecordKind::Checkpoint {
            self.write_row();
        }
        Ok(())
    }

    fn finish(&mut self, code: ExitCode) -> io::Result<()> {
        self.write_row();
        let runtime = self.runtime();
        let summary = &self.summary;
        let finished = self.file.as_mut().map_or(Ok(()), |file| file.finish(code, runtime, summary));
        self.disable_file_after(finished);
        if let Some(uploader) = &self.uploader {
            uploader.finish(code);
        }
        Ok(())
    }

    fn wait(&mut self) {
        if let Some(uploader) = self.uploader.take() {
            uploader.wait();
        }
    }
}

/// Returns the metrics and the texts of a record.
fn fields_of(record: &MetricsRecord) -> FileFields {
    let scalars = record.scalars().into_iter().map(|(name, value)| (name, json!(value)));
    scalars.chain(record.texts().into_iter().map(|(name, text)| (name, json!(text)))).collect()
}

/// Returns the fields of a row that are no metrics: its step, its time, and the running time of the run in seconds.
fn position(step: usize, time: Timestamp, runtime: f64) -> FileFields {
    let timestamp = time.as_millisecond() as f64 / 1e3;
    let fields = [("_step", json!(step)), ("_timestamp", json!(timestamp)), ("_runtime", json!(runtime))];
    fields.map(|(name, value)| (name.to_owned(), value)).into_iter().collect()
}

/// Returns the rows of the steps after the row `last`, made of the records of a metrics file. A process may have been killed
/// between its checkpoint and the row of that step.
fn rows_after(last: Option<&FileFields>, records: &[MetricsRecord]) -> Vec<FileFields> {
    let number = |name: &str| last.and_then(|row| row.get(name)?.as_f64());
    let last_step = last.and_then(step_of).unwrap_or(-1);
    let runtime = |time: Timestamp| {
        let since = number("_timestamp").map_or(0.0, |last| time.as_millisecond() as f64 / 1e3 - last);
        number("_runtime").unwrap_or(0.0) + since.max(0.0)
    };
    let mut rows: BTreeMap<usize, FileFields> = BTreeMap::new();
    for record in records.iter().filter(|record| record.step as i64 > last_step) {
        let row = rows.entry(record.step).or_default();
        row.extend(fields_of(record));
        row.extend(position(record.step, record.time, runtime(record.time)));
    }
    rows.into_values().collect()
}

fn run_record(plan: &WandbPlan, run_id: &str, run: &RunDescription, config: &FileFields) -> WandbRunRecord {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let started = Duration::from_millis(run.run_id);
    WandbRunRecord {
        run_id: run_id.to_owned(),
        entity: text(&plan.entity),
        project: plan.project.clone(),
        config: Some(items(config)),
        run_group: text(&plan.group),
        job_type: text(&plan.job_type),
        display_name: plan.name.clone().unwrap_or_else(|| run.name.clone()),
        notes: text(&plan.notes),
        tags: plan.tags.clone(),
        host: HostInfo::this().name.unwrap_or_default(),
        start_time: Some(WandbTimestamp { seconds: started.as_secs() as i64, nanos: started.subsec_nanos() as i32 }),
    }
}
