//! Integration tests of the evaluator: one binary with one module for each subject.
#![allow(clippy::unwrap_used, missing_docs)]

mod answers;
mod batch_invariance;
mod chat;
mod encoding;
mod lm_eval;
mod report;
mod run;
mod scoring;
mod serve;
mod support;
mod tasks_cli;
mod timings;
