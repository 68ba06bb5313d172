//! Prefetching: a thread that produces items ahead of their use, in a bounded queue.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{Builder, JoinHandle};

use super::DataError;

/// Items of a producer on its own thread, in their order.
#[derive(Debug)]
pub(crate) struct Prefetcher<T> {
    /// `None` only while the prefetcher is dropped.
    items: Option<Receiver<T>>,
    thread: Option<JoinHandle<()>>,
    is_dropped: Arc<AtomicBool>,
}

impl<T: Send + 'static> Prefetcher<T> {
    /// Starts `produce` on a thread. It waits while `depth` items are not taken, and ends when `produce` returns `None`.
    /// `produce` may end early once its argument returns true, because the item is then dropped.
    pub(crate) fn start(
        depth: usize,
        mut produce: impl FnMut(&(dyn Fn() -> bool + Sync)) -> Option<T> + Send + 'static,
    ) -> Result<Self, DataError> {
        let (sender, items) = sync_channel(depth);
        let is_dropped = Arc::new(AtomicBool::new(false));
        let dropped = is_dropped.clone();
        let work = move || {
            while let Some(item) = produce(&|| dropped.load(Ordering::Relaxed)) {
                // The receiver is dropped if the run ends early.
                if sender.send(item).is_err() {
                    return;
                }
            }
        };
        let thread = Builder::new().name("data loader".into()).spawn(work).map_err(|error| DataError::Plan {
            name: "data.dl_num_workers".into(),
            problem: format!("its thread could not be started ({error}); set it to 0"),
        })?;
        Ok(Self { items: Some(items), thread: Some(thread), is_dropped })
    }

    /// Waits for the next item; `None` after the last one.
    pub(crate) fn next(&mut self) -> Option<T> {
        let item = self.items.as_ref()?.recv().ok();
        if item.is_none()
            && let Some(thread) = self.thread.take()
            && let Err(panic) = thread.join()
        {
            resume_unwind(panic);
        }
        item
    }
}

impl<T> Drop for Prefetcher<T> {
    fn drop(&mut self) {
        self.items = None;
        self.is_dropped.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic was reported on the thread itself.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn items_keep_their_order_and_the_queue_its_bound() {
        let n_made = Arc::new(AtomicUsize::new(0));
        let counter = n_made.clone();
        let mut items = Prefetcher::start(2, move |_| {
            let item = counter.fetch_add(1, Ordering::SeqCst);
            (item < 50).then_some(item)
        })
        .unwrap();
        for want in 0..50 {
            assert_eq!(items.next(), Some(want));
            // Two items are in the queue, one waits for a place, and one may be in production.
            assert!(n_made.load(Ordering::SeqCst) <= want + 1 + 2 + 2);
        }
        assert_eq!((items.next(), items.next()), (None, None));
    }

    #[test]
    fn a_dropped_prefetcher_ends_its_thread() {
        let alive = Arc::new(());
        let held = alive.clone();
        let items = Prefetcher::start(1, move |_| Some(held.clone())).unwrap();
        drop(items);
        assert_eq!(Arc::strong_count(&alive), 1);
    }

    #[test]
    fn a_producer_learns_that_the_prefetcher_is_dropped() {
        let items = Prefetcher::start(1, |is_dropped| {
            while !is_dropped() {
                std::thread::yield_now();
            }
            Some(())
        });
        drop(items);
    }

    #[test]
    #[should_panic(expected = "row 7")]
    fn a_panic_of_the_producer_reaches_the_consumer() {
        let mut items = Prefetcher::<usize>::start(1, |_| panic!("row 7")).unwrap();
        items.next();
    }
}
