//! `trainer fp8-advise`: measures which linear layers are faster in FP8 on this device.

use anyhow::{Context, Result};
use clap::Args;

use super::Ui;
use super::options::{RecipeArgs, Verbosity, at_least_one, plan};
use crate::exit::ExitCode;
use crate::fp8_advice::advise;
use crate::resolve::WorldInfo;

#[derive(Debug, Args)]
pub(super) struct Fp8AdviseArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Number of ranks; the layers are those of one of them
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    ranks: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Examples for the long help.
pub(super) const EXAMPLES: &str = "\
Examples:
  trainer fp8-advise recipe.yaml
  trainer fp8-advise recipe.yaml --ranks 8 tensor_parallel_size=2 precision.recipe=blockwise
Without precision.recipe, all three recipes are measured. Weights are random; no data is read.";

pub(super) fn run(args: &Fp8AdviseArgs, verbosity: Verbosity, ui: &Ui) -> Result<ExitCode> {
    let world = || WorldInfo::first_of(args.ranks);
    let given = plan(&args.recipe, verbosity, world())?;
    let plans = match given.fp8 {
        Some(_) => vec![given],
        None => {
            let with = |name: &&str| {
                let recipe = format!("precision.recipe={name}");
                let overrides = args.recipe.overrides.iter().cloned().chain([recipe]).collect();
                plan(&RecipeArgs { path: args.recipe.path.clone(), overrides }, verbosity, world())
            };
            ["delayed", "current", "blockwise"].iter().map(with).collect::<Result<_>>()?
        }
    };
    let device = plans[0].device.open().context("failed to open the device")?;
    let mut all = Vec::new();
    for plan in &plans {
        let config = plan.model.config.clone().context("failed to build the model: its config is not known")?;
        let fp8 = plan.fp8.as_ref().context("the recipe has no section precision")?;
        let advice = advise(plan, &plan.build_model(config)?, fp8.config(plan.seed), &device)?;
        if !args.json {
            ui.print(&advice.to_string())?;
        }
        all.push(advice);
    }
    if args.json {
        ui.print(&serde_json::to_string_pretty(&all).context("failed to write the advice as JSON")?)?;
    }
    Ok(ExitCode::Ok)
}
