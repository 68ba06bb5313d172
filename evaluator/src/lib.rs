//! Evaluates language models on lm-evaluation-harness tasks: prompts, scores, results and the command line.

pub mod chat;
pub mod cli;
mod environment;
pub mod evaluation;
pub mod exit;
pub mod output;
pub mod results;
pub mod run_metadata;
pub mod task;
