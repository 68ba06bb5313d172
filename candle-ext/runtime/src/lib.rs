//! Process-level code of the programs: exit codes, error messages, torchelastic's error file, the allocator, threads per rank, the
//! launch environment, stop signals, log lines and progress.
//!
//! Only this library crate reads environment variables.

pub mod allocator;
pub mod cores;
pub mod error_file;
pub mod exit;
pub mod log_lines;
pub mod peer_error;
pub mod process_group;
pub mod process_memory;
pub mod progress;
pub mod rank_env;
pub mod run_id;
pub mod stack;
pub mod stop_signals;
pub mod terminal;
pub mod terminal_width;
pub mod timestamp;
