//! `trainer estimate`: the memory that a run will need.

use anyhow::{Context, Result, anyhow};
use clap::Args;

use super::Ui;
use super::options::{RecipeArgs, Verbosity, at_least_one, plan};
use crate::estimate::{Capacity, EstimateReport, FixedModes, Setup, choose, choose_micro_batch};
use crate::exit::ExitCode;
use crate::plan::MicroBatchChoice;
use crate::recipe::{Loaded, MemoryMode};
use crate::resolve::WorldInfo;

#[derive(Debug, Args)]
pub(super) struct EstimateArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Available memory: cpu, cuda, a GPU such as h100-80g, or bytes such as 24GiB [default: the free memory of the
    /// recipe's device]
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
    /// Number of ranks; the estimate is for one of them
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    ranks: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Examples for the long help.
pub(super) const EXAMPLES: &str = "\
Examples:
  trainer estimate recipe.yaml
  trainer estimate recipe.yaml --device h100-80g data.max_length=32Ki
  trainer estimate recipe.yaml --device 24GiB --json
The exit code is 4 if the run does not fit.";

pub(super) fn run(args: &EstimateArgs, verbosity: Verbosity, ui: &Ui) -> Result<ExitCode> {
    let loaded = Loaded::read(&args.recipe.path, &args.recipe.overrides)?;
    // `WorldInfo::first_of` leaves `memory: auto` and `micro_batch_size: auto` unresolved: the choices depend on --device.
    let plan = plan(&args.recipe, verbosity, WorldInfo::first_of(args.ranks))?;
    let capacity = match &args.device {
        Some(text) => {
            let parsed = Capacity::parse(text, plan.device);
            parsed.map_err(|problem| anyhow!("failed to read --device: {problem}").context(ExitCode::Usage))?
        }
        None => Capacity::now(plan.device),
    };
    let capacity = capacity.of_one(args.ranks);
    let mut setup = Setup::on(&plan, &capacity)?;
    if loaded.recipe.memory == Some(MemoryMode::Auto)
        && capacity.bytes.is_some()
        && let Some(found) = choose(&setup, FixedModes::of(&loaded), &capacity.usable()).found
    {
        setup.modes = found.modes;
    }
    let is_open = plan.micro_batch == MicroBatchChoice::FreeMemory;
    if is_open && capacity.bytes.is_some() && plan.reason_for_one_row().is_none() {
        let rows = choose_micro_batch(&setup, &capacity.usable()).rows;
        setup = Setup { rows: rows as u64, n_micros: setup.n_micros / rows, ..setup };
    }
    let mut report = EstimateReport::new(plan.recipe.display().to_string(), &setup, &capacity);
    if is_open {
        report.modes.insert("micro_batch_size".to_owned(), setup.rows.into());
        // Both, because the recipe's number is that of the rows.
        report.modes.insert("gradient_accumulation_steps".to_owned(), setup.n_micros.into());
    }
    match args.json {
        true => ui.print(&serde_json::to_string_pretty(&report).context("failed to write the estimate as JSON")?)?,
        false => ui.print(report.to_string().trim_end())?,
    };
    Ok(if report.fits == Some(false) { ExitCode::OutOfMemory } else { ExitCode::Ok })
}
