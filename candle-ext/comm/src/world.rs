//! Membership of one rank in a world.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use crate::call::CallTrace;
use crate::group::TransportGroup;
use crate::store::Server;
use crate::thread_pool::ThreadPool;
use crate::transport::{FailureChannel, Transport};
use crate::{Cause, Collective, CollectiveCall, KeepAlive, RankFailure, Result, Solo, threads};

/// Options of a world.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Timeout of a rendezvous, of connecting a group, and of an exchange without progress or heartbeats.
    ///
    /// A whole operation may take longer, and so may work under [`KeepAlive`].
    pub timeout: Duration,
    /// Record every call for [`World::calls`].
    pub record: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(600), record: false }
    }
}

/// One rank's handle of the world: the group of all ranks, and the means to abort it.
///
/// Dropping it, after all groups, waits for the started operations and leaves the world. Dropping it during a panic aborts the
/// world. [`World::run`] also aborts it after an error.
pub struct World {
    group: Arc<dyn Collective>,
    threads: Arc<ThreadPool>,
    // Dropped after the threads are joined.
    channel: Arc<dyn FailureChannel>,
    timeout: Duration,
    trace: CallTrace,
    /// Rendezvous store, if this rank hosts it.
    host: Option<Server>,
}

impl World {
    /// Creates a world of one rank.
    pub fn solo() -> Self {
        Self::single_rank(threads::solo_transport())
    }

    /// Creates a world of one rank over `transport`.
    pub(crate) fn single_rank(transport: Arc<dyn Transport>) -> Self {
        let (threads, trace) = (Arc::default(), CallTrace::default());
        Self { group: Arc::new(Solo), threads, channel: transport, timeout: Duration::MAX, trace, host: None }
    }

    /// Connects all ranks of `transport`.
    pub(crate) fn open(transport: Arc<dyn Transport>, size: usize, options: &Options) -> Result<Self> {
        let trace = CallTrace::new(options.record);
        let threads = Arc::default();
        let group = Arc::new(TransportGroup::world(&transport, size, &trace, &threads)?);
        Ok(Self { group, threads, channel: transport, timeout: options.timeout, trace, host: None })
    }

    /// Creates a world from the group of all ranks, the channel of failures, and the group's threads.
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

    /// Wraps the group of all ranks.
    pub(crate) fn wrap_group(mut self, group: impl FnOnce(Arc<dyn Collective>) -> Arc<dyn Collective>) -> Self {
        let below = std::mem::replace(&mut self.group, Arc::new(Solo));
        self.group = group(below);
        self
    }

    /// Hosts the rendezvous store, if given.
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

    /// Aborts the world because this rank failed to `why`. Pending calls of all ranks fail.
    ///
    /// Returns the world's first failure.
    pub fn fail(&self, why: impl Display) -> RankFailure {
        let rank = self.rank();
        self.channel.fail(RankFailure {
            rank,
            cause: Cause::Reported,
            message: format!("continue: rank {rank} failed to {why}"),
        })
    }

    /// Returns a handle that sends heartbeats while this rank is busy.
    pub fn keep_alive(&self) -> KeepAlive {
        KeepAlive::new(Arc::clone(&self.channel), self.timeout, self.size())
    }

    /// Returns the first failure, if the world has failed.
    pub fn failure(&self) -> Option<RankFailure> {
        self.channel.failure()
    }

    /// Waits up to `within` for a failure of the world, and returns it.
    pub fn await_failure(&self, within: Duration) -> Option<RankFailure> {
        self.channel.await_failure(within)
    }

    /// Waits up to `within` for the exit of `rank`, or for a failure of the world if the backend does not detect exits.
    pub fn await_exit(&self, rank: usize, within: Duration) {
        self.channel.await_exit(rank, within);
    }

    /// Leaves the world at the exit of this process, or now if the backend does not detect exits.
    pub fn leave_at_exit(self) {
        if self.channel.detects_exits() {
            std::mem::forget(self);
        }
    }

    /// Runs `part` and leaves the world. If `part` fails, aborts the world before waiting for started operations.
    ///
    /// Returns the world's first failure if it has failed.
    pub fn run<T, E: Display>(self, part: impl FnOnce(&Self) -> Result<T, E>) -> Result<T> {
        let done = part(&self).map_err(|error| self.fail(error))?;
        self.leave()?;
        Ok(done)
    }

    /// Waits for the started operations and leaves the world. Fails if the world has failed.
    ///
    /// The failure may be that of an operation whose [`Pending`](crate::Pending) was dropped. Does not wait for the operations
    /// of groups that are still in use.
    pub fn leave(mut self) -> Result<()> {
        self.group = Arc::new(Solo);
        if let Some(threads) = Arc::get_mut(&mut self.threads) {
            threads.join_all();
        }
        self.failure().map_or(Ok(()), |failure| Err(failure.into()))
    }

    /// Returns this rank's calls to all its groups so far, if [`Options::record`] is set.
    ///
    /// Groups of one rank record nothing.
    pub fn calls(&self) -> Vec<CollectiveCall> {
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
