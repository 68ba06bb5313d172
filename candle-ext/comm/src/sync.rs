//! Locks that ignore poisoning. The guarded states are consistent after every statement.

use std::sync::{LockResult, Mutex, MutexGuard, PoisonError};

/// Locks a mutex and ignores poisoning.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    ignore_poison(mutex.lock())
}

/// Returns the guard of a wait and ignores poisoning.
pub(crate) fn ignore_poison<G>(result: LockResult<G>) -> G {
    result.unwrap_or_else(PoisonError::into_inner)
}
