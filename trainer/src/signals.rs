//! Stop requests: SIGTERM, SIGINT, SIGHUP (a lost terminal), SIGUSR1 (Slurm's preemption notice) and the kill switch file.
//!
//! The preparation of the data stops at a request, the training loop handles one between two steps. In between, while the
//! model is loaded, a signal ends the process at once. So does a second SIGTERM or SIGINT at any time.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use candlewick_runtime::exit::ExitCode;
use candlewick_runtime::stop_signals::stop_signals;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::Signals;

/// Watches for stop requests. Clones share their state.
#[derive(Clone)]
pub struct StopSignals {
    /// The number of the last signal, 0 for none.
    signal: Arc<AtomicUsize>,
    /// True if a signal ends the process at once.
    ends_at_once: Arc<AtomicBool>,
    /// The immediate response to the first signal.
    response: Arc<Mutex<Option<SignalResponse>>>,
    kill_switch: Option<PathBuf>,
}

/// A function that a thread calls at the first signal, while the program works on.
type SignalResponse = Box<dyn Fn(Signal) + Send>;

/// The reaction to a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignalReaction {
    /// [`StopSignals::poll`] returns a request.
    Request,
    /// The process ends at once.
    EndAtOnce,
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
        let signal = Arc::new(AtomicUsize::new(0));
        let (already_requested, ends_at_once) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        for number in stop_signals().into_iter().chain([SIGUSR1]) {
            flag::register_conditional_default(number, ends_at_once.clone())?;
            flag::register_usize(number, signal.clone(), number as usize)?;
        }
        // SIGHUP never counts as the second signal: the kernel and the shell may both send it. Neither does SIGUSR1, which
        // precedes the scheduler's SIGTERM.
        for number in [SIGTERM, SIGINT] {
            // Handlers run in the order of registration, so the exit handler reads the flag before it is set.
            flag::register_conditional_shutdown(number, 128 + number, already_requested.clone())?;
            flag::register(number, already_requested.clone())?;
        }
        let requests = Self { signal, ends_at_once, response: Arc::default(), kill_switch };
        let mut arrived = Signals::new(stop_signals().into_iter().chain([SIGUSR1]))?;
        let responding = requests.clone();
        let respond = move || {
            // The process ends with this thread waiting.
            for number in arrived.forever() {
                responding.respond(number);
            }
        };
        std::thread::Builder::new().name("stop-signals".to_owned()).spawn(respond)?;
        Ok(requests)
    }

    /// Watches only the file, for a run inside a program that handles its own signals.
    pub fn without_signals(kill_switch: Option<PathBuf>) -> Self {
        Self { signal: Arc::default(), ends_at_once: Arc::default(), response: Arc::default(), kill_switch }
    }

    /// Sets the reaction to the next signals.
    pub fn set_reaction(&self, reaction: SignalReaction) {
        self.ends_at_once.store(reaction == SignalReaction::EndAtOnce, Ordering::SeqCst);
    }

    /// Sets the immediate response to the first signal: the work that [`StopSignals::poll`] waits for may take minutes.
    pub fn respond_with(&self, response: impl Fn(Signal) + Send + 'static) {
        *self.response.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(response));
    }

    fn respond(&self, number: i32) {
        let response = self.response.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((response, signal)) = response.zip(Signal::of(number)) {
            response(signal);
        }
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
        Signal::of(self.signal.load(Ordering::SeqCst) as i32)
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

impl std::fmt::Debug for StopSignals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StopSignals").field("signal", &self.signal()).field("kill_switch", &self.kill_switch).finish()
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
