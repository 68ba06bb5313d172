//! The workers of one node in one generation: the decisions about them, and what carries these out.

mod decisions;
mod run;
mod worker;

pub use decisions::{
    Action, Announcement, ShutdownPolicy, SignalsSent, WorkerExit, WorkerGroupOutcome, WorkerGroupRun, root_cause,
};
pub use run::{WorkerGroupResult, WorkerGroupSpec, run, worker_spec};
pub use worker::{WorkerProcess, WorkerSpec};
