//! The contents of run.json, read for display. Every field may be missing: an older version may have written the file.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Result, anyhow};
use candlewick_text::files::{MAX_CONFIG_FILE_BYTES, read_regular_file};
use jiff::Timestamp;
use serde_json::Value;

use crate::data::TokenStats;
use crate::exit::ExitCode;

/// Contents of run.json.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SavedRun(Value);

impl SavedRun {
    /// Reads a run.json; `None` if there is none.
    pub fn read(path: &Path) -> Result<Option<Self>> {
        let bytes = match read_regular_file(path, MAX_CONFIG_FILE_BYTES) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(unreadable(path, &error.to_string())),
        };
        match serde_json::from_slice(&bytes) {
            Ok(value @ Value::Object(_)) => Ok(Some(Self(value))),
            Ok(_) => Err(unreadable(path, "it is not the run.json of a run")),
            Err(error) => Err(unreadable(path, &error.to_string())),
        }
    }

    /// Returns the value at a path of keys such as `/run/total_steps`, unless it is missing or null.
    pub fn value(&self, pointer: &str) -> Option<&Value> {
        self.0.pointer(pointer).filter(|value| !value.is_null())
    }

    /// Returns the text at a path of keys.
    pub fn text(&self, pointer: &str) -> Option<&str> {
        self.value(pointer)?.as_str()
    }

    /// Returns the count at a path of keys.
    pub fn count(&self, pointer: &str) -> Option<u64> {
        self.value(pointer)?.as_u64()
    }

    /// Returns the number at a path of keys.
    pub fn number(&self, pointer: &str) -> Option<f64> {
        self.value(pointer)?.as_f64()
    }

    /// Returns the notes of the run.
    pub fn notes(&self) -> impl Iterator<Item = &str> {
        self.value("/notes").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str)
    }

    /// Returns the token statistics.
    pub fn token_stats(&self) -> Option<TokenStats> {
        serde_json::from_value(self.value("/ledger")?.clone()).ok()
    }

    /// Returns the metrics file of the plan.
    pub fn metrics_path(&self) -> Option<PathBuf> {
        self.text("/plan/log/metrics_path").map(PathBuf::from)
    }

    /// Returns the seconds from the last update of the file to `now`.
    pub fn age_seconds(&self, now: SystemTime) -> Option<f64> {
        let updated: Timestamp = self.text("/updated_at")?.parse().ok()?;
        let now = Timestamp::try_from(now).ok()?;
        Some((now.as_millisecond() - updated.as_millisecond()).max(0) as f64 / 1e3)
    }
}

fn unreadable(path: &Path, reason: &str) -> anyhow::Error {
    let advice = "remove it, or name the metrics.jsonl of the run";
    anyhow!("failed to read {}: {reason}; {advice}", path.display()).context(ExitCode::Usage)
}

impl From<Value> for SavedRun {
    fn from(value: Value) -> Self {
        Self(value)
    }
}
