//! What memory a run will need, computed from its plan alone: no weights are loaded, no device and no data are touched.
//!
//! [`Setup`] is what of a plan matters. `parameters`, `block`, `head`, `tasks` and `program` have the formulas, each for one part
//! of the code; `phases` adds them up as the engine does in time. `longest` and `modes` solve the same formulas.

mod account;
mod block;
mod capacity;
mod free_ram;
mod head;
mod longest;
mod modes;
mod parameters;
mod phases;
mod program;
mod report;
mod setup;
mod shortage;
mod tasks;

pub use account::{Account, Class};
pub use capacity::{Capacity, parse_bytes};
pub use longest::longest;
pub use modes::{Candidate, Choice, Fixed, Modes, choose, usable};
pub use parameters::counts as parameter_counts;
pub use phases::{Estimate, Phase, PhaseEstimate, estimate, estimate_stage};
pub use report::{Advice, Report, bytes, written};
pub use setup::{Place, Setup, SetupError};
pub use shortage::{Resource, Shortage};
pub use tasks::Asking;
