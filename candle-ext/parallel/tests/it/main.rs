//! Integration tests of the engine: one binary, one module for each subject.
#![allow(clippy::unwrap_used, missing_docs)]

mod cpu_offload;
mod engine;
mod experts;
mod inference;
mod memory;
mod modes;
mod mtp;
