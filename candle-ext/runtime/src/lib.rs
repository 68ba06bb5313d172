//! Process-level parts that the programs share: exit codes and errors as text, the error file of a launcher, the allocator, the cores of
//! a rank, its place among the ranks, and progress lines.
//!
//! This is the one library crate that reads the environment.

pub mod allocator;
pub mod cores;
pub mod error_file;
pub mod exit;
pub mod process_group;
pub mod process_memory;
pub mod progress;
pub mod rank_env;
pub mod run_id;
pub mod stdout;
