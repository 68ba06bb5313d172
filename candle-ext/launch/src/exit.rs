//! Exit reasons of workers, and the exit codes of `launch`.

use std::fmt;

use rustix::process::WaitIdStatus;
use signal_hook::low_level::signal_name;

/// The exit code or the signal that ended a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitReason {
    /// The process exited with this code.
    Code(i32),
    /// This signal killed the process.
    Signal(i32),
}

/// Exit code: every worker exited with 0.
pub const OK: i32 = 0;
/// Exit code: the launcher failed, for example because a port is in use or a node is missing.
pub const FAILED: i32 = 1;
/// Exit code: the command line is invalid. Nothing was started.
pub const USAGE: i32 = 2;
/// Exit code: workers of another node failed. The trainer's ranks use it to report a failed peer.
pub const PEER: i32 = 7;
/// Exit code: the workers stopped on request and saved a checkpoint. The same command resumes.
pub const PREEMPTED: i32 = 75;

impl ExitReason {
    /// Returns the exit reason of a `waitid` status, or `None` if the process has not exited.
    pub fn of(status: WaitIdStatus) -> Option<Self> {
        let code = status.exit_status().map(Self::Code);
        code.or_else(|| status.terminating_signal().map(Self::Signal))
    }

    /// Returns the exit code as a shell reports it: the code, or 128 + the signal.
    pub fn code(self) -> i32 {
        match self {
            ExitReason::Code(code) => code,
            ExitReason::Signal(signal) => 128 + signal,
        }
    }
}

impl fmt::Display for ExitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExitReason::Code(code) => write!(f, "exit code {code}"),
            ExitReason::Signal(signal) => write!(f, "signal {signal} ({})", signal_name(*signal).unwrap_or("?")),
        }
    }
}
