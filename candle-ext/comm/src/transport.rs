//! The two traits that a backend implements: bytes between ranks, and failures that all ranks report alike.
//!
//! Order, checks and sums are written once, in `group`, for every backend that moves bytes.

use std::time::Duration;

use crate::{Call, Cause, RankFailure};

/// One rank's part in ending the world for all ranks.
pub(crate) trait FailureChannel: Send + Sync {
    /// Returns this rank, counted in the whole world.
    fn rank(&self) -> usize;

    /// Names a rank for a message, as precisely as the backend can.
    fn who(&self, rank: usize) -> String;

    /// Ends the world. The first failure of all ranks stands, and is returned.
    fn fail(&self, failure: RankFailure) -> RankFailure;

    /// Returns why the world has ended, if it has.
    fn failure(&self) -> Option<RankFailure>;

    /// Waits until the world has ended, for as long as `within`, and returns why.
    fn await_failure(&self, within: Duration) -> Option<RankFailure>;

    /// Shows all ranks that this one is busy: ranks that wait for it, directly or not, go on waiting.
    fn beat(&self);
}

/// One rank's way to all others.
pub(crate) trait Transport: FailureChannel {
    /// Connects the ranks `members`, which all call this with the same `id`, never used before.
    fn open(&self, id: &str, members: &[usize]) -> Result<Box<dyn Connections>, TransportError>;

    /// Notes this rank's call in group `id`, for the message should a peer exit meanwhile.
    fn set_current_call(&self, id: &str, call: Option<&Call>);
}

/// One rank's connections in one group. Ranks are the group's.
pub(crate) trait Connections: Send {
    /// Sends `send[r]` to each rank `r` while receiving `recv[r]` from it, until all of it is done. The sizes at both
    /// ends agree, and what is empty is not sent.
    fn exchange(&mut self, send: &[&[u8]], recv: &mut [&mut [u8]]) -> Result<(), TransportError>;
}

/// The reason why bytes do not arrive. Ranks are the group's.
#[derive(Debug)]
pub(crate) enum TransportError {
    /// These ranks were silent for this long.
    Timeout(Vec<usize>, Duration),
    /// These ranks of the world were silent for this long. Ranks of the group wait for them, or are among them.
    PeersTimedOut(Vec<usize>, Duration),
    /// This rank keeps a call from its end for too long, for the reason given.
    CallStalled(usize, String),
    /// This rank has left, cleanly, while something was expected of it.
    PeerLeft(usize),
    /// The world has ended.
    Failed(RankFailure),
    /// The calls of the ranks do not fit together: the rank that differs from the others, and the difference.
    Mismatch(usize, String),
    /// This rank cannot be reached, or not any more.
    Unreachable(usize, std::io::Error),
    /// This process cannot go on.
    Local(String),
}

impl TransportError {
    /// Renames the ranks, which were those of a smaller group.
    pub(crate) fn map_ranks(self, of: impl Fn(usize) -> usize) -> Self {
        match self {
            Self::Timeout(ranks, after) => Self::Timeout(ranks.into_iter().map(of).collect(), after),
            Self::CallStalled(rank, why) => Self::CallStalled(of(rank), why),
            Self::PeerLeft(rank) => Self::PeerLeft(of(rank)),
            Self::Mismatch(rank, why) => Self::Mismatch(of(rank), why),
            Self::Unreachable(rank, error) => Self::Unreachable(of(rank), error),
            other @ (Self::PeersTimedOut(..) | Self::Failed(_) | Self::Local(_)) => other,
        }
    }

    /// Ends the world because of this error in a group of the ranks `members`; returns the world's first failure.
    /// `message` makes the failure's text of the reason.
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

    /// Ends the world because this rank cannot be connected to `members`; returns the world's first failure.
    pub(crate) fn fail_connect(self, channel: &dyn FailureChannel, members: &[usize]) -> RankFailure {
        let rank = channel.rank();
        self.fail_world(channel, members, |why| format!("connect rank {rank} to the others: {why}"))
    }

    /// Ends the world because `call` of the ranks `members` failed; returns the world's first failure.
    pub(crate) fn fail_call(self, channel: &dyn FailureChannel, members: &[usize], call: &Call) -> RankFailure {
        let (group, seen_by) = (&call.group, channel.rank());
        self.fail_world(channel, members, |why| {
            format!("finish {call} in group {group} of ranks {members:?}: {why} (seen by rank {seen_by})")
        })
    }

    /// Returns the rank of the world that caused the error, the cause and the reason; or the failure with which the world
    /// has ended.
    fn describe(self, channel: &dyn FailureChannel, members: &[usize]) -> Result<(usize, Cause, String), RankFailure> {
        let (of, who) = (|rank: usize| members[rank], |rank: usize| channel.who(members[rank]));
        let silent = |ranks: Vec<usize>, after| {
            let names: Vec<String> = ranks.iter().map(|rank| channel.who(*rank)).collect();
            (ranks[0], Cause::TimedOut, format!("{} silent for {after:?}", names.join(", ")))
        };
        Ok(match self {
            Self::Failed(failure) => return Err(failure),
            Self::Timeout(ranks, after) => silent(ranks.into_iter().map(of).collect(), after),
            Self::PeersTimedOut(ranks, after) => silent(ranks, after),
            Self::CallStalled(rank, why) => (of(rank), Cause::TimedOut, why),
            Self::PeerLeft(rank) => (of(rank), Cause::CallMismatch, format!("{} has left", who(rank))),
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
