//! Errors of process groups. Every rank logs the same root cause.

use std::error::Error as StdError;
use std::io;
use std::time::Duration;

use crate::store;

/// First failure of a world, which aborted it. All ranks report the same one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct RankFailure {
    /// Rank in the world that caused the failure.
    pub rank: usize,
    /// Kind of the failure.
    pub cause: Cause,
    /// Message that completes "failed to ...".
    pub message: String,
}

/// Kind of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The rank failed and reported it.
    Reported,
    /// The rank exited without a report, or cannot be reached.
    Exited,
    /// The rank sent no heartbeat, or did not enter a call, within the timeout.
    TimedOut,
    /// The rank's calls do not match those of the other ranks.
    CallMismatch,
}

impl Cause {
    const ALL: [Self; 4] = [Self::Reported, Self::Exited, Self::TimedOut, Self::CallMismatch];
}

/// Largest message of a failure. The reports of all ranks together fit into the socket buffers.
const MAX_MESSAGE_BYTES: usize = 1 << 14;

/// Largest encoded failure: rank, cause and message.
pub(crate) const MAX_FAILURE_BYTES: usize = 4 + 1 + MAX_MESSAGE_BYTES;

impl RankFailure {
    /// Finds the failure among an error and its causes.
    pub fn find_in<'e>(error: &'e (dyn StdError + 'static)) -> Option<&'e Self> {
        let own = match error.downcast_ref() {
            Some(Error::Failed(failure)) => Some(failure),
            Some(Error::Tensor(error)) => in_tensor(error),
            _ => None,
        };
        let of_tensor = || in_tensor(error.downcast_ref()?);
        let of_io = || Self::find_in(error.downcast_ref::<io::Error>()?.get_ref()?);
        let of_cause = || Self::find_in(error.source()?);
        own.or_else(|| error.downcast_ref()).or_else(of_tensor).or_else(of_io).or_else(of_cause)
    }

    /// Truncates the message to its largest size.
    pub(crate) fn shortened(mut self) -> Self {
        let end = (0..=MAX_MESSAGE_BYTES).rev().find(|end| self.message.is_char_boundary(*end));
        self.message.truncate(end.expect("offset 0 is a boundary"));
        self
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        [&(self.rank as u32).to_le_bytes()[..], &[self.cause as u8], self.message.as_bytes()].concat()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (rank, rest) = bytes.split_first_chunk()?;
        let (cause, message) = rest.split_first()?;
        let (cause, message) = (*Cause::ALL.get(usize::from(*cause))?, String::from_utf8_lossy(message).into_owned());
        Some(Self { rank: u32::from_le_bytes(*rank) as usize, cause, message })
    }
}

/// Finds the failure in a candle error, whose `source` does not return the wrapped error.
fn in_tensor(error: &candle_core::Error) -> Option<&RankFailure> {
    use candle_core::Error as E;
    match error {
        E::Io(error) => RankFailure::find_in(error),
        E::WithBacktrace { inner, .. } | E::WithPath { inner, .. } | E::Context { inner, .. } => in_tensor(inner),
        E::WrappedContext { wrapped, .. } => RankFailure::find_in(&**wrapped),
        _ => None,
    }
}

/// Error of a call to a process group.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The world was aborted. No further communication is possible.
    #[error(transparent)]
    Failed(#[from] RankFailure),
    /// The arguments are invalid. Nothing was sent, and the group is unchanged.
    #[error("call {op}: {why}")]
    Call {
        /// Name of the operation.
        op: &'static str,
        /// Reason, with the values.
        why: String,
    },
    /// Some ranks did not join within the timeout.
    #[error("join the group of {size} ranks as rank {rank}: rank {} did not join within {timeout:?}", numbers(absent))]
    Absent {
        /// Rank of this process.
        rank: usize,
        /// World size of this process.
        size: usize,
        /// Ranks that did not join.
        absent: Vec<usize>,
        /// Timeout of the rendezvous.
        timeout: Duration,
    },
    /// Another rank has another world size.
    #[error("join the group of {size} ranks as rank {rank}: rank {other} was started for {other_size} ranks")]
    OtherSize {
        /// Rank of this process.
        rank: usize,
        /// World size of this process.
        size: usize,
        /// Rank that differs.
        other: usize,
        /// World size of that rank.
        other_size: usize,
    },
    /// This rank cannot join.
    #[error("join the group of {size} ranks as rank {rank}: {why}")]
    Join {
        /// Rank of this process.
        rank: usize,
        /// World size of this process.
        size: usize,
        /// Reason.
        why: String,
    },
    /// The ranks run on more than one node.
    #[error(
        "join the group as rank {rank} on {here}: rank {other} runs on {there}, and `local` connects processes of one \
         node only; use `nccl` between nodes with GPUs, `mpi` between nodes without"
    )]
    OtherHost {
        /// Rank of this process.
        rank: usize,
        /// Host of this process.
        here: String,
        /// Rank on another node.
        other: usize,
        /// Host of that rank.
        there: String,
    },
    /// The rendezvous store cannot be used.
    #[error(transparent)]
    Store(#[from] store::Error),
    /// A tensor could not be read or created.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Tensor(error) => error,
            // `RankFailure::find_in` can recover the failure from this variant only.
            error => Self::Io(io::Error::other(error)),
        }
    }
}

fn numbers(ranks: &[usize]) -> String {
    ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

/// Result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_found_among_the_causes_of_an_error() {
        let failure = RankFailure { rank: 2, cause: Cause::Exited, message: "continue".to_owned() };
        let boxed: Box<dyn StdError + Send + Sync> = Error::from(failure.clone()).into();
        assert_eq!(RankFailure::find_in(&*boxed), Some(&failure));
        let tensor = candle_core::Error::from(Error::from(failure.clone()));
        assert_eq!((tensor.to_string(), RankFailure::find_in(&tensor)), ("continue".to_owned(), Some(&failure)));
        let deep = io::Error::other(Error::from(tensor.bt().with_path("weights").context("in a layer")));
        assert_eq!(RankFailure::find_in(&deep), Some(&failure));
        let other = candle_core::Error::from(Error::Call { op: "barrier", why: "continue".to_owned() });
        assert_eq!(RankFailure::find_in(&other), None);
        assert_eq!(RankFailure::decode(&failure.encode()), Some(failure));
        assert_eq!(RankFailure::decode(&[0, 0, 0, 0, 9]), None);
    }
}
