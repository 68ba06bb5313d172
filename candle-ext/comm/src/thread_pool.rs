//! Threads of a rank's process groups. They outlive the groups, so that dropping a group does not block.

use std::io;
use std::sync::Mutex;
use std::thread::{self, JoinHandle};

use crate::sync::{ignore_poison, lock};

/// Threads that are joined on drop. After a panic they may never end and are not joined.
#[derive(Debug, Default)]
pub(crate) struct ThreadPool(Mutex<Vec<JoinHandle<()>>>);

impl ThreadPool {
    pub(crate) fn spawn(&self, name: String, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let thread = thread::Builder::new().name(name).spawn(work)?;
        let mut threads = lock(&self.0);
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
        Ok(())
    }

    /// Waits until every thread has ended.
    pub(crate) fn join_all(&mut self) {
        for thread in ignore_poison(self.0.get_mut()).drain(..) {
            thread.join().expect("the thread catches panics");
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        if !thread::panicking() {
            self.join_all();
        }
    }
}
