//! Compute threads of the CPU: rayon's pool, one thread per core or RAYON_NUM_THREADS.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::Device;
use rayon::Yield;

/// Failed attempts to steal work before a spinning thread sleeps: about two milliseconds.
///
/// The thread does not yield to the operating system. Otherwise it might share a core with the thread that it waits
/// for.
const PATIENCE: u32 = 8192;
/// Spin-loop hints between two attempts.
const PAUSES: u32 = 4;

/// Adds the calling thread to rayon's global pool, so that it computes instead of waiting.
///
/// Call this first in a program; later calls have no effect.
pub fn join_rayon_pool() {
    // An error means that the pool is there already.
    let _ = rayon::ThreadPoolBuilder::new().use_current_thread().build_global();
}

/// Guard of [`spin_workers`]: the workers may sleep again when it is dropped.
#[must_use = "the threads may sleep when it is dropped"]
pub struct SpinGuard {
    done: Arc<AtomicBool>,
}

/// Makes rayon's workers spin between ops if `device` is a CPU; they stop when the guard is dropped.
///
/// Waking a thread takes longer than many ops, and idle rayon threads sleep after microseconds. A call from a thread
/// outside of the pool has no effect.
pub fn spin_workers(device: &Device) -> Option<SpinGuard> {
    device.is_cpu().then(SpinGuard::begin)
}

impl SpinGuard {
    fn begin() -> Self {
        let done = Arc::new(AtomicBool::new(false));
        if let Some(caller) = rayon::current_thread_index() {
            let done = done.clone();
            rayon::spawn_broadcast(move |thread| {
                // The caller may pick up this job while it waits for a part of an op; it must not wait for itself.
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

/// Steals and runs work of other threads until `done`.
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
    fn spinning_threads_work_and_sleep_again_afterwards() -> Result<(), rayon::ThreadPoolBuildError> {
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
    fn a_spin_guard_outside_of_the_pool_has_no_effect() {
        drop(SpinGuard::begin());
    }
}
