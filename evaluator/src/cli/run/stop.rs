//! Stop of `evaluator run` by a signal, with the responses so far in the response cache.

use std::path::Path;

use anyhow::{Context, Result};
use candlewick_inference::ranks::EvalRanks;
use candlewick_runtime::exit::ExitCode;
use candlewick_runtime::stop_signals::{LastSignal, SignalReaction, stop_signals};
use candlewick_runtime::terminal::print_note;

/// Watch for the stop signals of an evaluation whose responses are cached.
pub(super) struct StopSignalWatch<'a> {
    signal: LastSignal,
    folder: &'a Path,
}

impl<'a> StopSignalWatch<'a> {
    /// Installs the handlers. `folder` is the response cache.
    pub(super) fn watch(folder: &'a Path) -> Result<Self> {
        let signal = LastSignal::watch(&stop_signals()).context("failed to watch for signals")?;
        Ok(Self { signal, folder })
    }

    /// Returns true after a signal.
    pub(super) fn is_requested(&self) -> bool {
        self.signal.number().is_some()
    }

    /// Lets later signals end the process at once.
    pub(super) fn end_at_once(&self) {
        self.signal.set_reaction(SignalReaction::EndAtOnce);
    }

    /// Prints the reason of the stop on the first rank, and returns the exit code.
    pub(super) fn finish(&self, ranks: &EvalRanks) -> ExitCode {
        if ranks.process.is_first() {
            let signal = self.signal.name().unwrap_or("a signal to another rank");
            let folder = self.folder.display();
            print_note(&format!("stopped by {signal}: the same command continues from the responses in {folder}"));
        }
        ExitCode::Preempted
    }
}
