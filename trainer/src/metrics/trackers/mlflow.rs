//! MLflow's REST API.
//!
//! A resumed run continues the MLflow run with its id in the tag `candlewick.run_id`. It sends the records of metrics.jsonl
//! that the server did not receive. Values of steps that the server has are not sent again.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use candlewick_runtime::exit::ExitCode;
use serde_json::{Map, Value, json};

use super::http::{HttpClient, UploadError, into_field};
use super::uploader::{RemoteRun, UploadRow, Uploader};
use crate::metrics::console::Terminal;
use crate::metrics::description::RunDescription;
use crate::metrics::host::HostInfo;
use crate::metrics::jsonl::records_until;
use crate::metrics::tracker::{MetricsRecord, RunStart, Tracker};
use crate::metrics::tracking_plan::MlflowPlan;

const API: &str = "/api/2.0/mlflow";
const RUN_ID_TAG: &str = "candlewick.run_id";
/// Limits of `runs/log-batch`.
const MAX_METRICS: usize = 1_000;
const MAX_PARAMS: usize = 100;
const MAX_PARAM_CHARS: usize = 6_000;
const MAX_TAGS: usize = 100;
/// Limit of older servers.
const MAX_TAG_CHARS: usize = 5_000;

/// Logs a run to an MLflow server.
#[derive(Debug)]
pub(super) struct Mlflow {
    plan: MlflowPlan,
    metrics_path: Option<PathBuf>,
    terminal: Terminal,
    uploader: Option<Uploader<MlflowRow>>,
}

/// A value of a metric at a step.
#[derive(Clone, Debug, PartialEq)]
struct MlflowMetric {
    key: String,
    value: f64,
    /// Milliseconds since 1970.
    timestamp: u64,
    step: usize,
}

/// The metrics of a record, and its texts as tags.
#[derive(Clone, Debug, Default, PartialEq)]
struct MlflowRow {
    metrics: Vec<MlflowMetric>,
    /// Names and values.
    tags: Vec<(String, String)>,
}

impl UploadRow for MlflowRow {
    fn n_bytes(&self) -> usize {
        let metrics: usize = self.metrics.iter().map(|metric| size_of::<MlflowMetric>() + metric.key.len()).sum();
        metrics + self.tags.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>()
    }
}

impl Mlflow {
    /// Returns a tracker with the settings of `plan`. The metrics file has the records of earlier processes.
    pub(super) fn new(plan: &MlflowPlan, metrics_path: Option<PathBuf>, terminal: Terminal) -> Self {
        Self { plan: plan.clone(), metrics_path, terminal, uploader: None }
    }
}

impl Tracker for Mlflow {
    fn destination(&self) -> PathBuf {
        PathBuf::from(&self.plan.tracking_uri)
    }

    fn describe(&mut self, start: RunStart, run: &RunDescription) -> io::Result<()> {
        let client = match HttpClient::new(&self.plan.tracking_uri, self.plan.credentials.clone()) {
            Ok(client) => client,
            Err(error) => {
                tracing::warn!("MLflow is disabled: {error}");
                return Ok(());
            }
        };
        let remote = MlflowRun {
            client,
            plan: self.plan.clone(),
            name: run.name.clone(),
            tag: run.unique_id(),
            start_time: run.run_id,
            params: params(run),
            earlier: self.metrics_path.clone().filter(|_| start != RunStart::Fresh).map(|path| (path, start.step())),
            opened: None,
        };
        let advice = "metrics.jsonl has all metrics".to_owned();
        self.uploader = Uploader::start("MLflow", remote, self.terminal.clone(), advice);
        Ok(())
    }

    fn log(&mut self, record: &MetricsRecord) -> io::Result<()> {
        if let Some(uploader) = &self.uploader {
            uploader.push(row_of(record));
        }
        Ok(())
    }

