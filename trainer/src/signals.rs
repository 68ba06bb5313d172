//! Stop requests: SIGTERM, SIGINT, SIGHUP (a lost terminal), SIGUSR1 (Slurm's preemption notice) and the kill switch file.
//!
//! The preparation of the data stops at a request, the training loop handles one between two steps. In between, while the
//! model is loaded, a signal ends the process at once. So does a second SIGTERM or SIGINT, from half a second after the first.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use candlewick_runtime::exit::ExitCode;
pub use candlewick_runtime::stop_signals::SignalReaction;
use candlewick_runtime::stop_signals::{LastSignal, stop_signals};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::flag;

/// Watches for stop requests. Clones share their state.
#[derive(Clone, Debug)]
pub struct StopSignals {
    last: LastSignal,
    kill_switch: Option<PathBuf>,
}

/// A time limit for the reaction to a signal. It ends with this value.
#[derive(Debug)]
pub struct StopDeadline {
    is_over: Arc<AtomicBool>,
    watch: Option<JoinHandle<()>>,
}

/// The source of a stop request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopRequest {
    /// SIGTERM, SIGINT, SIGHUP or SIGUSR1: save a checkpoint and exit with the code for preemption.
    Signal(Signal),
    /// The kill switch file exists: save and end the run as if it were finished.
    KillSwitch(PathBuf),
}

/// The signals that request a stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// SIGTERM, from a scheduler or an administrator.
    Terminate,
    /// SIGINT: Ctrl-C.
    Interrupt,
    /// SIGHUP: the terminal is lost.
    HangUp,
    /// SIGUSR1, which Slurm's `--signal=USR1@90` sends before the time limit.
    Preempt,
}

impl StopSignals {
    /// Installs handlers for the signals for the rest of the process.
    pub fn install(kill_switch: Option<PathBuf>) -> io::Result<Self> {
        let signals: Vec<i32> = stop_signals().into_iter().chain([SIGUSR1]).collect();
        Ok(Self { last: LastSignal::watch(&signals)?, kill_switch })
    }

    /// Watches only the file, for a run inside a program that handles its own signals.
    pub fn without_signals(kill_switch: Option<PathBuf>) -> Self {
        Self { last: LastSignal::default(), kill_switch }
    }

    /// Sets the reaction to the next signals.
    pub fn set_reaction(&self, reaction: SignalReaction) {
        self.last.set_reaction(reaction);
    }

    /// Sets the immediate response to the first signal: the work that [`StopSignals::poll`] waits for may take minutes.
    pub fn respond_with(&self, response: impl Fn(Signal) + Send + 'static) {
        self.last.respond_with(move |number| {
            if let Some(signal) = Signal::of(number) {
                response(signal);
            }
        });
    }

    /// Ends the process with `code` if a signal was not handled after `limit`: the work that it waits for cannot be
    /// interrupted. Handled means that the returned value is dropped.
    pub fn deadline(&self, limit: Duration, code: ExitCode) -> io::Result<StopDeadline> {
        let is_over = Arc::new(AtomicBool::new(false));
        let (signals, over) = (self.clone(), is_over.clone());
        let watch = move || {
            let mut requested: Option<Instant> = None;
            while !over.load(Ordering::SeqCst) {
                if signals.signal().is_some() && requested.get_or_insert_with(Instant::now).elapsed() > limit {
                    std::process::exit(code as i32);
                }
                std::thread::park_timeout(Duration::from_millis(20));
            }
        };
        let watch = std::thread::Builder::new().name("stop-deadline".to_owned()).spawn(watch)?;
        Ok(StopDeadline { is_over, watch: Some(watch) })
    }

    /// Returns the stop request, if there is one. It costs one file lookup.
    pub fn poll(&self) -> Option<StopRequest> {
        let is_there = |path: &&Path| path.exists();
        match self.signal() {
            Some(signal) => Some(StopRequest::Signal(signal)),
            None => {
                let path = self.kill_switch.as_deref().filter(is_there);
                path.map(|path| StopRequest::KillSwitch(path.to_path_buf()))
            }
        }
    }

    /// Returns the last signal, if there was one.
    pub fn signal(&self) -> Option<Signal> {
        Signal::of(self.last.number()?)
    }
}

impl Signal {
    fn of(number: i32) -> Option<Self> {
        match number {
            SIGTERM => Some(Self::Terminate),
            SIGINT => Some(Self::Interrupt),
            SIGHUP => Some(Self::HangUp),
            SIGUSR1 => Some(Self::Preempt),
            _ => None,
        }
    }

    /// Describes the reaction to this signal: the `work` until the program ends, and the signals that end it at once.
    pub fn acknowledgement(self, work: &str) -> String {
        let again = match self {
            Self::Interrupt => "; Ctrl-C again ends at once",
            Self::Terminate => "; a second SIGTERM ends at once",
            Self::HangUp | Self::Preempt => "",
        };
        format!("{}: {work}{again}", StopRequest::Signal(self))
    }
}

impl Drop for StopDeadline {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        if let Some(watch) = self.watch.take() {
            watch.thread().unpark();
            let _ = watch.join();
        }
    }
}

/// Turns SIGXFSZ into a write error.
///
/// By default, the signal kills a process that exceeds the file size limit (`ulimit -f`).
pub fn ignore_file_size_signal() -> io::Result<()> {
    flag::register(SIGXFSZ, Arc::default()).map(drop)
}

impl std::fmt::Display for StopRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            StopRequest::Signal(Signal::Terminate) => write!(f, "SIGTERM"),
            StopRequest::Signal(Signal::Interrupt) => write!(f, "SIGINT"),
            StopRequest::Signal(Signal::HangUp) => write!(f, "SIGHUP (lost terminal)"),
            StopRequest::Signal(Signal::Preempt) => write!(f, "SIGUSR1 (preemption notice)"),
            StopRequest::KillSwitch(path) => write!(f, "the kill switch {}", path.display()),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_kill_switch_is_a_request_once_its_file_exists() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stop");
        let requests = StopSignals::without_signals(Some(path.clone()));
        assert_eq!(requests.poll(), None);
        std::fs::write(&path, "").unwrap();
        assert_eq!(requests.poll(), Some(StopRequest::KillSwitch(path)));
    }

    #[test]
    fn without_a_kill_switch_there_is_no_request() {
        assert_eq!(StopSignals::without_signals(None).poll(), None);
    }
}
