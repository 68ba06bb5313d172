//! The logging settings of a run.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::tracking_plan::TrackingPlan;

/// The resolved logging settings of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogPlan {
    /// The JSON lines file of `train_log_metrics_path`; `None` disables it.
    pub metrics_path: Option<PathBuf>,
    /// The file of sample generations, if evaluations generate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub samples_path: Option<PathBuf>,
    /// The folder of `run.json`; `None` (a recipe's `/dev/null`) disables it.
    pub output_dir: Option<PathBuf>,
    /// Print a line at least every this many steps; 0 leaves it to `train_log_iter_interval`.
    pub loss_log_interval: usize,
    /// Record and print every this many steps; 0 disables the records.
    pub train_log_iter_interval: usize,
    /// Record and print every this many evaluations; 0 disables them.
    pub eval_log_iter_interval: usize,
    /// Count the zero gradients of each step.
    pub log_num_zeros_in_grad: bool,
    /// The verbosity of the terminal.
    pub console: Console,
    /// The trackers other than the metrics file.
    pub tracking: TrackingPlan,
}

/// The verbosity of the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Console {
    /// A line per step, and a progress bar if stderr is a terminal.
    Full,
    /// Lines without a bar: `-v`, whose log lines would interrupt it.
    Lines,
    /// No output: `-q`.
    Quiet,
}
