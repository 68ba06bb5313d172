//! What goes wrong in a group, in sentences for whoever reads the log of any rank.

use std::error::Error as StdError;
use std::io;
use std::time::Duration;

use crate::store;

/// Why a world ended: the first thing that went wrong on any rank. All ranks report the same one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// The rank that caused it, counted in the whole world.
    pub rank: usize,
    /// Of what sort it is.
    pub cause: Cause,
    /// What happened, completing "failed to ...".
    pub message: String,
}

/// What a rank has done that ended the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// It failed, and said so.
    Told,
    /// It ended without a word, or cannot be reached.
    Died,
    /// It was silent for longer than the time-out.
    Silent,
    /// It did something else than the others expected of it.
    Strayed,
}

impl Cause {
    const ALL: [Self; 4] = [Self::Told, Self::Died, Self::Silent, Self::Strayed];
}

/// More of what went wrong is not told: what all ranks tell at once fits into their sockets.
const MAX_MESSAGE_BYTES: usize = 1 << 14;

/// What a failure is at most when it is told: with its rank and cause.
pub(crate) const MAX_FAILURE_BYTES: usize = 4 + 1 + MAX_MESSAGE_BYTES;

impl Failure {
    /// Finds the failure that an error comes from, however deep in its causes.
    pub fn behind<'e>(error: &'e (dyn StdError + 'static)) -> Option<&'e Self> {
        let own = match error.downcast_ref() {
            Some(Error::Failed(failure)) => Some(failure),
            Some(Error::Tensor(error)) => in_tensor(error),
            _ => None,
        };
        let of_tensor = || in_tensor(error.downcast_ref()?);
        let of_io = || Self::behind(error.downcast_ref::<io::Error>()?.get_ref()?);
        let of_cause = || Self::behind(error.source()?);
        own.or_else(|| error.downcast_ref()).or_else(of_tensor).or_else(of_io).or_else(of_cause)
    }

    /// Cuts off what is not told.
    pub(crate) fn shortened(mut self) -> Self {
        let end = (0..=MAX_MESSAGE_BYTES).rev().find(|end| self.message.is_char_boundary(*end));
        self.message.truncate(end.expect("there is one at the start"));
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

/// candle does not call what it wraps a cause.
fn in_tensor(error: &candle_core::Error) -> Option<&Failure> {
    use candle_core::Error as E;
    match error {
        E::Io(error) => Failure::behind(error),
        E::WithBacktrace { inner, .. } | E::WithPath { inner, .. } | E::Context { inner, .. } => in_tensor(inner),
        E::WrappedContext { wrapped, .. } => Failure::behind(&**wrapped),
        _ => None,
    }
}

/// What a call to a group fails with.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The world has ended; nothing can be exchanged any more.
    #[error(transparent)]
    Failed(#[from] Failure),
    /// The call itself makes no sense; nothing was sent, and the group is as before.
    #[error("call {op}: {why}")]
    Call {
        /// The operation.
        op: &'static str,
        /// What is wrong, with the numbers.
        why: String,
    },
    /// Some ranks did not come.
    #[error("join the group of {size} ranks as rank {rank}: rank {} did not join within {timeout:?}", numbers(absent))]
    Absent {
        /// This process's rank.
        rank: usize,
        /// The number of ranks it was started for.
        size: usize,
        /// Those that did not come.
        absent: Vec<usize>,
        /// How long was waited.
        timeout: Duration,
    },
    /// A rank was started for another number of ranks.
    #[error("join the group of {size} ranks as rank {rank}: rank {other} was started for {other_size} ranks")]
    OtherSize {
        /// This process's rank.
        rank: usize,
        /// The number of ranks it was started for.
        size: usize,
        /// The rank that differs.
        other: usize,
        /// What that one was started for.
        other_size: usize,
    },
    /// The ranks cannot come together.
    #[error("join the group of {size} ranks as rank {rank}: {why}")]
    Join {
        /// This process's rank.
        rank: usize,
        /// The number of ranks it was started for.
        size: usize,
        /// What is wrong.
        why: String,
    },
    /// The ranks run on more than one machine.
    #[error(
        "join the group as rank {rank} on {here}: rank {other} runs on {there}, and `local` only connects processes of \
         one machine; use `nccl` between machines with GPUs, `mpi` between machines without"
    )]
    OtherHost {
        /// This process's rank.
        rank: usize,
        /// The host of this process.
        here: String,
        /// A rank elsewhere.
        other: usize,
        /// Its host.
        there: String,
    },
    /// The store, through which the ranks meet, cannot be used.
    #[error(transparent)]
    Store(#[from] store::Error),
    /// A tensor could not be read or made.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Tensor(error) => error,
            // The one variant from which it can be had again: see `Failure::behind`.
            error => Self::Io(io::Error::other(error)),
        }
    }
}

fn numbers(ranks: &[usize]) -> String {
    ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_found_however_it_was_passed_on() {
        let failure = Failure { rank: 2, cause: Cause::Died, message: "go on".to_owned() };
        let boxed: Box<dyn StdError + Send + Sync> = Error::from(failure.clone()).into();
        assert_eq!(Failure::behind(&*boxed), Some(&failure));
        let tensor = candle_core::Error::from(Error::from(failure.clone()));
        assert_eq!((tensor.to_string(), Failure::behind(&tensor)), ("go on".to_owned(), Some(&failure)));
        let deep = io::Error::other(Error::from(tensor.bt().with_path("weights").context("in a layer")));
        assert_eq!(Failure::behind(&deep), Some(&failure));
        let other = candle_core::Error::from(Error::Call { op: "barrier", why: "go on".to_owned() });
        assert_eq!(Failure::behind(&other), None);
        assert_eq!(Failure::decode(&failure.encode()), Some(failure));
        assert_eq!(Failure::decode(&[0, 0, 0, 0, 9]), None);
    }
}
