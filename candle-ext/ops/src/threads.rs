//! The threads that compute on the CPU: rayon's, as many as there are cores, or RAYON_NUM_THREADS.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::Device;
use rayon::Yield;

/// Looks for work, in vain, before a thread sleeps after all: about two milliseconds. It does not yield meanwhile: a thread
/// that does may share a core with the one that it waits for, while another core has nothing to do.
const PATIENCE: u32 = 8192;
/// Pauses between two looks.
const PAUSES: u32 = 4;

/// Makes the calling thread one of them: it then works on what it would otherwise hand over and wait for. The first thing
/// that a program does; later calls change nothing.
pub fn join_rayon_pool() {
    // An error means that the pool is there already.
    let _ = rayon::ThreadPoolBuilder::new().use_current_thread().build_global();
}

/// Keeps the other compute threads awake as long as it lives. See [`spin_workers`].
#[must_use = "the threads may sleep when it is dropped"]
pub struct SpinGuard {
    done: Arc<AtomicBool>,
}

/// Keeps the compute threads awake between ops if `device` is a CPU. Waking a thread takes longer than many an op, and rayon's
/// threads sleep after microseconds without work. A call from a thread outside of the pool does nothing.
pub fn spin_workers(device: &Device) -> Option<SpinGuard> {
    device.is_cpu().then(SpinGuard::begin)
}

impl SpinGuard {
    fn begin() -> Self {
        let done = Arc::new(AtomicBool::new(false));
        if let Some(caller) = rayon::current_thread_index() {
            let done = done.clone();
            rayon::spawn_broadcast(move |thread| {
                // The caller meets this job while it waits for a part of an op: it must not wait for itself.
                if thread.index() != caller {
                    work_until(&done);
                }
            });
        }
        Self { done }
    }
}

impl Drop for SpinGuard {
    fn drop(&mut self) {
        self.done.store(true, Ordering::Relaxed);
    }
}

/// Does what others have to give.
fn work_until(done: &AtomicBool) {
    let mut n_in_vain = 0;
    while n_in_vain < PATIENCE && !done.load(Ordering::Relaxed) {
        if rayon::yield_now() == Some(Yield::Executed) {
            n_in_vain = 0;
        } else {
            n_in_vain += 1;
            (0..PAUSES).for_each(|_| std::hint::spin_loop());
        }
    }
}

#[cfg(test)]
mod tests {
    use rayon::prelude::*;

    use super::*;

    #[test]
    fn threads_that_stay_awake_work_and_go_back_to_sleep() -> Result<(), rayon::ThreadPoolBuildError> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build()?;
        for _ in 0..50 {
            let sum: usize = pool.install(|| {
                let _spinning = SpinGuard::begin();
                let _nested = SpinGuard::begin();
                (0..1000usize).into_par_iter().with_max_len(1).sum()
            });
            assert_eq!(sum, 499_500);
        }
        Ok(())
    }

    #[test]
    fn a_thread_of_another_pool_or_none_keeps_nobody_awake() {
        drop(SpinGuard::begin());
    }
}
