//! `trainer check`: prints the resolved settings, and checks that the named files exist and that local weights fit the model.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use candlewick_text::hub::HubSettings;
use candlewick_text::source::FileFormat;
use clap::Args;

use super::Ui;
use super::options::{OutputFormat, RecipeArgs, Verbosity, WorldSizeArgs, known, locked_hub};
use crate::data::SourcePlan;
use crate::exit::ExitCode;
use crate::plan::Plan;
use crate::plan_report::SettingsFilter;
use crate::recipe::{Loaded, missing_path_advice};
use crate::resolve::HubAccess;
use crate::resolve::is_path;
use crate::run::{check_tasks, check_weights, count_steps, open_inputs};

#[derive(Debug, Args)]
pub(super) struct CheckArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Also print settings that have their default values (as -v does)
    #[arg(long)]
    all: bool,
    /// Also check that the model and the data are in the local cache, for runs without network
    #[arg(long)]
    offline: bool,
    #[command(flatten)]
    world: WorldSizeArgs,
    /// Output format
    #[arg(long, value_enum, default_value_t = OutputFormat::Text)]
    output_format: OutputFormat,
}

/// Examples for the long help.
pub(super) const EXAMPLES: &str = "\
Examples:
  trainer check recipe.yaml
  trainer check recipe.yaml --all
  trainer check recipe.yaml --offline
  trainer check recipe.yaml --ranks 16
  trainer check recipe.yaml --output-format json optimizer.lr=1e-4";

pub(super) fn run(args: &CheckArgs, verbosity: Verbosity, ui: &Ui) -> Result<ExitCode> {
    let loaded = Loaded::read(&args.recipe.path, &args.recipe.overrides)?;
    let access = if args.offline { HubAccess::Offline } else { HubAccess::ThisMachine };
    let known = known(&loaded, access, verbosity, args.world.world_info()?)?.of_run_here(&loaded);
    let plan = Plan::resolve(&loaded, &known)?;
    let hub = locked_hub(&plan.recipe, HubSettings { offline: true, ..HubSettings::from_env() })?;
    let counted = count_steps(&plan, &hub.cached_only());
    match args.output_format {
        OutputFormat::Text => {
            let counted = counted.as_ref().ok().and_then(Option::as_ref);
            ui.print(plan.table_with_steps(shown(args, verbosity), counted).trim_end())?
        }
        OutputFormat::Json => {
            ui.print(&serde_json::to_string_pretty(&plan).context("failed to write the plan as JSON")?)?
        }
    };
    check_tasks(&plan)?;
    if args.offline {
        open_inputs(&plan, &hub)?;
    } else {
        stat_local_files(&plan)?;
    }
    counted?;
    check_weights(&plan, &hub.cached_only())?.iter().for_each(|note| tracing::warn!("{note}"));
    Ok(ExitCode::Ok)
}

fn shown(args: &CheckArgs, verbosity: Verbosity) -> SettingsFilter {
    if args.all || verbosity.verbose > 0 { SettingsFilter::All } else { SettingsFilter::Set }
}

fn sources(plan: &Plan) -> impl Iterator<Item = &SourcePlan> {
    plan.data.sources.iter().chain(&plan.data.eval_sources)
}

/// Checks that names which can only be local paths exist. Skips names that may be Hub ids.
fn stat_local_files(plan: &Plan) -> Result<()> {
    let names = sources(plan).filter(|source| source.data_files.is_empty()).map(|source| source.name_or_path.as_str());
    for name in names.chain([plan.tokenizer.name_or_path.as_str()]) {
        let path = if Path::new(name).exists() { name } else { name.split(':').next().unwrap_or(name) };
        let is_local = is_path(path) || FileFormat::from_path(path).is_some();
        if is_local && !path.contains(['*', '?', '[', '{']) && !Path::new(path).exists() {
            let problem = format!("failed to find {path}: {}", missing_path_advice(path));
            return Err(anyhow!(problem).context(ExitCode::Data));
        }
    }
    Ok(())
}
