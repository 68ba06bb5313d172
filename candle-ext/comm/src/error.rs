//! What goes wrong in a group, in sentences for whoever reads the log of any rank.

use crate::store;

/// Why a world ended: the first thing that went wrong on any rank. All ranks report the same one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// The rank that caused it, counted in the whole world.
    pub rank: usize,
    /// What happened, completing "failed to ...".
    pub message: String,
}

/// More of what went wrong is not told: what all ranks tell at once fits into their sockets.
pub(crate) const MAX_MESSAGE_BYTES: usize = 1 << 14;

impl Failure {
    /// Cuts off what is not told.
    pub(crate) fn shortened(mut self) -> Self {
        let end = (0..=MAX_MESSAGE_BYTES).rev().find(|end| self.message.is_char_boundary(*end));
        self.message.truncate(end.expect("there is one at the start"));
        self
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        [&(self.rank as u32).to_le_bytes()[..], self.message.as_bytes()].concat()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (rank, message) = bytes.split_first_chunk()?;
        let message = String::from_utf8_lossy(message).into_owned();
        Some(Self { rank: u32::from_le_bytes(*rank) as usize, message })
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
    /// The ranks did not come together.
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
            error => Self::wrap(error),
        }
    }
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
