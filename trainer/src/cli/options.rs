//! Options shared by the commands, and the resolution of a recipe into a plan.

use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use candlewick_comm::rank_env::{Launcher, RankEnv};
use candlewick_command_line::ArgValueCompleter;
use candlewick_runtime::progress::{ProgressDisplay, show_downloads};
use candlewick_runtime::rank_env::rank_env;
use candlewick_text::files::is_present;
use candlewick_text::hub::{Hub, HubError, HubSettings, LockContext};
use clap::{Args, ValueEnum};

use super::completion::{overrides, recipes_and_files};
use crate::estimate::parse_bytes;
use crate::exit::ExitCode;
use crate::metrics::Console;
use crate::plan::Plan;
use crate::recipe::{Loaded, shipped};
use crate::resolve::{Environment, EnvironmentError, HubAccess, HubView, Machines, WorldInfo};

#[derive(Debug, Args)]
pub(super) struct RecipeArgs {
    /// Path to the recipe, a YAML file; or the name of a shipped recipe
    #[arg(value_name = "RECIPE", add = ArgValueCompleter::new(recipes_and_files))]
    pub(super) path: PathBuf,
    /// Overrides of recipe keys: `optimizer.lr=1e-4`, `data.sources.0.split=train`. Values are YAML
    #[arg(value_name = "KEY=VALUE", value_parser = key_value, add = ArgValueCompleter::new(overrides))]
    pub(super) overrides: Vec<String>,
}

/// The world size to plan for, without starting the processes.
#[derive(Debug, Args)]
pub(super) struct WorldSizeArgs {
    /// Number of ranks [default: the current world size]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(super) ranks: Option<usize>,
}

impl WorldSizeArgs {
    pub(super) fn world_info(&self) -> Result<WorldInfo> {
        self.ranks.map_or_else(|| Ok(world_info(&rank_env()?)), |n_ranks| Ok(WorldInfo::first_of(n_ranks)))
    }
}

/// The format of printed output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum OutputFormat {
    /// Human-readable text
    Text,
    /// JSON: the plan as in run.json, or one line per step
    Json,
}

#[derive(Clone, Copy, Debug, Args)]
pub(super) struct Verbosity {
    /// Print less: errors only, no progress bar, no training steps
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub(super) quiet: bool,
    /// Print more: all fields of each step, default settings, schema keys. -vv enables debug logs. RUST_LOG takes
    /// precedence
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

    pub(super) fn progress_display(self) -> ProgressDisplay {
        match self.console() {
            Console::Full => ProgressDisplay::Bars,
            Console::Lines => ProgressDisplay::Lines,
            Console::Quiet => ProgressDisplay::Hidden,
        }
    }
}

/// Opens the Hub with the environment's settings, and a progress bar for each download.
pub(super) fn hub() -> Result<Hub> {
    Ok(Hub::new(HubSettings::from_env())?.with_progress(show_downloads()))
}

/// Opens the Hub for a recipe. If the recipe has a lock file, only its commits are in use, from the cache.
pub(super) fn recipe_hub(recipe: &Path) -> Result<Hub> {
    Ok(locked_hub(recipe, HubSettings::from_env())?.with_progress(show_downloads()))
}

/// Opens the Hub for a recipe like [`recipe_hub`], with these settings and no progress bar.
pub(super) fn locked_hub(recipe: &Path, settings: HubSettings) -> Result<Hub> {
    let context = lock_context(recipe);
    match is_present(&context.path) {
        true => context.locked_hub(settings).map_err(|error| anyhow!("failed to {error}").context(ExitCode::Usage)),
        false => Ok(Hub::new(settings)?),
    }
}

/// Returns the path of a recipe's lock file, and the command that writes it. The lock file of a shipped recipe is in the
/// current folder.
pub(super) fn lock_context(recipe: &Path) -> LockContext {
    let (file, name) = match shipped::at(recipe) {
        Some(shipped) => (recipe.file_name().unwrap_or_default().to_owned(), shipped.name.to_owned()),
        None => (recipe.as_os_str().to_owned(), recipe.display().to_string()),
    };
    let mut path = file;
    path.push(".lock");
    LockContext { path: path.into(), prefetch: format!("trainer prefetch {name}") }
}

