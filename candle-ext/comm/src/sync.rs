//! Locks of a state that is consistent between any two statements, so that a panic elsewhere does not spoil it.

use std::sync::{LockResult, Mutex, MutexGuard, PoisonError};

/// Locks a mutex, also after a thread panicked while it held the lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    ignore_poison(mutex.lock())
}

/// Returns the guard of a wait, also after a thread panicked while it held the lock.
pub(crate) fn ignore_poison<G>(result: LockResult<G>) -> G {
    result.unwrap_or_else(PoisonError::into_inner)
}
