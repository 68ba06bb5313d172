//! Evaluates language models on lm-evaluation-harness tasks: prompts, scores, results and the command line.

pub mod about;
pub mod chat;
pub mod cli;
mod environment;
pub mod exit;
pub mod output;
pub mod questions;
pub mod results;
pub mod task;
