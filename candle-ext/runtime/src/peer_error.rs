//! The error of a rank that ends because another rank failed.

use std::error::Error as StdError;
use std::fmt;

/// Error of another rank, which prints it. This rank prints a reference to that rank.
#[derive(Debug)]
pub struct PeerError {
    /// The rank with the error.
    pub rank: usize,
    cause: RemoteError,
}

/// Text of another rank's error.
#[derive(Debug)]
struct RemoteError(String);

impl PeerError {
    /// Returns the error of a rank that ends because of the error `text` of `rank`.
    pub(crate) fn new(rank: usize, text: &str) -> Self {
        Self { rank, cause: RemoteError(text.to_owned()) }
    }
}

impl fmt::Display for PeerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rank = self.rank;
        write!(f, "failed to continue: rank {rank} failed; see the log of rank {rank}")
    }
}

impl StdError for PeerError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(&self.cause)
    }
}

impl fmt::Display for RemoteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl StdError for RemoteError {}
