//! The resolved settings of a recipe or of a run's folder, with the origin of each.

use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use candlewick_runtime::rank_env::rank_env;
use candlewick_text::files::{MAX_CONFIG_FILE_BYTES, read_file_or_pipe};
use serde::Deserialize;
use serde_json::Value;

use crate::cli::options::{Verbosity, known, world_info};
use crate::exit::ExitCode;
use crate::plan::{Plan, ResolvedSetting};
use crate::recipe::Loaded;
use crate::resolve::HubAccess;

/// The resolved settings of a recipe or run.
#[derive(Debug)]
pub(in crate::cli) struct ResolvedSettings {
    /// The path that the user gave.
    pub(in crate::cli) path: PathBuf,
    /// The settings, in the order of the plan.
    pub(in crate::cli) settings: Vec<WordedSetting>,
    /// The keys that a setting summarizes, as the recipe has them; `None` in run.json of an older version.
    pub(in crate::cli) written: Option<Vec<WordedSetting>>,
}

/// A setting: key, value and origin in words, such as `recipe.yaml:12` or `default`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(in crate::cli) struct WordedSetting {
    pub(in crate::cli) key: String,
    pub(in crate::cli) value: Value,
    pub(in crate::cli) origin: String,
}

/// The part of run.json that has the settings.
#[derive(Deserialize)]
struct SavedReport {
    plan: SavedPlan,
}

/// The part of a plan that run.json must have.
#[derive(Deserialize)]
struct SavedPlan {
    recipe: PathBuf,
    settings: Vec<WordedSetting>,
    written: Option<Vec<WordedSetting>>,
}

impl ResolvedSettings {
    /// Resolves a recipe as `trainer check` does, without device or network.
    pub(in crate::cli) fn of_recipe(path: &Path, overrides: &[String], verbosity: Verbosity) -> Result<Self> {
        let loaded = Loaded::read(path, overrides)?;
        let world = world_info(&rank_env()?);
        let known = known(&loaded, HubAccess::ThisMachine, verbosity, world)?.of_run_here(&loaded);
        Ok(Self::of_plan(&Plan::resolve(&loaded, &known)?))
    }

    fn of_plan(plan: &Plan) -> Self {
        let list = |list: &[ResolvedSetting]| {
            let words = |origin: String| in_words(origin, &plan.recipe);
            let setting = |s: &ResolvedSetting| WordedSetting {
                key: s.key.clone(),
                value: s.value.clone(),
                origin: words(s.origin.to_string()),
            };
            list.iter().map(setting).collect()
        };
        Self { path: plan.recipe.clone(), settings: list(&plan.settings), written: Some(list(&plan.written)) }
    }

    /// Reads run.json of a run's folder, or a file of that format.
    pub(in crate::cli) fn of_run(path: &Path) -> Result<Self> {
        let file = if path.is_dir() { path.join("run.json") } else { path.to_owned() };
        let unusable = |reason: String| {
            let advice = "expected a recipe, or the output_dir of a run";
            anyhow!("failed to read the settings in {}: {reason}; {advice}", file.display()).context(ExitCode::Usage)
        };
        let bytes = read_file_or_pipe(&file, MAX_CONFIG_FILE_BYTES).map_err(|error| unusable(error.to_string()))?;
        let SavedReport { plan } = serde_json::from_slice(&bytes).map_err(|error| unusable(error.to_string()))?;
        let place = |mut list: Vec<WordedSetting>| {
            list.iter_mut().for_each(|s| s.origin = in_words(std::mem::take(&mut s.origin), &plan.recipe));
            list
        };
        Ok(Self { path: path.to_owned(), settings: place(plan.settings), written: plan.written.map(place) })
    }

    /// Returns the settings and the keys that they summarize.
    pub(in crate::cli) fn all(&self) -> impl Iterator<Item = &WordedSetting> {
        self.settings.iter().chain(self.written.iter().flatten())
    }
}

/// Adds the file to the origin `line 12`, and names the command line.
fn in_words(origin: String, recipe: &Path) -> String {
    match origin.strip_prefix("line ") {
        Some(line) => format!("{}:{line}", recipe.display()),
        None if origin == "argument" => "command line".to_owned(),
        None => origin,
    }
}
