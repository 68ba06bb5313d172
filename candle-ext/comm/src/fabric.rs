//! What an engine is to a group: something that tells all ranks when one fails, and moves bytes between them.
//!
//! Order, checks and sums are not here: they are written once, in `group`, for every engine that moves bytes.

use std::time::Duration;

use crate::{Call, Cause, Failure};

/// One rank's part in ending the world for all.
pub(crate) trait Alarm: Send + Sync {
    /// Returns this rank, counted in the whole world.
    fn rank(&self) -> usize;

    /// Names a rank for a message, as precisely as the engine can.
    fn who(&self, rank: usize) -> String;

    /// Ends the world. The first failure of all ranks stands, and is returned.
    fn fail(&self, failure: Failure) -> Failure;

    /// Returns why the world has ended, if it has.
    fn failure(&self) -> Option<Failure>;

    /// Waits until the world has ended, for as long as `within`, and returns why.
    fn await_failure(&self, within: Duration) -> Option<Failure>;

    /// Shows all ranks that this one is at work: who waits for it, or for somebody who does, goes on waiting.
    fn beat(&self);
}

/// One rank's way to all others.
pub(crate) trait Fabric: Alarm {
    /// Connects the ranks `members`, which all call this with the same `id`, never used before.
    fn open(&self, id: &str, members: &[usize]) -> Result<Box<dyn Links>, Trouble>;

    /// Notes what this rank is doing in group `id`, for the message should a peer die meanwhile.
    fn doing(&self, id: &str, call: Option<&Call>);
}

/// One rank's connections in one group. Ranks are the group's.
pub(crate) trait Links: Send {
    /// Sends `send[r]` to each rank `r` while receiving `recv[r]` from it, until all of it is done. The sizes at both
    /// ends agree, and what is empty is not sent.
    fn exchange(&mut self, send: &[&[u8]], recv: &mut [&mut [u8]]) -> Result<(), Trouble>;
}

/// Why bytes do not arrive. Ranks are the group's.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// These were silent for so long.
    Late(Vec<usize>, Duration),
    /// So were these, ranks of the world: those of the group wait for them, or are they.
    Silent(Vec<usize>, Duration),
    /// This one keeps a call from its end for too long, as the words say.
    Overdue(usize, String),
    /// This one has left, cleanly, while something was expected of it.
    Left(usize),
    /// The world has ended.
    Failed(Failure),
    /// The calls of the ranks do not fit together: the rank that differs from the others, and how.
    Mismatch(usize, String),
    /// This one cannot be reached, or not any more.
    Unreachable(usize, std::io::Error),
    /// This process cannot go on.
    Own(String),
}

impl Trouble {
    /// Renames the ranks, which were those of a smaller group.
    pub(crate) fn map_ranks(self, of: impl Fn(usize) -> usize) -> Self {
        match self {
            Self::Late(ranks, after) => Self::Late(ranks.into_iter().map(of).collect(), after),
            Self::Overdue(rank, what) => Self::Overdue(of(rank), what),
            Self::Left(rank) => Self::Left(of(rank)),
            Self::Mismatch(rank, what) => Self::Mismatch(of(rank), what),
            Self::Unreachable(rank, error) => Self::Unreachable(of(rank), error),
            other @ (Self::Silent(..) | Self::Failed(_) | Self::Own(_)) => other,
        }
    }

    /// Returns the rank that caused it, of what sort it is, and what happened in words; or the failure with which the world
    /// has ended. `fabric` names ranks of the world, this one and the group's `members`.
    pub(crate) fn tell(self, fabric: &dyn Alarm, members: &[usize]) -> Result<(usize, Cause, String), Failure> {
        let (of, who) = (|rank: usize| members[rank], |rank: usize| fabric.who(members[rank]));
        let silent = |ranks: Vec<usize>, after| {
            let names: Vec<String> = ranks.iter().map(|rank| fabric.who(*rank)).collect();
            (ranks[0], Cause::Silent, format!("{} silent for {after:?}", names.join(", ")))
        };
        Ok(match self {
            Self::Failed(failure) => return Err(failure),
            Self::Late(ranks, after) => silent(ranks.into_iter().map(of).collect(), after),
            Self::Silent(ranks, after) => silent(ranks, after),
            Self::Overdue(rank, what) => (of(rank), Cause::Silent, what),
            Self::Left(rank) => (of(rank), Cause::Strayed, format!("{} has left", who(rank))),
            Self::Mismatch(rank, what) => (of(rank), Cause::Strayed, what),
            Self::Unreachable(rank, error) => {
                (of(rank), Cause::Died, format!("{} cannot be reached: {error}", who(rank)))
            }
            Self::Own(what) => (fabric.rank(), Cause::Told, format!("{}: {what}", fabric.who(fabric.rank()))),
        })
    }
}

impl From<candle_core::Error> for Trouble {
    fn from(error: candle_core::Error) -> Self {
        Self::Own(error.to_string())
    }
}
