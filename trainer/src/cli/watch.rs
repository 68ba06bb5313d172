//! `trainer watch`: a view of a run in the terminal, or its summary.

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::time::SystemTime;

use anyhow::Result;
use clap::Args;

use super::Ui;
use crate::exit::ExitCode;
use crate::run_history::RunHistory;
use crate::watch::{summary_text, watch};

#[derive(Debug, Args)]
pub(super) struct WatchArgs {
    /// Output folder of a run, or its metrics.jsonl. The run may start later
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Print a summary and exit, as without a terminal. The run must have started
    #[arg(long)]
    once: bool,
}

/// Examples for the long help.
pub(super) const EXAMPLES: &str = "\
Examples:
  trainer watch runs/quickstart
  trainer watch runs/quickstart --once
  trainer watch runs/quickstart/metrics.1.jsonl
Keys: q quits, Tab and the arrows select a chart, l switches the scale, s the smoothing, x the x axis.";

pub(super) fn run(args: &WatchArgs, ui: &Ui) -> Result<ExitCode> {
    if args.once || !io::stdout().is_terminal() {
        return ui.print(&summary_text(&RunHistory::read(&args.run)?, SystemTime::now()));
    }
    watch(&args.run).map(|()| ExitCode::Ok)
}
