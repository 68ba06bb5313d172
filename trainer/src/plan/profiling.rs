//! The measurements of a run that slow it down, each off by default.

use std::path::PathBuf;

use serde::Serialize;

use crate::recipe::MemProfiler;

/// The measurements of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ProfilingPlan {
    /// True logs the times of each step's phases. A GPU is synchronized around each phase.
    pub wall_clock_breakdown: bool,
    /// The memory profile; `None` records none.
    pub memory: Option<MemoryProfilePlan>,
}

/// The settings of a memory profile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryProfilePlan {
    /// The part of the run that is recorded.
    pub mode: MemProfiler,
    /// The folder of the ranks' files.
    pub dir: PathBuf,
    /// The number of newest entries that are kept.
    pub max_entries: usize,
}
