//! The signals that stop a program.
//!
//! A handler records a signal, and a thread responds to the first one at once. The program ends its work in an orderly way. A
//! second SIGTERM or SIGINT ends it at once, also while the response is blocked.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use libc::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::iterator::Signals;
use signal_hook::low_level::signal_name;

/// Age of the first signal from which a second one ends the process.
///
/// Ctrl-C sends SIGINT to a launcher and to its ranks, and the launcher forwards it. Both arrive within milliseconds.
const SECOND_SIGNAL_AGE: Duration = Duration::from_millis(500);

/// The reaction to a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignalReaction {
    /// The signal is recorded.
    Request,
    /// The process ends at once.
    EndAtOnce,
}

/// Record of the last stop signal. Clones share it.
#[derive(Clone, Default)]
pub struct LastSignal {
    /// Number of the signal, 0 for none.
    number: Arc<AtomicUsize>,
    /// True if a signal ends the process at once.
    ends_at_once: Arc<AtomicBool>,
    /// Immediate response to the next signal.
    response: Arc<Mutex<Option<SignalResponse>>>,
}

/// Function that a thread calls with the number of a signal, while the program works on.
type SignalResponse = Box<dyn Fn(i32) + Send>;

impl LastSignal {
    /// Installs handlers for `signals` for the rest of the process.
    ///
    /// # Errors
    /// If the system refuses a handler or the thread that waits for signals.
    pub fn watch(signals: &[i32]) -> io::Result<Self> {
        let this = Self::default();
        for &number in signals {
            flag::register_conditional_default(number, Arc::clone(&this.ends_at_once))?;
            flag::register_usize(number, Arc::clone(&this.number), number as usize)?;
        }
        this.wait_for(signals)?;
        Ok(this)
    }

    /// Returns the number of the last signal, if there was one.
    pub fn number(&self) -> Option<i32> {
        Some(self.number.load(Ordering::SeqCst) as i32).filter(|number| *number != 0)
    }

    /// Returns the name of the last signal, such as SIGTERM.
    pub fn name(&self) -> Option<&'static str> {
        signal_name(self.number()?)
    }

    /// Sets the reaction to the next signals.
    pub fn set_reaction(&self, reaction: SignalReaction) {
        self.ends_at_once.store(reaction == SignalReaction::EndAtOnce, Ordering::SeqCst);
    }

    /// Sets the immediate response to the next signal: the work until the program reads [`LastSignal::number`] may take minutes.
    pub fn respond_with(&self, response: impl Fn(i32) + Send + 'static) {
        *self.response.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(response));
    }

    /// Starts the thread that responds to the first signal, and the one that lets a second SIGTERM or SIGINT end the process with
    /// 128 plus its number.
    ///
    /// SIGHUP never counts: the kernel and the shell may both send it. Neither does SIGUSR1, which precedes the scheduler's
    /// SIGTERM.
    fn wait_for(&self, signals: &[i32]) -> io::Result<()> {
        let is_second = Arc::new(AtomicBool::new(false));
        for number in [SIGTERM, SIGINT] {
            flag::register_conditional_shutdown(number, 128 + number, Arc::clone(&is_second))?;
        }
        // A response may block for ever, on a full pipe or a stopped terminal. So the second signal has its own thread.
        let mut first = Signals::new([SIGTERM, SIGINT])?;
        let allow_second = move || {
            if first.forever().next().is_some() {
                thread::sleep(SECOND_SIGNAL_AGE);
                is_second.store(true, Ordering::SeqCst);
            }
        };
        thread::Builder::new().name("second-signal".to_owned()).spawn(allow_second)?;
        let (this, mut arrived) = (self.clone(), Signals::new(signals)?);
        // The process ends with this thread waiting.
        let respond = move || arrived.forever().for_each(|number| this.respond(number));
        thread::Builder::new().name("stop-signal".to_owned()).spawn(respond).map(drop)
    }

    fn respond(&self, number: i32) {
        let response = self.response.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(response) = response {
            response(number);
        }
    }
}

impl fmt::Debug for LastSignal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LastSignal").field(&self.name()).finish()
    }
}

/// Returns the signals that stop a program in an orderly way: SIGTERM, SIGINT, and SIGHUP, which a lost terminal causes.
///
/// `nohup` starts a program with SIGHUP ignored, and that must stay. Other ignored signals come from a shell's `&`.
pub fn stop_signals() -> Vec<i32> {
    let is_nohup = is_ignored(SIGHUP);
    [SIGTERM, SIGINT, SIGHUP].into_iter().filter(|signal| !(is_nohup && *signal == SIGHUP)).collect()
}

/// Returns true if this process inherited a signal as ignored.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::env;
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::{Command, Stdio, exit};
    use std::sync::mpsc;
    use std::time::Instant;

    /// The variable of the child process of a test.
    const CHILD: &str = "CANDLEWICK_TEST_STOP_SIGNALS_CHILD";
    /// A limit for a child that does not end, far above [`SECOND_SIGNAL_AGE`].
    const LIMIT: Duration = Duration::from_secs(120);

    /// Raises SIGTERM until it ends this process. The response to the first one never returns.
    fn raise_while_the_response_is_blocked() -> ! {
        let signal = LastSignal::watch(&stop_signals()).unwrap();
        let (responds, response) = mpsc::channel();
        signal.respond_with(move |_| {
            responds.send(()).unwrap();
            loop {
                thread::park();
            }
        });
        signal_hook::low_level::raise(SIGTERM).unwrap();
        response.recv().unwrap();
        let start = Instant::now();
        while start.elapsed() < LIMIT {
            signal_hook::low_level::raise(SIGTERM).unwrap();
            thread::yield_now();
        }
        exit(0)
    }

    #[test]
    fn a_second_signal_ends_a_process_whose_response_is_blocked() {
        if env::var_os(CHILD).is_some() {
            raise_while_the_response_is_blocked();
        }
        let name = "stop_signals::tests::a_second_signal_ends_a_process_whose_response_is_blocked";
        let mut child = Command::new(env::current_exe().unwrap());
        child.args(["--exact", name]).env(CHILD, "1").stdout(Stdio::null());
        let status = child.status().unwrap();
        assert_eq!((status.code(), status.signal()), (Some(128 + SIGTERM), None));
    }
}
