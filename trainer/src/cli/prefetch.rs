//! `trainer prefetch`: downloads what a recipe reads from the Hub, and writes the lock file.

use std::path::PathBuf;

use anyhow::Result;
use candlewick_inference::command::{Prefetch, PrefetchOptions};
use candlewick_runtime::progress::show_downloads;
use candlewick_text::hub::{Hub, HubSettings, LockContext};
use clap::Args;

use super::options::{RecipeArgs, Verbosity, WorldSizeArgs, gathered, lock_context};
use super::{Ui, logging};
use crate::exit::ExitCode;
use crate::plan::{LoggerPlan, Plan};
use crate::recipe::{ConfigSource, Loaded};
use crate::resolve::{HubAccess, HubView, WorldInfo};
use crate::run::open_inputs;

#[derive(Debug, Args)]
pub(super) struct PrefetchArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    #[command(flatten)]
    world: WorldSizeArgs,
    #[command(flatten)]
    options: PrefetchOptions,
}

/// Examples for the long help.
pub(super) const EXAMPLES: &str = "\
Examples:
  trainer prefetch recipe.yaml
  trainer prefetch recipe.yaml --check
  trainer prefetch recipe.yaml --update
  trainer prefetch recipe.yaml --output carry
The lock file is RECIPE.lock. While it exists, commands on the recipe use its commits and send no request to the Hub.";

pub(super) fn run(args: &PrefetchArgs, verbosity: Verbosity, ui: &Ui) -> Result<ExitCode> {
    logging::start(verbosity, &LoggerPlan::default(), Vec::new())?;
    let loaded = Loaded::read(&args.recipe.path, &args.recipe.overrides)?;
    let world = args.world.world_info()?;
    let LockContext { path, prefetch } = lock_context(&loaded.source().path);
    let (options, on_progress) = (&args.options, Some(show_downloads()));
    let command = Prefetch { lock: &path, command: prefetch, options, on_progress };
    let report = command.run(HubSettings::from_env(), |hub| open(&loaded, hub, verbosity, world))?;
    ui.print(&report)
}

/// Opens everything that a run of the recipe reads, and returns the local paths.
fn open(loaded: &Loaded, hub: &Hub, verbosity: Verbosity, world: WorldInfo) -> Result<Vec<PathBuf>> {
    let plan = |access| {
        let known = gathered(loaded, HubView { hub, access }, verbosity, world)?;
        Ok::<_, anyhow::Error>(Plan::resolve(loaded, &known)?)
    };
    // Errors of the recipe itself come before requests to the Hub.
    plan(HubAccess::ThisMachine)?;
    let mut local = open_inputs(&plan(HubAccess::Network)?, hub)?;
    let source = loaded.source();
    let recipes = std::iter::once(&source.path).chain(source.bases.iter().map(|base| &base.path));
    local.extend(recipes.filter(|path| path.is_file()).cloned());
    if let Some(ConfigSource::Path(path)) = &loaded.recipe.model.config {
        local.push(path.into());
    }
    Ok(local)
}
