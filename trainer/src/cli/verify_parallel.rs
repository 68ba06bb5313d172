//! `trainer verify-parallel`: compares what the recipe's ranks compute with what one rank computes.

use anyhow::{Context, Result};
use clap::Args;

use super::Ui;
use super::options::{Recipe, Verbosity, at_least_one, plan};
use crate::exit::ExitCode;
use crate::plan::WorldInfo;
use crate::verify_parallel::verify_parallel;

#[derive(Debug, Args)]
pub(super) struct VerifyParallel {
    #[command(flatten)]
    recipe: Recipe,
    /// Processes that train together
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    ranks: usize,
    /// For programs
    #[arg(long)]
    json: bool,
}

/// The examples of the long help.
pub(super) const EXAMPLES: &str = "\
Examples:
  trainer verify-parallel recipe.yaml --ranks 4
  trainer verify-parallel recipe.yaml --ranks 8 tensor_parallel_size=2 pipeline_parallel_size=2
Exits with 1 if they differ by more than rounding.";

pub(super) fn run(asked: &VerifyParallel, verbosity: Verbosity, ui: &Ui) -> Result<ExitCode> {
    let plan = plan(&asked.recipe, verbosity, WorldInfo::first_of(asked.ranks))?;
    let report = verify_parallel(&plan)?;
    match asked.json {
        true => ui.answer(&serde_json::to_string_pretty(&report).context("failed to write the report as JSON")?)?,
        false => ui.answer(&report.to_string())?,
    };
    Ok(if report.passes() { ExitCode::Ok } else { ExitCode::Failed })
}
