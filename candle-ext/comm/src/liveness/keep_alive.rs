//! Heartbeats of a rank that is busy between calls.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::HEARTBEATS_PER_TIMEOUT;
use crate::transport::FailureChannel;

/// Heartbeats of a rank that reads data, writes a checkpoint or does other long work between two calls.
///
/// Without heartbeats the other ranks time out. With them they time out only if this process exits or stops.
#[derive(Clone)]
pub struct KeepAlive {
    channel: Arc<dyn FailureChannel>,
    interval: Duration,
    /// True in a world of one rank, which sends no heartbeats.
    is_alone: bool,
}

/// Guard that sends heartbeats until it is dropped.
#[must_use = "the heartbeats end when the guard is dropped"]
pub struct KeepAliveGuard {
    /// Dropping it ends the thread.
    done: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl KeepAlive {
    pub(crate) fn new(channel: Arc<dyn FailureChannel>, timeout: Duration, size: usize) -> Self {
        Self { channel, interval: timeout / HEARTBEATS_PER_TIMEOUT, is_alone: size == 1 }
    }

    /// Sends heartbeats to the other ranks while `work` runs. They wait without a limit.
    ///
    /// `work` must not wait for another rank.
    pub fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        let _guard = self.begin();
        work()
    }

    /// Sends one heartbeat. Use it in work that also waits for other ranks, which the timeout still covers.
    pub fn beat(&self) {
        if !self.is_alone {
            self.channel.beat();
        }
    }

    /// Sends heartbeats until the returned guard is dropped.
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
        // If the thread cannot start, the timeout applies.
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
