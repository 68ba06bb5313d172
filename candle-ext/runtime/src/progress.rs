//! Progress of work that takes long, for a stderr that is no terminal: a line every ten seconds.

use std::io::{self, IsTerminal};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The time between two lines.
const INTERVAL: Duration = Duration::from_secs(10);

/// Prints a line about some work from time to time, until it is dropped. Work that ends before the first line prints none.
#[derive(Debug)]
pub struct ProgressLines {
    state: Arc<State>,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The counts that lines show.
#[derive(Debug)]
struct State {
    /// The work, such as `arc_easy`.
    what: String,
    /// The counted things, such as `requests`.
    unit: &'static str,
    done: AtomicUsize,
    all: AtomicUsize,
}

impl ProgressLines {
    /// Starts to print to stderr; `None` where that is a terminal, which has a bar.
    pub fn on_stderr(what: &str, unit: &'static str) -> Option<Self> {
        let to_stderr = |line: String| eprintln!("{line}");
        (!io::stderr().is_terminal()).then(|| Self::new(what, unit, to_stderr))
    }

    /// Starts to print with `print`.
    pub fn new(what: &str, unit: &'static str, print: impl Fn(String) + Send + 'static) -> Self {
        Self::every(INTERVAL, what, unit, print)
    }

    fn every(interval: Duration, what: &str, unit: &'static str, print: impl Fn(String) + Send + 'static) -> Self {
        let state =
            Arc::new(State { what: what.to_owned(), unit, done: AtomicUsize::new(0), all: AtomicUsize::new(0) });
        let (stop, stopped) = mpsc::channel();
        let shown = Arc::clone(&state);
        let began = Instant::now();
        let lines = move || {
            while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                print(shown.line(began.elapsed()));
            }
        };
        // Without a thread there are no lines, and the work goes on.
        let thread = thread::Builder::new().name("progress".into()).spawn(lines).ok();
        Self { state, stop: Some(stop), thread }
    }

    /// Sets the counts that the next line shows.
    pub fn set(&self, done: usize, all: usize) {
        self.state.done.store(done, Ordering::Relaxed);
        self.state.all.store(all, Ordering::Relaxed);
    }
}

impl Drop for ProgressLines {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has printed why.
            let _ = thread.join();
        }
    }
}

impl State {
    fn line(&self, elapsed: Duration) -> String {
        let (done, all) = (self.done.load(Ordering::Relaxed), self.all.load(Ordering::Relaxed));
        line(&self.what, self.unit, (done, all), elapsed)
    }
}

/// Writes `choose: 40 of 120 requests (33 %), 20 s elapsed, 40 s left`.
fn line(what: &str, unit: &str, (done, all): (usize, usize), elapsed: Duration) -> String {
    let elapsed_text = seconds(elapsed);
    if all == 0 {
        return format!("{what}: {elapsed_text} elapsed");
    }
    let percent = 100 * done / all;
    let left = match done {
        0 => String::new(),
        done => format!(", {} left", seconds(elapsed.mul_f64((all - done.min(all)) as f64 / done as f64))),
    };
    format!("{what}: {done} of {all} {unit} ({percent} %), {elapsed_text} elapsed{left}")
}

fn seconds(duration: Duration) -> String {
    match duration.as_secs() {
        n if n < 120 => format!("{n} s"),
        n if n < 7200 => format!("{} min {} s", n / 60, n % 60),
        n => format!("{} h {} min", n / 3600, n % 3600 / 60),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_counts_and_the_time_that_is_left() {
        let at = |counts, secs| line("evaluate", "requests", counts, Duration::from_secs(secs));
        assert_eq!(at((40, 120), 20), "evaluate: 40 of 120 requests (33 %), 20 s elapsed, 40 s left");
        assert_eq!(at((0, 120), 130), "evaluate: 0 of 120 requests (0 %), 2 min 10 s elapsed");
        assert_eq!(at((1, 3), 7200), "evaluate: 1 of 3 requests (33 %), 2 h 0 min elapsed, 4 h 0 min left");
        assert_eq!(at((0, 0), 10), "evaluate: 10 s elapsed");
    }

    #[test]
    fn lines_come_while_work_goes_on_and_end_with_it() {
        let (lines, printed) = mpsc::channel();
        let progress = ProgressLines::every(Duration::from_millis(1), "evaluate", "requests", move |line| {
            let _ = lines.send(line);
        });
        progress.set(3, 4);
        assert!(printed.iter().any(|line| line.starts_with("evaluate: 3 of 4 requests (75 %)")));
        drop(progress);
        // The thread is gone, and its end of the channel with it.
        assert_eq!(printed.iter().skip_while(|line| line.starts_with("evaluate")).count(), 0);
    }
}
