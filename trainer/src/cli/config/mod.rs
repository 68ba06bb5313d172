//! `trainer config`: explains recipe keys and compares resolved settings.

pub(super) mod diff;
mod explain;
mod explain_json;
mod explained_key;
pub(super) mod settings;

use anyhow::Result;
use clap::Subcommand;

use super::Ui;
use super::options::Verbosity;
use crate::exit::ExitCode;

#[derive(Debug, Subcommand)]
pub(super) enum ConfigCommand {
    /// Explain a recipe key or section; with a recipe, also its resolved value and the origin of the value
    #[command(after_long_help = explain::EXAMPLES)]
    Explain(explain::ExplainArgs),
    /// Compare the resolved settings of two recipes or runs, and print those that differ
    #[command(after_long_help = diff::EXAMPLES)]
    Diff(diff::DiffArgs),
}

/// Examples of all commands, for a test.
#[cfg(test)]
pub(super) const EXAMPLES: [&str; 2] = [explain::EXAMPLES, diff::EXAMPLES];

pub(super) fn run(command: &ConfigCommand, verbosity: Verbosity, ui: &Ui) -> Result<ExitCode> {
    match command {
        ConfigCommand::Explain(args) => explain::run(args, verbosity, ui),
        ConfigCommand::Diff(args) => diff::run(args, verbosity, ui),
    }
}
