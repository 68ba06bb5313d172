//! Integration tests of process groups without MPI or a GPU: one binary with one module for each subject.
#![allow(clippy::unwrap_used)]

#[path = "../cases/mod.rs"]
mod cases;
#[cfg(target_os = "linux")]
mod local;
mod store;
mod store_torch;
mod threads;
