//! `trainer verify-resume`: compares a run that resumes from its checkpoint with an uninterrupted run.

use std::path::PathBuf;

use anyhow::{Context, Result, anyhow};
use candlewick_runtime::process_group::exit_after_peer;
use candlewick_runtime::progress::{ProgressDisplay, set_progress_display};
use candlewick_runtime::rank_env::rank_env;
use clap::Args;

use super::options::{RecipeArgs, Verbosity, plan_of_run, recipe_hub, world_info};
use super::{Ui, logging};
use crate::exit::ExitCode;
use crate::run::connect;
use crate::verify_resume::{ResumeCheck, ResumeReport, verify_resume};

#[derive(Debug, Args)]
pub(super) struct VerifyResumeArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Number of steps to compare
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = at_least_two)]
    steps: usize,
    /// Number of steps before the second run stops and resumes [default: half of --steps]
    #[arg(long, value_name = "N")]
    stop_after: Option<usize>,
    /// Folder for the checkpoints and metrics of both runs; must be missing, and is removed if the runs are equal
    #[arg(long, short, value_name = "DIR", default_value = "verify-resume")]
    output: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Examples for the long help.
pub(super) const EXAMPLES: &str = "\
Examples:
  trainer verify-resume recipe.yaml
  trainer verify-resume recipe.yaml --steps 20 --stop-after 7 --output /scratch/verify
  launch --standalone --nproc-per-node 2 -- trainer verify-resume recipe.yaml
The disk needs space for two checkpoints. The exit code is 1 if the runs differ in one bit.";

fn at_least_two(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n > 1).ok_or_else(|| "expected a number of steps, at least 2".into())
}

impl VerifyResumeArgs {
    fn check(&self) -> Result<ResumeCheck<'_>> {
        let stop_after = self.stop_after.unwrap_or(self.steps / 2);
        if !(1..self.steps).contains(&stop_after) {
            let last = self.steps - 1;
            return Err(anyhow!("failed to start: --stop-after {stop_after}: set 1 to {last}, less than --steps")
                .context(ExitCode::Usage));
        }
        Ok(ResumeCheck { steps: self.steps, stop_after, folder: &self.output })
    }

    fn print(&self, report: &ResumeReport, ui: &Ui) -> Result<ExitCode> {
        match self.json {
            true => ui.print(&serde_json::to_string_pretty(report).context("failed to write the report as JSON")?)?,
            false => ui.print(&report.to_string())?,
        };
        if !report.passes() {
            ui.note(&format!("the checkpoints and metrics of both runs are in {}", self.output.display()));
            return Ok(ExitCode::Failed);
        }
        std::fs::remove_dir_all(&self.output).with_context(|| format!("failed to remove {}", self.output.display()))?;
        Ok(ExitCode::Ok)
    }
}

pub(super) fn run(args: &VerifyResumeArgs, verbosity: Verbosity, ui: &Ui) -> Result<ExitCode> {
    let check = args.check()?;
    let env = rank_env()?;
    if env.local_rank > 0 {
        // The first rank of a machine shows the progress of all.
        set_progress_display(ProgressDisplay::Hidden);
    }
    let plan = plan_of_run(&args.recipe, verbosity, world_info(&env))?;
    logging::start(verbosity, &plan.logger, Vec::new())?;
    let (world, device) = connect(&plan, &env)?;
    let hub = recipe_hub(&plan.recipe)?;
    match verify_resume(&plan, &hub, (&world, &device), check) {
        Ok(report) => report.map_or(Ok(ExitCode::Ok), |report| args.print(&report, ui)),
        Err(error) => {
            exit_after_peer(world, &error);
            Err(error)
        }
    }
}
