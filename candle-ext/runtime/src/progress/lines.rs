//! Progress lines: one line every ten seconds.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Interval between two lines.
const INTERVAL: Duration = Duration::from_secs(10);

/// Prints a progress line every interval until it is dropped. Work that ends before the first interval prints none.
#[derive(Debug)]
pub struct ProgressLines {
    state: Arc<State>,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Counts of a progress line.
#[derive(Debug)]
struct State {
    /// Name of the work, such as `arc_easy`.
    what: String,
    /// Counted unit, such as `requests`.
    unit: &'static str,
    done: AtomicUsize,
    all: AtomicUsize,
}

impl ProgressLines {
    /// Starts to print lines with `print`.
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
        // If the thread cannot start, the work continues without progress lines.
        let thread = thread::Builder::new().name("progress".into()).spawn(lines).ok();
        Self { state, stop: Some(stop), thread }
    }

    /// Sets the counts of the next line.
    pub fn set(&self, done: usize, all: usize) {
        self.state.done.store(done, Ordering::Relaxed);
        self.state.all.store(all, Ordering::Relaxed);
    }
}

impl Drop for ProgressLines {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic has printed its message.
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

/// Formats `choose: 40 of 120 requests (33 %), 20 s elapsed, 40 s left`.
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
    fn a_line_has_counts_and_the_remaining_time() {
        let at = |counts, secs| line("evaluate", "requests", counts, Duration::from_secs(secs));
        assert_eq!(at((40, 120), 20), "evaluate: 40 of 120 requests (33 %), 20 s elapsed, 40 s left");
        assert_eq!(at((0, 120), 130), "evaluate: 0 of 120 requests (0 %), 2 min 10 s elapsed");
        assert_eq!(at((1, 3), 7200), "evaluate: 1 of 3 requests (33 %), 2 h 0 min elapsed, 4 h 0 min left");
        assert_eq!(at((0, 0), 10), "evaluate: 10 s elapsed");
    }

    #[test]
    fn lines_are_printed_until_the_work_ends() {
        let (lines, printed) = mpsc::channel();
        let progress = ProgressLines::every(Duration::from_millis(1), "evaluate", "requests", move |line| {
            let _ = lines.send(line);
        });
        progress.set(3, 4);
        assert!(printed.iter().any(|line| line.starts_with("evaluate: 3 of 4 requests (75 %)")));
        drop(progress);
        // The thread has ended and dropped its sender.
        assert_eq!(printed.iter().skip_while(|line| line.starts_with("evaluate")).count(), 0);
    }
}
