//! The two traits of a backend: exchange of bytes between ranks, and agreement on the first failure.
//!
//! `group` implements the order of calls, their checks and the reductions for all backends of these traits.

use std::time::Duration;

use crate::{Cause, CollectiveCall, RankFailure};

/// Channel through which a rank aborts the world and learns of failures.
pub(crate) trait FailureChannel: Send + Sync {
    /// Returns this rank in the world.
    fn rank(&self) -> usize;

    /// Returns a rank's name for messages, with its process and host if known.
    fn who(&self, rank: usize) -> String;

    /// Aborts the world. Returns the first failure of all ranks.
    fn fail(&self, failure: RankFailure) -> RankFailure;

    /// Returns the first failure, if the world has failed.
    fn failure(&self) -> Option<RankFailure>;

    /// Waits up to `within` for a failure of the world, and returns it.
    fn await_failure(&self, within: Duration) -> Option<RankFailure>;

    /// Waits up to `within` for the exit of `rank`. Without [`Self::detects_exits`], waits for a failure of the world instead.
    fn await_exit(&self, _rank: usize, within: Duration) {
        self.await_failure(within);
    }

    /// Returns true if all ranks detect the exit of a process.
    fn detects_exits(&self) -> bool {
        false
    }

    /// Sends a heartbeat to all ranks. Ranks that wait for this one, directly or transitively, continue to wait.
    fn beat(&self);
}

/// Transport between one rank and all others.
pub(crate) trait Transport: FailureChannel {
    /// Connects the ranks `members`. All of them call this with the same unused `id`.
    fn open(&self, id: &str, members: &[usize]) -> Result<Box<dyn Connections>, TransportError>;

    /// Sets this rank's current call in group `id`. The failure of a peer's exit names it.
    fn set_current_call(&self, id: &str, call: Option<&CollectiveCall>);
}

/// Connections of one rank in one group. Ranks are those of the group.
pub(crate) trait Connections: Send {
    /// Sends `send[r]` to each rank `r` and receives `recv[r]` from it, all concurrently, and blocks until done.
    ///
    /// Sender and receiver pass equal sizes. Empty slices are not sent.
    fn exchange(&mut self, send: &[&[u8]], recv: &mut [&mut [u8]]) -> Result<(), TransportError>;
}

/// Failure of an exchange. Ranks are those of the group, except in `PeersTimedOut` and `Failed`: world ranks.
#[derive(Debug)]
pub(crate) enum TransportError {
    /// These ranks did not connect within the timeout.
    ConnectTimeout(Vec<usize>, Duration),
    /// These world ranks sent no heartbeat within the timeout. Ranks of the group wait for them, or are among them.
    PeersTimedOut(Vec<usize>, Duration),
    /// A call timed out because of this rank, for the given reason.
    CallStalled(usize, String),
    /// This rank has left the world without failing, and the call needs it.
    PeerLeft(usize),
    /// The world has failed.
    Failed(RankFailure),
    /// The calls of the ranks do not match: the rank that differs, and the difference.
    Mismatch(usize, String),
    /// This rank cannot be reached.
    Unreachable(usize, std::io::Error),
    /// This process has failed.
    Local(String),
}

impl TransportError {
    /// Maps the ranks of a subgroup to those of its parent group.
    pub(crate) fn map_ranks(self, of: impl Fn(usize) -> usize) -> Self {
        match self {
            Self::ConnectTimeout(ranks, after) => Self::ConnectTimeout(ranks.into_iter().map(of).collect(), after),
            Self::CallStalled(rank, why) => Self::CallStalled(of(rank), why),
            Self::PeerLeft(rank) => Self::PeerLeft(of(rank)),
            Self::Mismatch(rank, why) => Self::Mismatch(of(rank), why),
            Self::Unreachable(rank, error) => Self::Unreachable(of(rank), error),
            other @ (Self::PeersTimedOut(..) | Self::Failed(_) | Self::Local(_)) => other,
        }
    }

    /// Aborts the world because of this error in a group of the ranks `members`. Returns the world's first failure.
    ///
    /// `message` builds the failure's message from the reason.
    pub(crate) fn fail_world(
        self,
        channel: &dyn FailureChannel,
        members: &[usize],
        message: impl FnOnce(String) -> String,
    ) -> RankFailure {
        match self.describe(channel, members) {
            Ok((rank, cause, why)) => channel.fail(RankFailure { rank, cause, message: message(why) }),
            Err(first) => first,
        }
    }

    /// Aborts the world because this rank cannot connect to `members`. Returns the world's first failure.
    pub(crate) fn fail_connect(self, channel: &dyn FailureChannel, members: &[usize]) -> RankFailure {
        let rank = channel.rank();
        self.fail_world(channel, members, |why| format!("connect rank {rank} to the other ranks: {why}"))
    }

    /// Aborts the world because `call` of the ranks `members` failed. Returns the world's first failure.
    pub(crate) fn fail_call(
        self,
        channel: &dyn FailureChannel,
        members: &[usize],
        call: &CollectiveCall,
    ) -> RankFailure {
        let (group, seen_by) = (&call.group, channel.rank());
        self.fail_world(channel, members, |why| {
            format!("finish {call} in group {group} of ranks {members:?}: {why} (seen by rank {seen_by})")
        })
    }

    /// Returns the world rank that caused the error, the cause and the reason.
    ///
    /// Fails with the world's failure if it has failed before.
    fn describe(self, channel: &dyn FailureChannel, members: &[usize]) -> Result<(usize, Cause, String), RankFailure> {
        let (of, who) = (|rank: usize| members[rank], |rank: usize| channel.who(members[rank]));
        let timed_out = |ranks: Vec<usize>, what: &str| {
            let names: Vec<String> = ranks.iter().map(|rank| channel.who(*rank)).collect();
            (ranks[0], Cause::TimedOut, format!("{} {what}", names.join(", ")))
        };
        Ok(match self {
            Self::Failed(failure) => return Err(failure),
            Self::ConnectTimeout(ranks, after) => {
                timed_out(ranks.into_iter().map(of).collect(), &format!("did not connect within {after:?}"))
            }
            Self::PeersTimedOut(ranks, after) => {
                timed_out(ranks, &format!("timed out after {after:?} without a heartbeat"))
            }
            Self::CallStalled(rank, why) => (of(rank), Cause::TimedOut, why),
            Self::PeerLeft(rank) => {
                (of(rank), Cause::CallMismatch, format!("{} has left the process group", who(rank)))
            }
            Self::Mismatch(rank, why) => (of(rank), Cause::CallMismatch, why),
            Self::Unreachable(rank, error) => {
                (of(rank), Cause::Exited, format!("{} cannot be reached: {error}", who(rank)))
            }
            Self::Local(why) => (channel.rank(), Cause::Reported, format!("{}: {why}", channel.who(channel.rank()))),
        })
    }
}

impl From<candle_core::Error> for TransportError {
    fn from(error: candle_core::Error) -> Self {
        Self::Local(error.to_string())
    }
}