/// Resolves the recipe of a command that does not train.
pub(super) fn plan(recipe: &RecipeArgs, verbosity: Verbosity, world_info: WorldInfo) -> Result<Plan> {
    resolve(recipe, |loaded, access| known(loaded, access, verbosity, world_info))
}

/// Resolves the recipe of a run on this machine.
pub(super) fn plan_of_run(recipe: &RecipeArgs, verbosity: Verbosity, world_info: WorldInfo) -> Result<Plan> {
    resolve(recipe, |loaded, access| Ok(known(loaded, access, verbosity, world_info)?.of_run_here(loaded)))
}

/// Resolves a recipe. Reports errors of the recipe itself before it requests the model's config from the Hub.
fn resolve(recipe: &RecipeArgs, known: impl Fn(&Loaded, HubAccess) -> Result<Environment>) -> Result<Plan> {
    let loaded = Loaded::read(&recipe.path, &recipe.overrides)?;
    let here = known(&loaded, HubAccess::ThisMachine)?;
    let plan = Plan::resolve(&loaded, &here)?;
    if here.config.is_some() {
        return Ok(plan);
    }
    Ok(Plan::resolve(&loaded, &known(&loaded, HubAccess::Network)?)?)
}

/// Gathers the facts about the machine and the Hub that a plan depends on. Errors name the purpose.
pub(super) fn known(
    loaded: &Loaded,
    access: HubAccess,
    verbosity: Verbosity,
    world_info: WorldInfo,
) -> Result<Environment> {
    let hub = locked_hub(&loaded.source().path, HubSettings::from_env())?;
    gathered(loaded, HubView { hub: &hub, access }, verbosity, world_info)
}

/// Gathers the facts like [`known`], with this Hub.
pub(super) fn gathered(
    loaded: &Loaded,
    view: HubView,
    verbosity: Verbosity,
    world_info: WorldInfo,
) -> Result<Environment> {
    Environment::gather(loaded, view, verbosity.console(), world_info).map_err(|error| match error {
        EnvironmentError::Recipe(error) => error.into(),
        error => anyhow::Error::new(error).context("failed to find the model's config"),
    })
}

/// Returns the rank, the world size and the machines of a process that a launcher started at `env`.
pub(super) fn world_info(env: &RankEnv) -> WorldInfo {
    let machines = match env.launcher {
        _ if env.is_single_node() => Machines::One,
        Launcher::Torchrun => Machines::Nodes,
        _ => Machines::Several,
    };
    WorldInfo { rank: env.rank, n_ranks: env.world_size, n_here: env.local_world_size, machines }
}

/// Returns the error of a model or adapter that was not found.
pub(super) fn not_found(error: HubError) -> anyhow::Error {
    anyhow!("failed to {error}").context(ExitCode::Data)
}

/// Parses the size of a weights file.
pub(super) fn shard_bytes(text: &str) -> Result<u64, String> {
    parse_bytes(text).ok_or_else(|| "expected bytes, such as 5GB or 500MiB".to_owned())
}

/// Parses a number of processes.
pub(super) fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| "expected a number of processes, at least 1".into())
}

/// Parses an override of a recipe key.
pub(super) fn key_value(text: &str) -> Result<String, String> {
    if text.contains('=') { Ok(text.to_owned()) } else { Err("expected KEY=VALUE, such as optimizer.lr=1e-4".into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lock_file_is_next_to_the_recipe() {
        let shipped = shipped::find("quickstart").map(shipped::ShippedRecipe::path).unwrap_or_default();
        for (recipe, path, name) in [
            (Path::new("a/r.yaml"), "a/r.yaml.lock", "a/r.yaml"),
            // Shipped recipes are no files, so their lock file is in the current folder.
            (&shipped, "quickstart.yaml.lock", "quickstart"),
        ] {
            let want = LockContext { path: path.into(), prefetch: format!("trainer prefetch {name}") };
            assert_eq!(lock_context(recipe), want);
        }
    }
}
