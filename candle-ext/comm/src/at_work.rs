//! What a rank shows the others while it is busy with something else than them.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::fabric::Alarm;
use crate::signs::PER_TIMEOUT;

/// Keeps the others waiting while this rank does something that takes long: reads data, writes a file. Without it they give
/// up after the time-out; with it, when this process dies or stops.
#[derive(Clone)]
pub struct AtWork {
    alarm: Arc<dyn Alarm>,
    every: Duration,
    /// Nobody waits for a rank that is alone.
    is_alone: bool,
}

/// Work that goes on until this is dropped.
#[must_use = "the work is over when it is dropped"]
pub struct Working {
    /// Dropped, it ends the thread.
    done: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl AtWork {
    pub(crate) fn new(alarm: Arc<dyn Alarm>, timeout: Duration, size: usize) -> Self {
        Self { alarm, every: timeout / PER_TIMEOUT, is_alone: size == 1 }
    }

    /// Does `what`, and lets the others know all the while that this rank is at it. They wait as long as it takes: nothing in
    /// it may wait for another rank, which would not be given up either.
    pub fn during<T>(&self, what: impl FnOnce() -> T) -> T {
        let _working = self.begin();
        what()
    }

    /// Shows once that this rank is at work, after a step that it has done: it may have waited for other ranks in it, for whom
    /// the time-out holds.
    pub fn beat(&self) {
        if !self.is_alone {
            self.alarm.beat();
        }
    }

    /// The same as [`AtWork::during`], for work that is no function: it lasts until the result is dropped.
    pub fn begin(&self) -> Working {
        if self.is_alone {
            return Working { done: None, thread: None };
        }
        let (done, working) = channel::<()>();
        let (alarm, every) = (Arc::clone(&self.alarm), self.every);
        let show = move || {
            while working.recv_timeout(every) == Err(RecvTimeoutError::Timeout) {
                alarm.beat();
            }
        };
        // Without a thread to show it with, the time-out holds.
        let thread = thread::Builder::new().name("comm-at-work".to_owned()).spawn(show).ok();
        Working { done: Some(done), thread }
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        self.done = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for AtWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AtWork(every {:?})", self.every)
    }
}
