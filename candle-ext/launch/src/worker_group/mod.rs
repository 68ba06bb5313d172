//! The workers of one node in one generation: the decisions about them, and what carries these out.

mod decisions;
mod run;
mod worker;

pub use decisions::{Action, Announcement, Outcome, Rules, SignalsSent, WorkerExit, WorkerGroupRun, root_cause};
pub use run::{Ending, Setting, run, start_of};
pub use worker::{Start, Worker};
