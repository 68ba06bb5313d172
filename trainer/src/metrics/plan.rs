//! What a run reports, where and how often.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Describes a run's reports, resolved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogPlan {
    /// The JSON lines file of `train_log_metrics_path`; `None` writes none.
    pub metrics_path: Option<PathBuf>,
    /// The folder of `run.json`; `None` (a recipe's `/dev/null`) writes none.
    pub output_dir: Option<PathBuf>,
    /// Show a console line at least every so many steps; 0 leaves it to `train_log_iter_interval`.
    pub loss_log_interval: usize,
    /// Record and show every so many steps; 0 turns the records off.
    pub train_log_iter_interval: usize,
    /// Record and show every so many evaluations; 0 turns them off.
    pub eval_log_iter_interval: usize,
    /// How much goes to the terminal.
    pub console: Console,
}

/// Says how much goes to the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Console {
    /// A line a step, and a progress bar where stderr is a terminal.
    Full,
    /// Lines without a bar: `-v`, whose log lines would break it.
    Lines,
    /// Neither: `-q`.
    Quiet,
}
