//! Heartbeats, and the detection of ranks that a stalled exchange waits for.
//!
//! * [`KeepAlive`] sends heartbeats while a rank is busy between calls.
//! * [`WaitGraph`] finds the ranks that a stalled exchange waits for.
//! * [`HeartbeatRecord`] is a rank's heartbeat in the store, for backends without a control channel.

#[cfg(any(test, feature = "cuda"))]
mod heartbeat;
mod keep_alive;
mod wait_graph;

use std::time::{Duration, Instant};

#[cfg(any(test, feature = "cuda"))]
pub(crate) use heartbeat::{HeartbeatRecord, StalledCall};
pub use keep_alive::{KeepAlive, KeepAliveGuard};
pub(crate) use wait_graph::{Wait, WaitGraph};

/// Number of heartbeats per timeout. One or two of them may be delayed.
const HEARTBEATS_PER_TIMEOUT: u32 = 8;

/// Longest wait that does not overflow the clock.
const FOREVER: Duration = Duration::from_secs(1 << 30);

/// Returns the instant at which `timeout` has passed. Any timeout is valid.
pub(crate) fn deadline(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(FOREVER)
}
