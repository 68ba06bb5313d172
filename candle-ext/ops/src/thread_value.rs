//! Thread-local values for the duration of a call.

use std::cell::Cell;
use std::thread::LocalKey;

/// Calls `f` with `cell` set to `value`. Restores the previous value afterwards, even if `f` panics.
pub(crate) fn with_value<V: Copy, T>(cell: &'static LocalKey<Cell<V>>, value: V, f: impl FnOnce() -> T) -> T {
    struct Restore<V: Copy + 'static>(&'static LocalKey<Cell<V>>, V);
    impl<V: Copy> Drop for Restore<V> {
        fn drop(&mut self) {
            self.0.set(self.1);
        }
    }
    let _restore = Restore(cell, cell.replace(value));
    f()
}
