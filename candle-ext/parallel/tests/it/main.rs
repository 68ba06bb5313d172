//! Integration tests of the engine: one binary, one module for each subject.
#![allow(clippy::unwrap_used, missing_docs)]

mod cpu_offload;
mod engine;
mod experts;
mod fp8_fused;
mod inference;
mod memory;
mod mixer;
mod modes;
mod mtp;
mod optimizer_groups;
mod reduce_dtype;
mod transformers_loss;
