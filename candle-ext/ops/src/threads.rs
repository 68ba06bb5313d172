//! The threads that compute on the CPU: rayon's, as many as there are cores, or RAYON_NUM_THREADS.

/// Makes the calling thread one of them: it then works on what it would otherwise hand over and wait for. The first thing
/// that a program does; later calls change nothing.
pub fn join_compute_threads() {
    // An error means that the pool is there already.
    let _ = rayon::ThreadPoolBuilder::new().use_current_thread().build_global();
}
