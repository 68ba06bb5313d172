//! Bodies of HTTP responses, read within a size limit and at a least rate.

use std::time::{Duration, Instant};

use reqwest::Response;

/// Least accepted rate in bytes per second. A read timeout alone lets a server send one byte a minute.
pub(crate) const MIN_RATE: u64 = 1024;

/// Reason why a body was not read to its end.
#[derive(Debug)]
pub(crate) enum BodyError {
    /// The body has more bytes than the limit.
    TooLong {
        /// The limit in bytes.
        max_bytes: u64,
    },
    /// Fewer than [`MIN_RATE`] bytes a second arrive.
    TooSlow,
    /// The connection failed.
    Lost(reqwest::Error),
}

/// Measurement of the rate of a response, over windows of time.
pub(crate) struct ResponseRate {
    window: Duration,
    since: Instant,
    n_before: u64,
}

impl ResponseRate {
    /// Starts a window at `n_bytes` received bytes.
    pub(crate) fn start(window: Duration, n_bytes: u64) -> Self {
        Self { window, since: Instant::now(), n_before: n_bytes }
    }

    /// Returns true if a window ends at `n_bytes` received bytes, and had a lower rate than [`MIN_RATE`].
    pub(crate) fn is_too_low(&mut self, n_bytes: u64) -> bool {
        let elapsed = self.since.elapsed();
        if elapsed <= self.window {
            return false;
        }
        let is_low = ((n_bytes - self.n_before) as f64) < MIN_RATE as f64 * elapsed.as_secs_f64();
        *self = Self::start(self.window, n_bytes);
        is_low
    }
}

/// Reads a body of at most `max_bytes`. `window` is the time over which the rate is measured.
pub(crate) async fn read_body(mut response: Response, max_bytes: u64, window: Duration) -> Result<Vec<u8>, BodyError> {
    let (mut body, mut rate) = (Vec::new(), ResponseRate::start(window, 0));
    while let Some(piece) = response.chunk().await.map_err(BodyError::Lost)? {
        if body.len() as u64 + piece.len() as u64 > max_bytes {
            return Err(BodyError::TooLong { max_bytes });
        }
        body.extend_from_slice(&piece);
        if rate.is_too_low(body.len() as u64) {
            return Err(BodyError::TooSlow);
        }
    }
    Ok(body)
}

/// Returns `name:password` of a URL.
pub(crate) fn userinfo(url: &str) -> Option<&str> {
    let (_, rest) = url.split_once("://")?;
    rest.split('/').next()?.rsplit_once('@').map(|(userinfo, _)| userinfo)
}
