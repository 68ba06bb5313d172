//! Peak memory of training as the process's allocator counts it, compared with the estimate.
//!
//! A binary of its own: it replaces the allocator. Nothing else may allocate while a test counts.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../estimated/mod.rs"]
mod estimated;
mod fp8;
mod one_rank;
mod out_of_memory;
mod ranks;

use std::process::Command;

use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Runs the test `name` in a process of its own, with two threads: each thread of rayon keeps buffers, which are not estimated.
#[track_caller]
fn alone(name: &str, test: fn()) {
    const CHILD: &str = "CANDLEWICK_ALLOCATIONS_TEST";
    if std::env::var_os(CHILD).is_some() {
        return test();
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", name, "--nocapture"]).env(CHILD, "1").env("RAYON_NUM_THREADS", "2");
    let output = child.output().unwrap();
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    eprintln!("{stderr}");
    assert!(output.status.success() && stdout.contains("1 passed"), "{name}: {}\n{stdout}", output.status);
}
