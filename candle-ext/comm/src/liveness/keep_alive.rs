//! Signs of life from a rank that is busy with work of its own.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::HEARTBEATS_PER_TIMEOUT;
use crate::transport::FailureChannel;

/// Signs of life of a rank that reads data, writes a file or does other long work. Without them the other ranks give up
/// after the time-out. With them they give up when this process dies or stops.
#[derive(Clone)]
pub struct KeepAlive {
    channel: Arc<dyn FailureChannel>,
    interval: Duration,
    /// No rank waits for a rank that is alone.
    is_alone: bool,
}

/// Work in progress. It ends when this is dropped.
#[must_use = "the work ends when it is dropped"]
pub struct KeepAliveGuard {
    /// Dropped, it ends the thread.
    done: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl KeepAlive {
    pub(crate) fn new(channel: Arc<dyn FailureChannel>, timeout: Duration, size: usize) -> Self {
        Self { channel, interval: timeout / HEARTBEATS_PER_TIMEOUT, is_alone: size == 1 }
    }

    /// Calls `work`, and shows the other ranks meanwhile that this one is alive. They wait as long as it takes, so `work`
    /// must not wait for another rank.
    pub fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        let _guard = self.begin();
        work()
    }

    /// Shows once that this rank is alive. It suits work in steps that wait for other ranks, for whom the time-out holds.
    pub fn beat(&self) {
        if !self.is_alone {
            self.channel.beat();
        }
    }

    /// Begins work that lasts until the guard is dropped.
    pub fn begin(&self) -> KeepAliveGuard {
        if self.is_alone {
            return KeepAliveGuard { done: None, thread: None };
        }
        let (done, working) = channel::<()>();
        let (channel, interval) = (Arc::clone(&self.channel), self.interval);
        let show = move || {
            while working.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                channel.beat();
            }
        };
        // Without this thread the time-out holds.
        let thread = thread::Builder::new().name("comm-keep-alive".to_owned()).spawn(show).ok();
        KeepAliveGuard { done: Some(done), thread }
    }
}

impl Drop for KeepAliveGuard {
    fn drop(&mut self) {
        self.done = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for KeepAlive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeepAlive(every {:?})", self.interval)
    }
}
