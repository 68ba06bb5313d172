//! Until when something is waited for.

use std::time::{Duration, Instant};

/// As long as anybody waits: the clock has room for so much.
const FOREVER: Duration = Duration::from_secs(1 << 30);

/// Returns when `timeout` will have passed, however long it is.
pub(crate) fn deadline(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(FOREVER)
}
