//! The memory estimate of a run, computed from its plan. It loads no weights and opens no device or data.
//!
//! [`Setup`] is the part of a plan that memory depends on. The allocating crates compute their bytes from the sizes in
//! `costs`. `parameters`, `tasks` and `program` compute the rest. `phases` has the sums, and `search` compares modes.

mod capacity;
mod costs;
mod free_ram;
mod memory_breakdown;
mod micro_batch;
mod parameters;
mod phases;
mod program;
mod report;
mod search;
mod setup;
mod shortage;
mod tasks;

pub use candlewick_ops::DeviceKind;
pub use capacity::{Capacity, parse_bytes, usable};
pub use memory_breakdown::{Category, MemoryBreakdown, format_bytes};
pub use micro_batch::{MicroBatchCandidate, choose_micro_batch};
pub use parameters::{active_count as active_parameter_count, counts as parameter_counts};
pub use phases::{Estimate, Phase, PhaseEstimate, estimate, estimate_stage};
pub use report::{Advice, EstimateReport, as_arguments};
pub use search::{Candidate, FixedModes, ModeSearch, choose, max_row_tokens};
pub use setup::{EvalLoad, Modes, Setup, SetupError};
pub use shortage::{Resource, Shortage};
