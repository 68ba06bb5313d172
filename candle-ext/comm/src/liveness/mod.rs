//! Evidence that ranks are alive, and the ranks that a stalled exchange waits for.
//!
//! * [`KeepAlive`] shows the other ranks that this one is busy with work of its own.
//! * [`WaitGraph`] finds the ranks that a stalled exchange of bytes waits for.
//! * [`Heartbeat`] is what a rank leaves in the store where ranks have no other way to talk.

#[cfg(any(test, feature = "cuda"))]
mod heartbeat;
mod keep_alive;
mod wait_graph;

use std::time::{Duration, Instant};

#[cfg(any(test, feature = "cuda"))]
pub(crate) use heartbeat::{Heartbeat, StalledCall};
pub use keep_alive::{KeepAlive, KeepAliveGuard};
pub(crate) use wait_graph::{Wait, WaitGraph};

/// The number of signs of life in a time-out. One or two of them may come late.
const HEARTBEATS_PER_TIMEOUT: u32 = 8;

/// The longest wait for which the clock has room.
const FOREVER: Duration = Duration::from_secs(1 << 30);

/// Returns when `timeout` will have passed, however long it is.
pub(crate) fn deadline(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(FOREVER)
}
