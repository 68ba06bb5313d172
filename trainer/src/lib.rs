//! Training of language models from YAML recipes.

pub mod checkpoint;
pub mod cli;
pub mod convert;
pub mod data;
pub mod estimate;
pub mod exit;
pub mod export;
mod failpoint;
pub mod fp8_advice;
pub mod metrics;
pub mod plan;
pub mod plan_report;
pub mod profiling;
pub mod recipe;
pub mod resolve;
mod routing;
pub mod run;
pub mod run_history;
pub mod run_report;
pub mod schedule;
pub mod signals;
pub mod step_error;
pub mod step_fraction;
pub mod verify_parallel;
pub mod verify_resume;
pub mod watch;