    fn finish(&mut self, code: ExitCode) -> io::Result<()> {
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

/// A run on an MLflow server.
struct MlflowRun {
    client: HttpClient,
    plan: MlflowPlan,
    name: String,
    /// The value of the tag with the run's id.
    tag: String,
    /// Milliseconds since 1970.
    start_time: u64,
    params: BTreeMap<String, String>,
    /// The metrics file, whose records up to a step earlier processes have written.
    earlier: Option<(PathBuf, usize)>,
    opened: Option<OpenedMlflowRun>,
}

/// The position of an open run on the server.
struct OpenedMlflowRun {
    run_id: String,
    /// The last step of each metric when the run was opened.
    last_steps: BTreeMap<String, u64>,
}

impl RemoteRun for MlflowRun {
    /// A record.
    type Row = MlflowRow;

    fn open(&mut self) -> Result<String, UploadError> {
        let run = self.find_or_create()?;
        let field = |name: &str| run["info"][name].as_str().map(str::to_owned);
        let run_id = field("run_id").ok_or_else(|| UploadError::unexpected("run.info.run_id"))?;
        self.post("runs/update", &json!({"run_id": run_id, "status": "RUNNING"}))?;
        self.log_params(&run_id, &run["data"]["params"])?;
        let experiment = field("experiment_id").unwrap_or_default();
        let url = format!("{}/#/experiments/{experiment}/runs/{run_id}", self.plan.tracking_uri.trim_end_matches('/'));
        let last_steps = last_steps(&run["data"]["metrics"]);
        self.opened = Some(OpenedMlflowRun { run_id, last_steps });
        if let Some((path, step)) = &self.earlier {
            let earlier: Vec<MlflowRow> = records_until(path, *step).iter().map(row_of).collect();
            self.send(&earlier)?;
        }
        Ok(url)
    }

    fn send(&mut self, rows: &[MlflowRow]) -> Result<(), UploadError> {
        let Some(OpenedMlflowRun { run_id, last_steps }) = &self.opened else { return Ok(()) };
        let is_new = |metric: &&MlflowMetric| last_steps.get(&metric.key).is_none_or(|last| metric.step as u64 > *last);
        let metrics = rows.iter().flat_map(|row| &row.metrics);
        let metrics: Vec<Value> = metrics.filter(is_new).map(MlflowMetric::json).collect();
        metrics.chunks(MAX_METRICS).try_for_each(|metrics| {
            self.post("runs/log-batch", &json!({"run_id": run_id, "metrics": metrics})).map(drop)
        })?;
        // A later value replaces an earlier one.
        let tags: BTreeMap<&String, &String> =
            rows.iter().flat_map(|row| &row.tags).map(|(key, value)| (key, value)).collect();
        let tags: Vec<Value> = tags.iter().map(|(key, value)| json!({"key": key, "value": value})).collect();
        tags.chunks(MAX_TAGS)
            .try_for_each(|tags| self.post("runs/log-batch", &json!({"run_id": run_id, "tags": tags})).map(drop))
    }

    fn close(&mut self, code: ExitCode) -> Result<(), UploadError> {
        let Some(OpenedMlflowRun { run_id, .. }) = &self.opened else { return Ok(()) };
        let status = match code {
            ExitCode::Ok => "FINISHED",
            ExitCode::Preempted => "KILLED",
            _ => "FAILED",
        };
        self.post("runs/update", &json!({"run_id": run_id, "status": status, "end_time": now()})).map(drop)
    }
}

impl MlflowRun {
    fn post(&self, endpoint: &str, body: &Value) -> Result<Value, UploadError> {
        self.client.post(&format!("{API}/{endpoint}"), body)
    }

    /// Returns the run of `MLFLOW_RUN_ID`, the run of an earlier process, or a new run.
    fn find_or_create(&self) -> Result<Value, UploadError> {
        if let Some(id) = &self.plan.run_id {
            return Ok(into_field(self.client.get(&format!("{API}/runs/get"), ("run_id", id))?, "run"));
        }
        let experiment = self.experiment()?;
        self.existing_run(&experiment)?.map_or_else(|| self.create_run(&experiment), Ok)
    }

    /// Returns the id of the experiment, which it creates if there is none.
    fn experiment(&self) -> Result<String, UploadError> {
        let name = &self.plan.experiment_name;
        let id = |value: &Value| value.as_str().map(str::to_owned);
        let found = self.client.get(&format!("{API}/experiments/get-by-name"), ("experiment_name", name));
        match found {
            Ok(found) => {
                id(&found["experiment"]["experiment_id"]).ok_or_else(|| UploadError::unexpected("experiment_id"))
            }
            Err(UploadError::Refused { status: 404, .. }) => {
                let created = self.post("experiments/create", &json!({"name": name}))?;
                id(&created["experiment_id"]).ok_or_else(|| UploadError::unexpected("experiment_id"))
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the MLflow run of an earlier process of this run.
    fn existing_run(&self, experiment: &str) -> Result<Option<Value>, UploadError> {
        let filter = format!("tags.`{RUN_ID_TAG}` = '{}'", self.tag);
        let body = json!({"experiment_ids": [experiment], "filter": filter, "max_results": 1});
        let mut runs = into_field(self.post("runs/search", &body)?, "runs");
        Ok(runs.get_mut(0).map(Value::take))
    }

    fn create_run(&self, experiment: &str) -> Result<Value, UploadError> {
        let host = HostInfo::this().name.unwrap_or_default();
        let tags = [(RUN_ID_TAG, self.tag.as_str()), ("mlflow.source.name", "trainer"), ("candlewick.host", &host)];
        let tags: Vec<Value> = tags.iter().map(|(key, value)| json!({"key": key, "value": value})).collect();
        let body = json!({
            "experiment_id": experiment,
            "run_name": self.name,
            "start_time": self.start_time,
            "tags": tags,
        });
        Ok(into_field(self.post("runs/create", &body)?, "run"))
    }

    /// Logs the parameters that the run does not have. A parameter of an MLflow run cannot change.
    fn log_params(&self, run_id: &str, existing: &Value) -> Result<(), UploadError> {
        let existing = existing.as_array().cloned().unwrap_or_default();
        let has = |name: &str| existing.iter().any(|param| param["key"] == name);
        let new = self.params.iter().filter(|(name, _)| !has(name));
        let new: Vec<Value> = new.map(|(key, value)| json!({"key": key, "value": value})).collect();
        new.chunks(MAX_PARAMS)
            .try_for_each(|params| self.post("runs/log-batch", &json!({"run_id": run_id, "params": params})).map(drop))
    }
}

impl MlflowMetric {
    fn json(&self) -> Value {
        json!({"key": self.key, "value": self.value, "timestamp": self.timestamp, "step": self.step})
    }
}

/// Returns the metrics and the texts of a record.
fn row_of(record: &MetricsRecord) -> MlflowRow {
    let (timestamp, step) = (record.time.as_millisecond().unsigned_abs(), record.step);
    let metric = |(name, value): (String, f64)| MlflowMetric { key: key(&name), value, timestamp, step };
    let tag = |(name, text): (String, String)| (key(&name), text.chars().take(MAX_TAG_CHARS).collect());
    let metrics = record.scalars().into_iter().map(metric).collect();
    MlflowRow { metrics, tags: record.texts().into_iter().map(tag).collect() }
}

/// Returns the description of a run as MLflow's parameters, which are texts.
fn params(run: &RunDescription) -> BTreeMap<String, String> {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let all: Map<String, Value> = run.parameters_by_name();
    all.iter().map(|(name, value)| (key(name), text(value).chars().take(MAX_PARAM_CHARS).collect())).collect()
}

/// Replaces the characters that MLflow does not accept in a name.
fn key(name: &str) -> String {
    let is_accepted = |c: char| c.is_ascii_alphanumeric() || "_-. /".contains(c);
    name.chars().map(|c| if is_accepted(c) { c } else { '_' }).collect()
}

/// Returns the last step of each metric of a run.
fn last_steps(metrics: &Value) -> BTreeMap<String, u64> {
    let last_step = |metric: &Value| Some((metric["key"].as_str()?.to_owned(), number(&metric["step"])?));
    metrics.as_array().into_iter().flatten().filter_map(last_step).collect()
}

/// Returns a number that JSON has as a number or, as protobuf's 64-bit integers, as a text.
fn number(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_str()?.parse().ok())
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}
