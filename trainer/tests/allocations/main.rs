//! Peak memory of training as the process's allocator counts it, compared with the estimate.
//!
//! A binary of its own: it replaces the allocator, and nothing else may allocate while a test counts.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../estimated/mod.rs"]
mod estimated;
mod fp8;
mod one_rank;
mod out_of_memory;
mod ranks;

use std::panic::resume_unwind;
use std::sync::{Mutex, PoisonError};
use std::thread;

use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Runs a test while the others wait. Its thread has ended, and freed its buffers, before the next test begins.
fn alone(test: fn()) {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    thread::spawn(test).join().unwrap_or_else(|panic| resume_unwind(panic));
}
