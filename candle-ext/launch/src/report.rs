//! The failure report: the first failed worker, its exit reason, its error file and its last lines of stderr.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error_file::ErrorFile;
use crate::exit::ExitReason;
use crate::worker_group::WorkerExit;

/// The root cause of a failure: the worker that failed first.
#[derive(Clone, Debug)]
pub struct RootCause {
    /// Global rank.
    pub rank: usize,
    /// Local rank.
    pub local_rank: usize,
    /// Process ID.
    pub pid: i32,
    /// Host name of this node.
    pub hostname: String,
    /// Exit reason.
    pub reason: ExitReason,
    /// Number of the attempt.
    pub attempt: usize,
    /// Time from the start of the attempt to the failure.
    pub elapsed: Duration,
    /// Contents of its error file.
    pub error: Option<ErrorFile>,
    /// Last lines of its stderr, shown without a traceback.
    pub stderr_tail: Vec<String>,
    /// Its log directory, if that contains files.
    pub logs: Option<PathBuf>,
    /// Ranks and exits of the other workers.
    pub other_exits: Vec<(usize, WorkerExit)>,
}

impl RootCause {
    /// Returns the report as a block of lines.
    pub fn text(&self) -> String {
        let mut text = format!("launch: rank {} failed first\n", self.rank);
        let mut row = |name: &str, value: String| {
            let _ = writeln!(text, "  {name:<9}{}", value.replace('\n', "\n           "));
        };
        row("ended by", self.exit_description());
        row("process", format!("{} on {}, local rank {}", self.pid, self.hostname, self.local_rank));
        row("attempt", format!("{}, after {:.1} s", self.attempt, self.elapsed.as_secs_f64()));
        if let Some(error) = &self.error {
            row("error", error.message.trim_end().to_owned());
            if let Some(traceback) = &error.traceback {
                row("where", traceback.trim_end().to_owned());
            }
        }
        let is_explained = self.error.as_ref().is_some_and(|error| error.traceback.is_some());
        if !self.stderr_tail.is_empty() && !is_explained {
            row("stderr", self.stderr_tail.join("\n"));
        }
        if let Some(logs) = &self.logs {
            row("logs", logs.display().to_string());
        }
        if !self.other_exits.is_empty() {
            row("others", self.describe_others());
        }
        text
    }

    fn exit_description(&self) -> String {
        let hint = match self.reason {
            ExitReason::Signal(9) => {
                ": not sent by this launcher; the kernel sends it when memory runs out (see dmesg)"
            }
            ExitReason::Signal(7) => ": /dev/shm or the disk of a mapped file is full, or the file was truncated",
            ExitReason::Code(126 | 127) => ": the program could not be started",
            _ => "",
        };
        format!("{}{hint}", self.reason)
    }

    fn describe_others(&self) -> String {
        let one = |(rank, exit): &(usize, WorkerExit)| match exit.is_failure() {
            true => format!("rank {rank} failed too: {}", exit.reason),
            false => format!("rank {rank} was stopped: {}", exit.reason),
        };
        const MOST: usize = 8;
        let mut lines: Vec<_> = self.other_exits.iter().take(MOST).map(one).collect();
        if self.other_exits.len() > MOST {
            lines.push(format!("and {} more", self.other_exits.len() - MOST));
        }
        lines.join("\n")
    }
}

/// Returns the last lines of a log file.
pub fn file_tail(path: &Path) -> Vec<String> {
    const MOST_BYTES: u64 = 8192;
    const MOST_LINES: usize = 20;
    let read = || {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(MOST_BYTES)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map(|_| String::from_utf8_lossy(&bytes).into_owned())
    };
    // A missing file has no lines.
    let text = read().unwrap_or_else(|_: std::io::Error| String::new());
    let lines: Vec<_> = text.lines().map(str::to_owned).collect();
    lines[lines.len().saturating_sub(MOST_LINES)..].to_vec()
}
