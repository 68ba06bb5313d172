//! How a Candlewick program ends: the exit codes that scripts and schedulers may rely on.

use std::fmt;
use std::process::Termination;

/// Says how a program ended. The numbers are an interface: they do not change.
///
/// It is an error too, so that a failure can carry its code up: `error.context(ExitCode::NonFinite)`. A second signal
/// during a run ends the process at once with 128 + its number; that never comes by here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ExitCode {
    /// Everything asked for was done.
    Ok = 0,
    /// Something failed that has no code of its own.
    Failed = 1,
    /// The command line or the recipe is wrong. Nothing was started.
    Usage = 2,
    /// The data, the tokenizer or the chat template are wrong or missing.
    Data = 3,
    /// Memory ran out.
    OutOfMemory = 4,
    /// A loss or a gradient was not finite.
    NonFinite = 5,
    /// A checkpoint cannot be read or written, or the disk is full.
    Checkpoint = 6,
    /// Another rank failed, or a collective did.
    Peer = 7,
    /// The run was asked to stop and did, with a checkpoint saved. Start it again to go on.
    Preempted = 75,
}

impl fmt::Display for ExitCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ExitCode::Ok => "done",
            ExitCode::Failed => "failed",
            ExitCode::Usage => "the command line or the recipe is wrong",
            ExitCode::Data => "the data cannot be used",
            ExitCode::OutOfMemory => "memory ran out",
            ExitCode::NonFinite => "a loss or a gradient was not finite",
            ExitCode::Checkpoint => "a checkpoint cannot be read or written",
            ExitCode::Peer => "another rank failed",
            ExitCode::Preempted => "stopped on request, with a checkpoint saved",
        })
    }
}

impl std::error::Error for ExitCode {}

impl From<ExitCode> for std::process::ExitCode {
    fn from(code: ExitCode) -> Self {
        std::process::ExitCode::from(code as u8)
    }
}

impl Termination for ExitCode {
    fn report(self) -> std::process::ExitCode {
        self.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_the_documented_ones() {
        use ExitCode::*;
        let codes = [Ok, Failed, Usage, Data, OutOfMemory, NonFinite, Checkpoint, Peer, Preempted];
        assert_eq!(codes.map(|code| code as u8), [0, 1, 2, 3, 4, 5, 6, 7, 75]);
    }
}
