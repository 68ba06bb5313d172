//! The status of a run: in progress, finished, stopped or failed.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::SystemTime;

use serde::Serialize;

use super::saved_run::SavedRun;
use crate::exit::ExitCode;
use crate::metrics::clock;

/// Status of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "status", rename_all = "snake_case")]
pub enum RunStatus {
    /// The run has no files yet.
    Waiting,
    /// The run loads its data and its model.
    Starting,
    /// The run trains.
    Running,
    /// The run has no end, and it does not update run.json. It may have been killed.
    Silent {
        /// Seconds since the last update.
        seconds: f64,
    },
    /// The run succeeded.
    Finished {
        /// Reason of the end.
        reason: String,
    },
    /// A signal or the stop file stopped the run.
    Stopped {
        /// Reason of the end.
        reason: String,
    },
    /// The run failed.
    Failed {
        /// Exit code of the process.
        code: u64,
        /// Error.
        reason: String,
    },
    /// The run has no run.json.
    Unknown,
}

/// Seconds without an update after which a run is silent, unless its steps take longer.
const SILENT_SECONDS: f64 = 60.0;
/// Step times without an update after which a run is silent.
const SILENT_STEPS: f64 = 10.0;

impl RunStatus {
    /// Returns the status of a run with this run.json at `now`. `step_time` is the seconds of a step.
    pub(super) fn of(saved: &SavedRun, folder: &Path, step_time: f64, now: SystemTime) -> Self {
        if let Some(code) = saved.count("/exit/code") {
            let reason = saved.text("/exit/reason").unwrap_or_default().to_owned();
            let is_stopped = code == ExitCode::Preempted as u64 || reason.starts_with("stopped by ");
            return match code {
                _ if is_stopped => Self::Stopped { reason },
                0 => Self::Finished { reason },
                _ => Self::Failed { code, reason },
            };
        }
        let seconds = saved.age_seconds(now).unwrap_or(0.0);
        let is_silent = seconds > SILENT_SECONDS.max(SILENT_STEPS * step_time);
        match saved.value("/run") {
            _ if is_silent && !is_locked(folder) => Self::Silent { seconds },
            None => Self::Starting,
            Some(_) => Self::Running,
        }
    }

    /// Returns true if the run may still write metrics.
    pub fn is_in_progress(&self) -> bool {
        matches!(self, Self::Waiting | Self::Starting | Self::Running | Self::Silent { .. } | Self::Unknown)
    }

    /// Returns the status in one or two words.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Silent { .. } => "no update",
            Self::Finished { .. } => "finished",
            Self::Stopped { .. } => "stopped",
            Self::Failed { .. } => "failed",
            Self::Unknown => "unknown",
        }
    }

    /// Returns the reason of the status.
    pub fn reason(&self) -> String {
        match self {
            Self::Waiting => "the run has no files yet".to_owned(),
            Self::Starting => "loading data and model".to_owned(),
            Self::Running => String::new(),
            Self::Silent { seconds } => {
                format!("for {}, and no end in run.json: the process may have been killed", clock(*seconds))
            }
            Self::Finished { reason } | Self::Stopped { reason } => reason.clone(),
            Self::Failed { code, reason } => format!("exit code {code}: {reason}"),
            Self::Unknown => "there is no run.json".to_owned(),
        }
    }
}

/// Returns true if a process that this one can see holds the lock of a run's folder.
///
/// It reads the kernel's list: a lock of its own could make a run fail that starts at the same time.
fn is_locked(folder: &Path) -> bool {
    let Ok(metadata) = fs::metadata(folder.join(".lock")) else { return false };
    let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
    locks.lines().any(|line| inode_of(line) == Some(metadata.ino()))
}

/// Returns the inode in a line such as `1: FLOCK  ADVISORY  WRITE 23023 00:3a:1234567 0 EOF`.
fn inode_of(line: &str) -> Option<u64> {
    let mut words = line.split_whitespace().skip_while(|word| *word != "FLOCK");
    words.nth(4)?.rsplit(':').next()?.parse().ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::time::Duration;

    /// Checks the status ten minutes after the last update.
    #[track_caller]
    fn check(saved: Value, step_time: f64, want: &RunStatus) {
        let folder = tempfile::tempdir().unwrap();
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(600);
        let mut saved = saved;
        saved["updated_at"] = json!("1970-01-01T00:00:00Z");
        assert_eq!(RunStatus::of(&saved.into(), folder.path(), step_time, now), *want);
    }

    #[test]
    fn the_exit_decides_between_finished_stopped_and_failed() {
        let of = |code: u8, reason: &str| json!({"exit": {"code": code, "reason": reason}});
        let text = |text: &str| text.to_owned();
        let finished = |reason: &str| RunStatus::Finished { reason: text(reason) };
        check(of(0, "all steps are done"), 1.0, &finished("all steps are done"));
        check(of(0, "exit_iteration was reached"), 1.0, &finished("exit_iteration was reached"));
        check(of(75, "stopped by SIGTERM"), 1.0, &RunStatus::Stopped { reason: text("stopped by SIGTERM") });
        check(of(1, "stopped by SIGINT"), 1.0, &RunStatus::Stopped { reason: text("stopped by SIGINT") });
        check(of(5, "the loss is NaN"), 1.0, &RunStatus::Failed { code: 5, reason: text("the loss is NaN") });
    }

    #[test]
    fn a_run_without_updates_may_have_been_killed_unless_its_steps_take_long() {
        check(json!({"exit": null, "run": {}}), 1.0, &RunStatus::Silent { seconds: 600.0 });
        check(json!({"exit": null, "run": {}}), 61.0, &RunStatus::Running);
        check(json!({"exit": null, "run": null}), 61.0, &RunStatus::Starting);
    }

    #[test]
    fn a_locked_folder_has_a_run() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!is_locked(folder.path()));
        let lock = fs::File::create(folder.path().join(".lock")).unwrap();
        assert!(!is_locked(folder.path()));
        lock.try_lock().unwrap();
        assert!(is_locked(folder.path()));
        let line = "21: FLOCK  ADVISORY  WRITE 23023 00:3a:1234567 0 EOF";
        assert_eq!([inode_of(line), inode_of("21: -> POSIX  ADVISORY  READ 5 00:1:7 0 EOF")], [Some(1_234_567), None]);
    }
}
