//! What a plan must know of the outside: the model's config, the machine's cores, what lies beside the recipe.

use std::path::{Path, PathBuf};

use candlewick_comm::{Engine, Host};
use candlewick_model::{Config, ModelError};
use candlewick_text::files::{MAX_CONFIG_FILE_BYTES, read_regular_file, without_bom};
use candlewick_text::hub::{Hub, HubError, HubSettings, LocalModel, LocalModelKind, ModelFiles, local_model};
use evaluator::task::{OutputType, TaskConfig, TaskRegistry};

use super::TempDir;
use crate::estimate::Capacity;
use crate::metrics::Console;
use crate::recipe::{ConfigSource, Fault, Loaded, MemoryModes, ModelType, RecipeError};

/// What is known of the outside while a plan is made.
#[derive(Clone, Debug)]
pub struct Known {
    /// The model's config, without the recipe's overrides. `None` if it is on the Hub only.
    pub config: Option<Config>,
    /// Threads that may run at once.
    pub n_cores: usize,
    /// Which of the processes that train together this one is.
    pub seat: WorldInfo,
    /// What can connect them.
    pub engines: BuildFeatures,
    /// Where temporary files go.
    pub temp_dir: TempDir,
    /// Whether ArcticTraining would find Python code beside the recipe.
    pub has_train_py: bool,
    /// Whether a task of the recipe lets the model write.
    pub tasks_generate: bool,
    /// How much goes to the terminal.
    pub console: Console,
    /// What is free where the run would compute, if the recipe wants that to decide something.
    pub capacity: Option<Capacity>,
}

/// One of the processes that train together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorldInfo {
    /// Its number.
    pub rank: usize,
    /// How many there are.
    pub n_ranks: usize,
    /// How many of them this machine has.
    pub n_here: usize,
    /// Where they run.
    pub machines: Machines,
}

impl WorldInfo {
    /// A process by itself.
    pub const ALONE: Self = Self { rank: 0, n_ranks: 1, n_here: 1, machines: Machines::One };

    /// The first of `n_ranks` processes that are not started yet, on machines that are not known.
    pub fn first_of(n_ranks: usize) -> Self {
        Self { n_ranks, n_here: n_ranks, machines: Machines::Unknown, ..Self::ALONE }
    }
}

/// Where the processes run that train together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machines {
    /// On one machine.
    One,
    /// On several, which MPI or Slurm knows.
    Several,
    /// On several nodes of a launcher: these may be one machine.
    Nodes,
    /// Nowhere yet: they are asked about. What this machine and this build have says nothing about them.
    Unknown,
}

/// What this build has to connect ranks with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BuildFeatures {
    /// MPI.
    pub mpi: bool,
    /// NCCL, and what computes on GPUs.
    pub nccl: bool,
}

impl BuildFeatures {
    /// Those of a build that has everything.
    pub const ALL: Self = Self { mpi: true, nccl: true };
    /// Those of this build.
    pub const BUILT: Self = Self { mpi: Host::HAS_MPI, nccl: Engine::HAS_NCCL };
}

/// The access that [`Known::gather`] has to the Hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HubAccess {
    /// Files and the Hub's cache; what the cache lacks stays unknown.
    ThisMachine,
    /// Files and the Hub's cache, which must hold the whole model: a run without a network has to be possible.
    Offline,
    /// The Hub, for the model's config and tokenizer.
    Network,
}

