//! The memory estimate of a run, computed from its plan. It loads no weights and opens no device or data.
//!
//! [`Setup`] is the part of a plan that memory depends on. `costs` hands its sizes to the crates that allocate, which declare
//! their bytes; `parameters`, `tasks` and `program` add the rest, and `phases` the sums. `search` compares modes.

mod capacity;
mod compute_device;
mod costs;
mod free_ram;
mod memory_breakdown;
mod parameters;
mod phases;
mod program;
mod report;
mod search;
mod setup;
mod shortage;
mod tasks;

pub use capacity::{Capacity, parse_bytes, usable};
pub use compute_device::ComputeDevice;
pub use memory_breakdown::{Category, MemoryBreakdown, bytes};
pub use parameters::counts as parameter_counts;
pub use phases::{Estimate, Phase, PhaseEstimate, estimate, estimate_stage};
pub use report::{Advice, EstimateReport, as_arguments};
pub use search::{Candidate, FixedModes, ModeSearch, choose, longest};
pub use setup::{EvalLoad, Modes, Setup, SetupError};
pub use shortage::{Resource, Shortage};
