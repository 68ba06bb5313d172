//! Agreement of all ranks on the first failure of their world.
//!
//! A rank that fails reports to an arbiter, the store or rank 0, which returns the first failure. Without an answer the rank
//! keeps its own failure.

use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::liveness::deadline;
use crate::store::Client;
use crate::sync::{ignore_poison, lock};
use crate::transport::TransportError;
use crate::{RankFailure, Result};

/// Timeout of a report to the arbiter.
pub(crate) const ARBITRATE_WITHIN: Duration = Duration::from_secs(2);

/// Store key of the first failure.
pub(crate) const FAILURE: &str = "failure";

/// Monitor of the world's first failure and of a state. Threads wait for changes of either.
#[derive(Default)]
pub(crate) struct FailureMonitor<S> {
    monitored: Mutex<Monitored<S>>,
    changed: Condvar,
}

/// State that a [`FailureMonitor`] guards.
#[derive(Default)]
pub(crate) struct Monitored<S> {
    failure: Option<RankFailure>,
    state: S,
}

impl<S> FailureMonitor<S> {
    pub(crate) fn new(state: S) -> Self {
        Self { monitored: Mutex::new(Monitored { failure: None, state }), changed: Condvar::new() }
    }

    /// Returns the world's first failure, if there was one.
    pub(crate) fn failure(&self) -> Option<RankFailure> {
        self.lock().failure.clone()
    }

    /// Waits up to `within` for the world's first failure.
    pub(crate) fn await_failure(&self, within: Duration) -> Option<RankFailure> {
        self.wait_until(deadline(within), |_| false).failure.clone()
    }

    /// Aborts the world with `failure`, or with the earlier one that `arbitrate` returns. Returns the first failure.
    ///
    /// Calls `announce` with the first failure if it is new to this rank.
    pub(crate) fn fail(
        &self,
        failure: RankFailure,
        arbitrate: impl FnOnce(&RankFailure) -> Option<RankFailure>,
        announce: impl FnOnce(&RankFailure),
    ) -> RankFailure {
        if let Some(first) = self.failure() {
            return first;
        }
        let failure = failure.shortened();
        self.adopt(arbitrate(&failure).unwrap_or(failure), announce)
    }

    /// Records a failure on which ranks have agreed, unless the world has failed before. Returns the first failure.
    ///
    /// Calls `announce` with the first failure if it is new to this rank.
    pub(crate) fn adopt(&self, failure: RankFailure, announce: impl FnOnce(&RankFailure)) -> RankFailure {
        let mut monitored = self.lock();
        let is_new = monitored.failure.is_none();
        let first = monitored.failure.get_or_insert(failure).clone();
        drop(monitored);
        self.notify();
        if is_new {
            announce(&first);
        }
        first
    }

    /// Waits until `done` returns true, the world has failed, or the deadline has passed.
    pub(crate) fn wait_until(&self, deadline: Instant, done: impl Fn(&S) -> bool) -> MutexGuard<'_, Monitored<S>> {
        self.wait_while(deadline, |monitored| monitored.failure.is_none() && !done(&monitored.state))
    }

    /// Waits until `done` returns true or the deadline has passed, also after a failure of the world.
    pub(crate) fn wait_for_state(&self, deadline: Instant, done: impl Fn(&S) -> bool) {
        drop(self.wait_while(deadline, |monitored| !done(&monitored.state)));
    }

    fn wait_while(&self, deadline: Instant, waits: impl Fn(&Monitored<S>) -> bool) -> MutexGuard<'_, Monitored<S>> {
        let left = deadline.saturating_duration_since(Instant::now());
        ignore_poison(self.changed.wait_timeout_while(self.lock(), left, |monitored| waits(monitored))).0
    }

    /// Waits until `is_there` returns true and returns the value of `take`, or `None` at the deadline.
    ///
    /// Fails if the world has failed and `take` returns nothing.
    pub(crate) fn wait_for<T>(
        &self,
        deadline: Instant,
        is_there: impl Fn(&S) -> bool,
        take: impl FnOnce(&mut S) -> Option<T>,
    ) -> Result<Option<T>, TransportError> {
        let mut monitored = self.wait_until(deadline, is_there);
        match (take(&mut monitored.state), &monitored.failure) {
            (None, Some(failure)) => Err(TransportError::Failed(failure.clone())),
            (taken, _) => Ok(taken),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Monitored<S>> {
        lock(&self.monitored)
    }

    /// Wakes the threads that wait for a change.
    pub(crate) fn notify(&self) {
        self.changed.notify_all();
    }
}

impl<S> Monitored<S> {
    pub(crate) fn failure(&self) -> Option<&RankFailure> {
        self.failure.as_ref()
    }
}

impl<S> Deref for Monitored<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.state
    }
}

impl<S> DerefMut for Monitored<S> {
    fn deref_mut(&mut self) -> &mut S {
        &mut self.state
    }
}

/// Store that keeps the first reported failure.
pub(crate) struct StoreArbiter(Client);

impl StoreArbiter {
    /// Opens a dedicated connection to the store.
    pub(crate) fn connect(store: &Client) -> Result<Self> {
        Ok(Self(store.new_connection_with_timeout(ARBITRATE_WITHIN)?))
    }

    /// Reports a failure and returns the first one, or `None` if the store does not answer.
    pub(crate) fn first(&self, failure: &RankFailure) -> Option<RankFailure> {
        let first = self.0.compare_set(FAILURE, &[], &failure.encode()).ok()?;
        RankFailure::decode(&first)
    }

    /// Returns the connection to the store.
    #[cfg(any(test, feature = "cuda"))]
    pub(crate) fn store(&self) -> &Client {
        &self.0
    }
}
