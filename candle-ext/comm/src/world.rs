//! One rank's membership in a whole run, and what it was joined with.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use crate::call::CallTrace;
use crate::group::TransportGroup;
use crate::store::Server;
use crate::thread_pool::ThreadPool;
use crate::transport::{FailureChannel, Transport};
use crate::{Call, Cause, Collective, KeepAlive, RankFailure, Result, Solo, threads};

/// How a world behaves.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How long a rank may be silent while others wait for it: until all have joined, until the sockets of a group are
    /// there, and between any two bytes of an operation. An operation as a whole may take longer, and so may work under
    /// [`KeepAlive`].
    pub timeout: Duration,
    /// Whether every call is kept, for [`World::calls`].
    pub record: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(600), record: false }
    }
}

/// One rank's end of a world: the group of all ranks, and the way to end it for all.
///
/// Dropping it, when the groups are dropped too, waits until what was started is finished, and leaves; dropping it in a
/// panic ends the world. [`World::run`] also ends it after an error.
pub struct World {
    group: Arc<dyn Collective>,
    threads: Arc<ThreadPool>,
    // After the threads, which are waited for.
    channel: Arc<dyn FailureChannel>,
    timeout: Duration,
    trace: CallTrace,
    /// What the ranks meet in, where this one has to keep it.
    host: Option<Server>,
}

impl World {
    /// Makes a world of one rank.
    pub fn solo() -> Self {
        Self::single_rank(threads::solo_transport())
    }

    /// Makes the world of the one rank of `transport`.
    pub(crate) fn single_rank(transport: Arc<dyn Transport>) -> Self {
        let (threads, trace) = (Arc::default(), CallTrace::default());
        Self { group: Arc::new(Solo), threads, channel: transport, timeout: Duration::MAX, trace, host: None }
    }

    /// Connects all ranks that `transport` reaches.
    pub(crate) fn open(transport: Arc<dyn Transport>, size: usize, options: &Options) -> Result<Self> {
        let trace = CallTrace::new(options.record);
        let threads = Arc::default();
        let group = Arc::new(TransportGroup::world(&transport, size, &trace, &threads)?);
        Ok(Self { group, threads, channel: transport, timeout: options.timeout, trace, host: None })
    }

    /// Makes one of a group whose ranks hear of a failure from `channel`, and whose threads are `threads`.
    #[cfg(feature = "cuda")]
    pub(crate) fn from_group(
        group: Arc<dyn Collective>,
        channel: Arc<dyn FailureChannel>,
        timeout: Duration,
        threads: Arc<ThreadPool>,
        trace: CallTrace,
    ) -> Self {
        Self { group, threads, channel, timeout, trace, host: None }
    }

    /// The same, with another group over that of all ranks.
    pub(crate) fn wrap_group(mut self, group: impl FnOnce(Arc<dyn Collective>) -> Arc<dyn Collective>) -> Self {
        let below = std::mem::replace(&mut self.group, Arc::new(Solo));
        self.group = group(below);
        self
    }

    /// The same, with the store that its ranks meet in.
    pub(crate) fn with_host(mut self, host: Option<Server>) -> Self {
        self.host = host;
        self
    }

    /// Returns the group of all ranks.
    pub fn group(&self) -> Arc<dyn Collective> {
        Arc::clone(&self.group)
    }

    /// Returns this process's rank.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.group.size()
    }

    /// Ends the world because of something that went wrong on this rank: what the others wait for will not come.
    /// Returns the world's failure, which is another one if there was one before.
    pub fn fail(&self, why: impl Display) -> RankFailure {
        let rank = self.rank();
        self.channel.fail(RankFailure {
            rank,
            cause: Cause::Reported,
            message: format!("go on: rank {rank} failed to {why}"),
        })
    }

    /// Returns the signs of life of this rank while it is busy with work of its own.
    pub fn keep_alive(&self) -> KeepAlive {
        KeepAlive::new(Arc::clone(&self.channel), self.timeout, self.size())
    }

    /// Returns why the world has ended, if it has.
    pub fn failure(&self) -> Option<RankFailure> {
        self.channel.failure()
    }

    /// Waits until the world has ended, for as long as `within`, and returns why.
    pub fn await_failure(&self, within: Duration) -> Option<RankFailure> {
        self.channel.await_failure(within)
    }

    /// Does this rank's part and leaves. An error of it ends the world before anything is waited for; the world's failure
    /// is returned, which is another one if there was one before.
    pub fn run<T, E: Display>(self, part: impl FnOnce(&Self) -> Result<T, E>) -> Result<T> {
        let done = part(&self).map_err(|error| self.fail(error))?;
        self.leave()?;
        Ok(done)
    }

    /// Waits until what was started in the groups is finished, and leaves. Fails if the world has ended, as it has when an
    /// operation failed that nobody waited for. A group that is still held elsewhere is not waited for.
    pub fn leave(mut self) -> Result<()> {
        self.group = Arc::new(Solo);
        if let Some(threads) = Arc::get_mut(&mut self.threads) {
            threads.join_all();
        }
        self.failure().map_or(Ok(()), |failure| Err(failure.into()))
    }

    /// Returns this rank's calls so far, to all its groups, if [`Options::record`] was asked for. Groups of one rank
    /// record nothing.
    pub fn calls(&self) -> Vec<Call> {
        self.trace.calls()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.fail("finish: it panicked");
        }
    }
}
