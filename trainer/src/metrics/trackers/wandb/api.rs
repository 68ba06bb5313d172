//! W&B's HTTP API: GraphQL for the run, and a stream of lines for its metrics.

use std::time::{Duration, Instant};

use candlewick_runtime::exit::ExitCode;
use serde_json::{Value, json};

use super::files::{FileFields, WandbFolder, step_of};
use crate::metrics::trackers::http::{HttpClient, UploadError, into_field};
use crate::metrics::trackers::uploader::{RemoteRun, UploadRow};

/// The metrics of a step as a line of W&B's history.
#[derive(Clone, Debug)]
pub(super) struct WandbRow(pub(super) String);

impl UploadRow for WandbRow {
    fn n_bytes(&self) -> usize {
        self.0.len()
    }
}

/// A run on a W&B server.
#[derive(Debug)]
pub(super) struct WandbRun {
    pub(super) client: HttpClient,
    /// The URL of the pages for users.
    pub(super) app_url: String,
    pub(super) entity: Option<String>,
    pub(super) project: String,
    /// The variables of `upsertBucket` that describe the run.
    pub(super) description: Value,
    pub(super) run_id: String,
    /// The last value of each metric.
    pub(super) summary: FileFields,
    /// The run folder, whose rows up to a step earlier processes have written.
    pub(super) earlier: Option<(WandbFolder, i64)>,
    /// The position of the run on the server, once it is open.
    pub(super) opened: Option<OpenedWandbRun>,
}

/// The position of an open run on the server.
#[derive(Debug)]
pub(super) struct OpenedWandbRun {
    /// The path of the stream.
    path: String,
    /// Lines of history that the server has.
    n_lines: u64,
    /// The last step that the server has.
    last_step: i64,
    /// The time of the last request.
    sent: Instant,
}

/// The time between requests of a run without metrics. W&B regards a silent run as crashed after several minutes.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(30);

const RESUME_STATUS: &str = "query RunResumeStatus($project: String, $entity: String, $name: String!) { \
model(name: $project, entityName: $entity) { bucket(name: $name, missingOk: true) { \
historyLineCount historyTail } } }";

const UPSERT_BUCKET: &str = "mutation UpsertBucket($name: String, $project: String, $entity: String, $groupName: String, \
$displayName: String, $notes: String, $config: JSONString, $host: String, $jobType: String, $program: String, \
$tags: [String!]) { upsertBucket(input: { name: $name, modelName: $project, entityName: $entity, groupName: $groupName, \
displayName: $displayName, notes: $notes, config: $config, host: $host, jobType: $jobType, jobProgram: $program, \
tags: $tags }) { bucket { name project { name entity { name } } } inserted } }";

impl RemoteRun for WandbRun {
    type Row = WandbRow;

    fn open(&mut self) -> Result<String, UploadError> {
        let (n_lines, last_step) = self.resume_status()?;
        let mut variables = self.description.clone();
        variables["name"] = json!(self.run_id);
        variables["project"] = json!(self.project);
        variables["entity"] = json!(self.entity);
        let data = self.graphql("UpsertBucket", UPSERT_BUCKET, variables)?;
        let project = &data["upsertBucket"]["bucket"]["project"];
        let name = |value: &Value| value.as_str().map(str::to_owned);
        let entity = name(&project["entity"]["name"]).ok_or_else(|| UploadError::unexpected("entity"))?;
        let project = name(&project["name"]).unwrap_or_else(|| self.project.clone());
        let path = format!("/files/{entity}/{project}/{}/file_stream", self.run_id);
        self.opened = Some(OpenedWandbRun { path, n_lines, last_step, sent: Instant::now() });
        self.send_earlier_rows()?;
        Ok(format!("{}/{entity}/{project}/runs/{}", self.app_url, self.run_id))
    }

    fn send(&mut self, rows: &[WandbRow]) -> Result<(), UploadError> {
        let rows: Vec<FileFields> = rows.iter().filter_map(|row| serde_json::from_str(&row.0).ok()).collect();
        self.stream(&rows)
    }

    fn close(&mut self, code: ExitCode) -> Result<(), UploadError> {
        let mut end = json!({"complete": true, "exitcode": code as u8});
        if code == ExitCode::Preempted {
            end["preempting"] = json!(true);
        }
        self.post(&end).map(drop)
    }
}

impl WandbRun {
    /// Returns the lines of history and the last step that the server has.
    fn resume_status(&self) -> Result<(u64, i64), UploadError> {
        let variables = json!({"project": self.project, "entity": self.entity, "name": self.run_id});
        let data = self.graphql("RunResumeStatus", RESUME_STATUS, variables)?;
        let bucket = &data["model"]["bucket"];
        let n_lines = bucket["historyLineCount"].as_u64().unwrap_or(0);
        let tail: Vec<String> =
            bucket["historyTail"].as_str().and_then(|tail| serde_json::from_str(tail).ok()).unwrap_or_default();
        let last: Option<FileFields> = tail.last().and_then(|line| serde_json::from_str(line).ok());
        Ok((n_lines, last.as_ref().and_then(step_of).unwrap_or(-1)))
    }

    /// Sends the rows of earlier processes that the server did not receive.
    fn send_earlier_rows(&mut self) -> Result<(), UploadError> {
        const MAX_LINES: usize = 1_000;
        let Some((folder, last_step)) = &self.earlier else { return Ok(()) };
        let rows = folder.rows(*last_step);
        rows.chunks(MAX_LINES).try_for_each(|rows| self.stream(rows))?;
        self.earlier = None;
        Ok(())
    }

    /// Appends rows to the server's history, except those of steps that it has, and updates its summary.
    fn stream(&mut self, rows: &[FileFields]) -> Result<(), UploadError> {
        let Some(OpenedWandbRun { n_lines, last_step, sent, .. }) = &self.opened else { return Ok(()) };
        let is_new = |row: &&FileFields| step_of(row).is_some_and(|step| step > *last_step);
        let new: Vec<&FileFields> = rows.iter().filter(is_new).collect();
        if new.is_empty() && sent.elapsed() < HEARTBEAT_INTERVAL {
            return Ok(());
        }
        let mut body = json!({});
        if !new.is_empty() {
            new.iter().for_each(|row| self.summary.extend((*row).clone()));
            let lines: Vec<String> = new.iter().map(|row| json!(row).to_string()).collect();
            body["files"] = json!({
                "wandb-history.jsonl": {"offset": n_lines, "content": lines},
                "wandb-summary.json": {"offset": 0, "content": [json!(self.summary).to_string()]},
            });
        }
        self.post(&body)?;
        let (n_new, new_last_step) = (new.len() as u64, new.last().and_then(|row| step_of(row)));
        if let Some(opened) = &mut self.opened {
            opened.sent = Instant::now();
            opened.n_lines += n_new;
            opened.last_step = new_last_step.unwrap_or(opened.last_step);
        }
        Ok(())
    }

    fn post(&self, body: &Value) -> Result<Value, UploadError> {
        let path = self.opened.as_ref().map_or("", |opened| &opened.path);
        self.client.post(path, body)
    }

    /// Runs an operation and returns its data.
    fn graphql(&self, name: &str, query: &str, variables: Value) -> Result<Value, UploadError> {
        let body = json!({"operationName": name, "query": query, "variables": variables});
        let response = self.client.post("/graphql", &body)?;
        match response["errors"][0]["message"].as_str() {
            Some(message) => {
                let reason = format!("{name}: {message}");
                Err(self.client.redacted(UploadError::Refused { status: 200, reason }))
            }
            None => Ok(into_field(response, "data")),
        }
    }
}
