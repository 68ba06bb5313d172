//! The file of the measurements: it is written before and after each case, and a later process continues it.
//!
//! A case that hangs or that ends the process is listed as failed by that later process. `scripts/gpu-check` starts it.

use std::io::{Error, Result};
use std::path::{Path, PathBuf};
use std::process::abort;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

/// Measurements of a device, in a file if there is one.
pub(crate) struct Progress {
    file: Option<PathBuf>,
    found: Value,
}

impl Progress {
    /// Starts a file with these fields.
    pub(crate) fn new(file: Option<PathBuf>, mut found: Value) -> Self {
        (found["rows"], found["failed"]) = (json!([]), json!([]));
        Self { file, found }
    }

    /// Continues an existing file. The case that ran when the process before ended has failed.
    pub(crate) fn resume(file: Option<PathBuf>, fields: Value) -> Result<Self> {
        let mut progress = Self::new(file, fields);
        let Some(found) = progress.file.as_deref().filter(|file| file.is_file()).map(read).transpose()? else {
            return Ok(progress);
        };
        progress.found = found;
        if let Some(case) = progress.take_running() {
            progress.push("failed", json!({ "case": case, "error": "the process ended, or the time limit of a case" }));
        }
        Ok(progress)
    }

    /// True if an earlier process has measured this case, or failed to.
    pub(crate) fn has(&self, case: &str) -> bool {
        ["rows", "failed"].iter().any(|list| self.list(list).iter().any(|item| item["case"] == case))
    }

    pub(crate) fn has_failures(&self) -> bool {
        !self.list("failed").is_empty()
    }

    pub(crate) fn begin(&mut self, case: &str) -> Result<()> {
        self.found["running"] = json!(case);
        self.write()
    }

    /// Adds the item of a case to the rows or to the failures.
    pub(crate) fn end(&mut self, list: &str, item: Value) -> Result<()> {
        self.take_running();
        self.push(list, item);
        self.write()
    }

    fn take_running(&mut self) -> Option<String> {
        self.found.as_object_mut()?.remove("running")?.as_str().map(str::to_owned)
    }

    fn list(&self, list: &str) -> &[Value] {
        self.found[list].as_array().map_or(&[], Vec::as_slice)
    }

    fn push(&mut self, list: &str, item: Value) {
        if let Some(list) = self.found[list].as_array_mut() {
            list.push(item);
        }
    }

    fn write(&self) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        std::fs::write(file, serde_json::to_string_pretty(&self.found)?)
            .map_err(|error| Error::other(format!("failed to write {}: {error}", file.display())))
    }
}

/// Reads a file of JSON.
pub(crate) fn read(file: &Path) -> Result<Value> {
    let value = std::fs::read(file).and_then(|text| Ok(serde_json::from_slice(&text)?));
    value.map_err(|error| Error::other(format!("failed to read {}: {error}", file.display())))
}

/// Runs a case, and aborts the process after the limit: a kernel that hangs cannot be ended otherwise.
pub(crate) fn within<T>(limit: Option<f64>, case: impl FnOnce() -> T) -> T {
    let Some(limit) = limit else { return case() };
    let (done, is_done) = channel::<()>();
    let watch = thread::spawn(move || {
        if is_done.recv_timeout(Duration::from_secs_f64(limit)) == Err(RecvTimeoutError::Timeout) {
            eprintln!("no result after {limit} s");
            abort();
        }
    });
    let result = case();
    drop(done);
    let _ = watch.join();
    result
}
