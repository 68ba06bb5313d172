//! The first failure of a world, on which all its ranks agree.
//!
//! A rank that fails asks an arbiter whose failure came first: the store, or rank 0. Without an answer it keeps its own.

use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::liveness::deadline;
use crate::store::Client;
use crate::sync::{ignore_poison, lock};
use crate::transport::TransportError;
use crate::{Failure, Result};

/// The longest wait for an arbiter.
pub(crate) const ARBITRATE_WITHIN: Duration = Duration::from_secs(2);

/// The key of a world's first failure.
pub(crate) const FAILURE: &str = "failure";

/// A rank's knowledge of the world's first failure, beside a state of which its threads wait for changes.
#[derive(Default)]
pub(crate) struct FailureMonitor<S> {
    monitored: Mutex<Monitored<S>>,
    changed: Condvar,
}

/// The state that a [`FailureMonitor`] guards.
#[derive(Default)]
pub(crate) struct Monitored<S> {
    failure: Option<Failure>,
    state: S,
}

impl<S> FailureMonitor<S> {
    pub(crate) fn new(state: S) -> Self {
        Self { monitored: Mutex::new(Monitored { failure: None, state }), changed: Condvar::new() }
    }

    /// Returns the world's first failure, if there was one.
    pub(crate) fn failure(&self) -> Option<Failure> {
        self.lock().failure.clone()
    }

    /// Waits for the world's first failure, for as long as `within`.
    pub(crate) fn await_failure(&self, within: Duration) -> Option<Failure> {
        self.wait_until(deadline(within), |_| false).failure.clone()
    }

    /// Ends the world with `failure`, or with the earlier one that `arbitrate` returns. If the world had not ended on this
    /// rank, `announce` gets the first failure. Returns the first failure.
    pub(crate) fn fail(
        &self,
        failure: Failure,
        arbitrate: impl FnOnce(&Failure) -> Option<Failure>,
        announce: impl FnOnce(&Failure),
    ) -> Failure {
        if let Some(first) = self.failure() {
            return first;
        }
        let failure = failure.shortened();
        self.adopt(arbitrate(&failure).unwrap_or(failure), announce)
    }

    /// Takes over a failure on which ranks have agreed, unless there was one before. A new one is given to `announce`.
    /// Returns the first failure.
    pub(crate) fn adopt(&self, failure: Failure, announce: impl FnOnce(&Failure)) -> Failure {
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

    /// Waits until `done` holds or the world has ended, no longer than the deadline.
    pub(crate) fn wait_until(&self, deadline: Instant, done: impl Fn(&S) -> bool) -> MutexGuard<'_, Monitored<S>> {
        let left = deadline.saturating_duration_since(Instant::now());
        let waits = |monitored: &mut Monitored<S>| monitored.failure.is_none() && !done(&monitored.state);
        ignore_poison(self.changed.wait_timeout_while(self.lock(), left, waits)).0
    }

    /// Waits until `take` returns a value; `None` is the end of time. Fails if the world has ended without one.
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

    /// Wakes the threads that wait for a change of the state.
    pub(crate) fn notify(&self) {
        self.changed.notify_all();
    }
}

impl<S> Monitored<S> {
    pub(crate) fn failure(&self) -> Option<&Failure> {
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

/// A store that knows which failure was reported first.
pub(crate) struct StoreArbiter(Client);

impl StoreArbiter {
    /// Opens a connection of its own to the store.
    pub(crate) fn connect(store: &Client) -> Result<Self> {
        Ok(Self(store.reconnect_within(ARBITRATE_WITHIN)?))
    }

    /// Reports a failure and returns the first; `None` if the store does not answer.
    pub(crate) fn first(&self, failure: &Failure) -> Option<Failure> {
        let first = self.0.compare_set(FAILURE, &[], &failure.encode()).ok()?;
        Failure::decode(&first)
    }

    /// Returns its connection to the store.
    #[cfg(any(test, feature = "cuda"))]
    pub(crate) fn store(&self) -> &Client {
        &self.0
    }
}