/// Why the outside could not be asked. Completes "failed to ...".
#[derive(Debug, thiserror::Error)]
pub enum KnownError {
    /// The recipe names a file that is not there or not right.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// The Hub refused, or the cache has not got it.
    #[error(transparent)]
    Hub(#[from] HubError),
    /// The Hub's config is not one.
    #[error(transparent)]
    Model(#[from] ModelError),
}

impl Known {
    /// Looks at the machine and, as `access` allows, at the Hub.
    pub fn gather(loaded: &Loaded, access: HubAccess, console: Console, seat: WorldInfo) -> Result<Self, KnownError> {
        let settings = HubSettings::from_env();
        let wants_capacity = loaded.recipe.memory == Some(MemoryModes::Auto) && seat.machines != Machines::Unknown;
        Ok(Self {
            config: find_config(loaded, access, settings)?,
            n_cores: std::thread::available_parallelism().map_or(1, usize::from),
            seat,
            engines: BuildFeatures::BUILT,
            temp_dir: TempDir::look(std::env::temp_dir()),
            has_train_py: loaded.source().path.with_file_name("train.py").is_file(),
            tasks_generate: tasks_generate(loaded),
            console,
            capacity: wants_capacity.then(|| capacity(loaded).of_one(seat.n_here)),
        })
    }
}

/// Reads the files of tasks, no data. What is wrong with them is said where the tasks are opened.
fn tasks_generate(loaded: &Loaded) -> bool {
    let eval = &loaded.recipe.eval;
    let include_path: Vec<PathBuf> = eval.include_path.iter().map(PathBuf::from).collect();
    let select = || TaskRegistry::load(&include_path)?.select(&eval.tasks.join(","));
    let writes = |task: &TaskConfig| task.output_type == OutputType::GenerateUntil;
    !eval.tasks.is_empty() && select().is_ok_and(|selection| selection.tasks.iter().any(writes))
}

/// A device whose name makes no sense is blamed by the plan.
fn capacity(loaded: &Loaded) -> Capacity {
    let device = loaded.recipe.device.as_deref().and_then(|device| device.parse().ok());
    Capacity::now(device.unwrap_or_default())
}

fn find_config(loaded: &Loaded, access: HubAccess, settings: HubSettings) -> Result<Option<Config>, KnownError> {
    let model = &loaded.recipe.model;
    let blame = |key: &str, error: ModelError| {
        let fault = loaded.fault(&[key], format!("{key}: cannot be used: {error}"));
        KnownError::from(loaded.error(vec![fault]))
    };
    match (&model.config, &model.name_or_path) {
        (Some(ConfigSource::Inline(map)), _) => {
            Config::from_handwritten(map).map(Some).map_err(|e| blame("model.config", e))
        }
        (Some(ConfigSource::Path(path)), _) => read_file(path).map(Some).map_err(|e| blame("model.config", e)),
        (None, Some(name)) if Path::new(name).is_dir() => {
            let folder = model_folder(loaded, name)?;
            Config::read(&folder).map(Some).map_err(|e| blame("model.name_or_path", e))
        }
        (None, Some(name)) if is_path(name) => {
            let message = format!("model.name_or_path: there is no folder {name}");
            let here = std::env::current_dir().unwrap_or_default();
            let advice =
                format!("paths start at the current folder, {}; a Hub id has the form owner/name", here.display());
            Err(loaded.error(vec![loaded.fault(&["model.name_or_path"], message).note(advice)]).into())
        }
        (None, Some(name)) => {
            let draws = model.kind == Some(ModelType::RandomWeightHf);
            let part =
                if access == HubAccess::Offline && !draws { ModelFiles::All } else { ModelFiles::WithoutWeights };
            from_hub(name, model.revision.as_deref(), part, access, settings)
        }
        (None, None) => Ok(None),
    }
}

/// Returns the model folder that `model.name_or_path` means. An adapter has a key of its own.
fn model_folder(loaded: &Loaded, name: &str) -> Result<PathBuf, KnownError> {
    let key = "model.name_or_path";
    let refuse = |fault: Fault| Err(loaded.error(vec![fault]).into());
    match local_model(name) {
        Err(error) => refuse(loaded.fault(&[key], format!("{key}: failed to {error}"))),
        Ok(Some(LocalModel { folder, contents: LocalModelKind::Adapter { base }, .. })) => {
            let message = format!("{key}: {} is an adapter, not a model", folder.display());
            let base = base.unwrap_or_else(|| "the adapter's base model".to_owned());
            let advice = format!(
                "to go on training it, set model.name_or_path: {base} and model.adapter_name_or_path: {}; `trainer merge` \
                 makes a model of both",
                folder.display()
            );
            refuse(loaded.fault(&[key], message).note(advice))
        }
        Ok(found) => Ok(found.map_or_else(|| PathBuf::from(name), |found| found.folder)),
    }
}

/// Tells a path from a Hub id, whose only slash stands between owner and name.
pub(crate) fn is_path(name: &str) -> bool {
    name.starts_with(['.', '/', '~']) || name.ends_with('/') || name.matches('/').count() > 1 || name.contains('\\')
}

/// `path` is a config.json, or a folder that holds one.
fn read_file(path: &str) -> Result<Config, ModelError> {
    let path = PathBuf::from(path);
    if path.is_dir() {
        return Config::read(&path);
    }
    let read = |source| ModelError::Io { doing: "read", path: path.clone(), source };
    let bytes = read_regular_file(&path, MAX_CONFIG_FILE_BYTES).map_err(read)?;
    let value = serde_json::from_slice(without_bom(&bytes))
        .map_err(|error| ModelError::Malformed { path: path.clone(), problem: format!("not JSON: {error}") })?;
    Config::from_json(value).map_err(|source| ModelError::InFile { path: path.clone(), source: Box::new(source) })
}

/// Reads the config from the Hub. `None` if the cache lacks it and the caller forbids the network.
fn from_hub(
    name: &str,
    revision: Option<&str>,
    part: ModelFiles,
    access: HubAccess,
    mut settings: HubSettings,
) -> Result<Option<Config>, KnownError> {
    settings.offline |= access != HubAccess::Network;
    match Hub::new(settings)?.model(name, revision, part) {
        Ok(folder) => Ok(Some(Config::read(&folder)?)),
        Err(error @ (HubError::InvalidId { .. } | HubError::PathNotFound { .. } | HubError::NotAModel { .. })) => {
            Err(error.into())
        }
        Err(_) if access == HubAccess::ThisMachine => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hub_id_is_not_taken_for_a_path() {
        for id in ["gpt2", "org/model", "Qwen/Qwen2.5-0.5B"] {
            assert!(!is_path(id), "{id}");
        }
        for path in ["./model", "/data/model", "~/model", "out/run/global_step_3", "model/", "..\\model"] {
            assert!(is_path(path), "{path}");
        }
    }
}
