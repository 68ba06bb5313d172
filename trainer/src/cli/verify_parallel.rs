//! `trainer verify-parallel`: compares training on the recipe's ranks with training on one rank.

use anyhow::{Context, Result};
use clap::Args;

use super::Ui;
use super::options::{RecipeArgs, Verbosity, at_least_one, plan};
use crate::exit::ExitCode;
use crate::resolve::WorldInfo;
use crate::verify_parallel::verify_parallel;

#[derive(Debug, Args)]
pub(super) struct VerifyParallelArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Number of ranks
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    ranks: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Examples for the long help.
pub(super) const EXAMPLES: &str = "\
Examples:
  trainer verify-parallel recipe.yaml --ranks 4
  trainer verify-parallel recipe.yaml --ranks 8 tensor_parallel_size=2 pipeline_parallel_size=2
The exit code is 1 if they differ by more than rounding.";

pub(super) fn run(args: &VerifyParallelArgs, verbosity: Verbosity, ui: &Ui) -> Result<ExitCode> {
    let plan = plan(&args.recipe, verbosity, WorldInfo::first_of(args.ranks))?;
    let report = verify_parallel(&plan)?;
    match args.json {
        true => ui.print(&serde_json::to_string_pretty(&report).context("failed to write the report as JSON")?)?,
        false => ui.print(&report.to_string())?,
    };
    Ok(if report.passes() { ExitCode::Ok } else { ExitCode::Failed })
}
