//! The worker group: the workers of one node in one generation.

mod decisions;
mod run;
mod worker;

pub use decisions::{
    Action, Announcement, ShutdownPolicy, SignalsSent, WorkerExit, WorkerGroupOutcome, WorkerGroupRun, root_cause,
};
pub use run::{WorkerGroupResult, WorkerGroupSpec, run, worker_spec};
pub use worker::{WorkerProcess, WorkerSpec};
