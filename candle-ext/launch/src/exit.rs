//! The end of a process, and the numbers that `launch` itself ends with.

use std::fmt;

use rustix::process::WaitIdStatus;
use signal_hook::low_level::signal_name;

/// The way in which a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitReason {
    /// By itself, with this code.
    Code(i32),
    /// By this signal.
    Signal(i32),
}

/// Every worker ended with 0.
pub const OK: i32 = 0;
/// The launcher failed: a port in use, a node that never came.
pub const FAILED: i32 = 1;
/// The command line is wrong. Nothing was started.
pub const USAGE: i32 = 2;
/// Workers of another node failed.
pub const PEER: i32 = 7;
/// The workers were asked to stop and did, with a checkpoint saved: the same command goes on.
pub const PREEMPTED: i32 = 75;

impl ExitReason {
    /// Returns how a process ended that was waited for, or `None` if it did not.
    pub fn of(status: WaitIdStatus) -> Option<Self> {
        let code = status.exit_status().map(Self::Code);
        code.or_else(|| status.terminating_signal().map(Self::Signal))
    }

    /// Returns what a shell would return: the code, or 128 + the signal.
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
