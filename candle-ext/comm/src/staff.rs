//! The threads of a rank's groups, which outlive the groups: who drops a group does not wait.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// Waits, when it is dropped, until every thread has ended. After a panic nothing is certain to end, and nobody waits.
#[derive(Debug, Default)]
pub(crate) struct Staff(Mutex<Vec<JoinHandle<()>>>);

impl Staff {
    pub(crate) fn hire(&self, name: String, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let thread = thread::Builder::new().name(name).spawn(work)?;
        let mut threads = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
        Ok(())
    }

    /// Waits until every thread has ended.
    pub(crate) fn dismiss(&mut self) {
        for thread in self.0.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            thread.join().expect("a thread turns a panic into a failure");
        }
    }
}

impl Drop for Staff {
    fn drop(&mut self) {
        if !thread::panicking() {
            self.dismiss();
        }
    }
}
