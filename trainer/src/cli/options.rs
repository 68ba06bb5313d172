//! The options that commands share, and the plan that they lead to.

use std::path::PathBuf;

use anyhow::Result;
use candlewick_comm::rank_env::{Launcher, RankEnv};
use candlewick_runtime::rank_env::rank_env;
use candlewick_text::hub::{Hub, HubSettings};
use clap::{Args, ValueEnum};

use super::Ui;
use crate::metrics::Console;
use crate::plan::{HubAccess, Known, KnownError, Machines, Plan, WorldInfo};
use crate::recipe::Loaded;

#[derive(Debug, Args)]
pub(super) struct Recipe {
    /// The recipe, a YAML file
    #[arg(value_name = "RECIPE")]
    pub(super) path: PathBuf,
    /// Keys that replace the recipe's: `optimizer.lr=1e-4`, `data.sources.0.split=train`; values are YAML
    #[arg(value_name = "KEY=VALUE", value_parser = key_value)]
    pub(super) overrides: Vec<String>,
}

/// Options for processes that are not started yet.
#[derive(Debug, Args)]
pub(super) struct Supposed {
    /// Processes that will train together, wherever that is [default: those that this one was started with]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(super) ranks: Option<usize>,
}

impl Supposed {
    pub(super) fn seat(&self) -> Result<WorldInfo> {
        self.ranks.map_or_else(|| Ok(seat(&rank_env()?)), |n_ranks| Ok(WorldInfo::first_of(n_ranks)))
    }
}

/// The format of printed output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    /// For people.
    Text,
    /// For programs: the plan as run.json holds it, or a line a step.
    Json,
}

#[derive(Clone, Copy, Debug, Args)]
pub(super) struct Verbosity {
    /// Say less: errors only, no bar, no line a step
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub(super) quiet: bool,
    /// Say more: every field of a step, all settings, the keys of the schema; twice: for debugging. RUST_LOG goes before it
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(super) verbose: u8,
}

impl Verbosity {
    pub(super) fn console(self) -> Console {
        match (self.quiet, self.verbose) {
            (true, _) => Console::Quiet,
            (false, 0) => Console::Full,
            (false, _) => Console::Lines,
        }
    }
}

/// Opens the Hub with the environment's settings and a progress bar for each download.
pub(super) fn hub(ui: &Ui) -> Result<Hub> {
    Ok(Hub::new(HubSettings::from_env())?.with_progress(ui.downloads()))
}

/// Resolves a recipe. Errors of the recipe itself are reported before the Hub is asked for the model's config.
pub(super) fn plan(recipe: &Recipe, verbosity: Verbosity, seat: WorldInfo) -> Result<Plan> {
    let loaded = Loaded::read(&recipe.path, &recipe.overrides)?;
    let here = known(&loaded, HubAccess::ThisMachine, verbosity, seat)?;
    let plan = Plan::resolve(&loaded, &here)?;
    if here.config.is_some() {
        return Ok(plan);
    }
    let known = known(&loaded, HubAccess::Network, verbosity, seat)?;
    Ok(Plan::resolve(&loaded, &known)?)
}

/// Gathers the facts about the machine and the Hub that a plan needs. An error names the purpose.
pub(super) fn known(loaded: &Loaded, access: HubAccess, verbosity: Verbosity, seat: WorldInfo) -> Result<Known> {
    Known::gather(loaded, access, verbosity.console(), seat).map_err(|error| match error {
        KnownError::Recipe(error) => error.into(),
        error => anyhow::Error::new(error).context("failed to find the model's config"),
    })
}

/// Returns the rank, the world size and the machines of the process that a launcher started at `place`.
pub(super) fn seat(env: &RankEnv) -> WorldInfo {
    let machines = match env.launcher {
        _ if env.is_single_node() => Machines::One,
        Launcher::Torchrun => Machines::Nodes,
        _ => Machines::Several,
    };
    WorldInfo { rank: env.rank, n_ranks: env.world_size, n_here: env.local_world_size, machines }
}

/// Reads a number of processes.
pub(super) fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| "expected a number of processes, at least 1".into())
}

fn key_value(text: &str) -> Result<String, String> {
    if text.contains('=') { Ok(text.to_owned()) } else { Err("expected KEY=VALUE, such as optimizer.lr=1e-4".into()) }
}
