//! Facts from outside of the recipe that a plan needs: the model's config, the CPU cores, the files next to the
//! recipe.

use std::path::{Path, PathBuf};

use candlewick_comm::{CommBackend, HostBackend};
use candlewick_model::{Config, ModelError};
use candlewick_ops::{MAX_CUDA_TOP_K, gpu_unavailable_reason};
use candlewick_text::files::{MAX_CONFIG_FILE_BYTES, read_regular_file, without_bom};
use candlewick_text::hub::{Hub, HubError, HubLock, LocalModel, LocalModelKind, LockContext, ModelFiles, local_model};
use evaluator::task::{OutputType, TaskConfig, TaskRegistry};
use serde_json::{Map, Value};

use super::{TempDir, TrackingEnv};
use crate::estimate::Capacity;
use crate::metrics::Console;
use crate::recipe::{
    ConfigSource, ExpertsImplementation, Fault, Loaded, MemoryMode, MicroBatchSize, ModelType, Recipe, RecipeError,
};

/// The facts from outside of the recipe.
#[derive(Clone, Debug)]
pub struct Environment {
    /// The model's config, without the recipe's overrides. `None` if it is on the Hub only.
    pub config: Option<Config>,
    /// The number of threads that can run in parallel.
    pub n_cores: usize,
    /// The rank and world size of this process.
    pub world: WorldInfo,
    /// The communication backends of the build.
    pub features: BuildFeatures,
    /// The folder for temporary files.
    pub temp_dir: TempDir,
    /// True if there is Python code that ArcticTraining would load with the recipe.
    pub has_train_py: bool,
    /// True if a task of the recipe generates text.
    pub tasks_generate: bool,
    /// The verbosity of the terminal output.
    pub console: Console,
    /// The free memory of the run's device, if the recipe's `memory: auto` or `micro_batch_size: auto` needs it.
    pub capacity: Option<Capacity>,
    /// The reason why this machine has no usable GPU, if a run here needs one.
    pub missing_gpu: Option<String>,
    /// The environment variables and credentials of the trackers.
    pub tracking: TrackingEnv,
    /// The lock file next to the recipe, if there is one.
    pub lock: Option<RecipeLock>,
}

/// The lock file of a recipe.
#[derive(Clone, Debug)]
pub struct RecipeLock {
    /// The commits and files.
    pub lock: HubLock,
    /// The path and the command that writes it.
    pub context: LockContext,
}

/// The position of a process among those that train together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorldInfo {
    /// The rank.
    pub rank: usize,
    /// The world size.
    pub n_ranks: usize,
    /// The number of processes on this machine.
    pub n_here: usize,
    /// The machines of the processes.
    pub machines: Machines,
}

impl WorldInfo {
    /// A single process.
    pub const ALONE: Self = Self { rank: 0, n_ranks: 1, n_here: 1, machines: Machines::One };

    /// Returns rank 0 of `n_ranks` processes that are not started yet, on unknown machines.
    pub fn first_of(n_ranks: usize) -> Self {
        Self { n_ranks, n_here: n_ranks, machines: Machines::Unknown, ..Self::ALONE }
    }
}

/// The machines of the processes that train together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machines {
    /// On one machine.
    One,
    /// On several machines, known to MPI or Slurm.
    Several,
    /// On several nodes of a launcher: these may be one machine.
    Nodes,
    /// Unknown: the processes are not started yet, so facts about this machine and build do not apply.
    Unknown,
}

/// The communication backends of a build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BuildFeatures {
    /// MPI.
    pub mpi: bool,
    /// NCCL and CUDA kernels.
    pub nccl: bool,
}

impl BuildFeatures {
    /// A build with every backend.
    pub const ALL: Self = Self { mpi: true, nccl: true };
    /// This build.
    pub const BUILT: Self = Self { mpi: HostBackend::HAS_MPI, nccl: CommBackend::HAS_NCCL };
}

/// The access that [`Environment::gather`] has to the Hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HubAccess {
    /// Files and the Hub's cache; a config that is not cached stays unknown.
    ThisMachine,
    /// Files and the Hub's cache, which must hold the whole model for a run without a network.
    Offline,
    /// The Hub, for the model's config and tokenizer.
    Network,
}

/// The Hub of [`Environment::gather`], and its use.
#[derive(Clone, Copy)]
pub struct HubView<'a> {
    /// The Hub, with the recipe's lock file if there is one.
    pub hub: &'a Hub,
    /// The access.
    pub access: HubAccess,
}

/// The reason why a fact could not be gathered. Completes "failed to ...".
#[derive(Debug, thiserror::Error)]
pub enum EnvironmentError {
    /// The recipe names a file that is missing or invalid.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// The Hub refused, or the cache lacks the file.
    #[error(transparent)]
    Hub(#[from] HubError),
    /// The Hub's config is invalid.
    #[error(transparent)]
    Model(#[from] ModelError),
}

impl Environment {
    /// Inspects the machine and, as the view allows, the Hub. Writes the shipped data of the recipe into the cache folder.
    pub fn gather(
        loaded: &Loaded,
        view: HubView,
        console: Console,
        world: WorldInfo,
    ) -> Result<Self, EnvironmentError> {
        loaded.write_cached_files()?;
        let config = find_config(loaded, view)?;
        let lock = view.hub.lock().map(|(lock, context)| RecipeLock { lock: lock.clone(), context: context.clone() });
        Ok(Self { lock, ..Self::with_config(config, loaded, console, world) })
    }

    /// Inspects the machine, but neither the model nor a lock file.
    pub fn with_config(config: Option<Config>, loaded: &Loaded, console: Console, world: WorldInfo) -> Self {
        let Recipe { memory, micro_batch_size, .. } = &loaded.recipe;
        let selects = *memory == Some(MemoryMode::Auto) || *micro_batch_size == Some(MicroBatchSize::Auto);
        let wants_capacity = selects && world.machines != Machines::Unknown;
        Self {
            config,
            n_cores: std::thread::available_parallelism().map_or(1, usize::from),
            world,
            features: BuildFeatures::BUILT,
            temp_dir: TempDir::detect(std::env::temp_dir()),
            has_train_py: loaded.source().path.with_file_name("train.py").is_file(),
            tasks_generate: tasks_generate(loaded),
            console,
            capacity: wants_capacity.then(|| capacity(loaded).of_one(world.n_here)),
            missing_gpu: None,
            tracking: TrackingEnv::from_env(),
            lock: None,
        }
    }

    /// Adds the facts that matter only to a run on this machine, not to an estimate or to a preparation of data. Looks for a
    /// GPU if the recipe needs one. Processes that are not started yet may run on another machine.
    pub fn of_run_here(self, loaded: &Loaded) -> Self {
        let by_name = [ExpertsImplementation::Cublas, ExpertsImplementation::Cutlass];
        let is_named = loaded.recipe.model.experts_implementation.is_some_and(|named| by_name.contains(&named));
        let has_experts = self.config.as_ref().is_some_and(|config| config.moe().is_some());
        // On a GPU the default of precision.quantize_experts is another.
        let may_quantize = has_experts && loaded.recipe.precision.recipe.is_some();
        let exceeds = exceeds_gpu(self.config.as_ref(), &loaded.recipe.model.hf_config_kwargs);
        let is_needed = is_named || may_quantize || exceeds;
        let is_here = self.world.machines != Machines::Unknown;
        Self { missing_gpu: (is_needed && is_here).then(gpu_unavailable_reason).flatten(), ..self }
    }
}

/// Returns true if a GPU may not route this model, before or after overrides of its config.
fn exceeds_gpu(config: Option<&Config>, overrides: &Map<String, Value>) -> bool {
    let of_config = config.and_then(Config::moe).map(|moe| moe.router.top_k);
    let of_overrides = overrides.get("num_experts_per_tok").and_then(Value::as_u64).map(|top_k| top_k as usize);
    of_config.into_iter().chain(of_overrides).any(|top_k| top_k > MAX_CUDA_TOP_K)
}

/// Reads the task files, but no data. Their errors are reported when the tasks are opened.
fn tasks_generate(loaded: &Loaded) -> bool {
    let eval = &loaded.recipe.eval;
    let include_path: Vec<PathBuf> = eval.include_path.iter().map(PathBuf::from).collect();
    let select = || TaskRegistry::load(&include_path)?.select(&eval.tasks.join(","));
    let writes = |task: &TaskConfig| task.output_type == OutputType::GenerateUntil;
    !eval.tasks.is_empty() && select().is_ok_and(|selection| selection.tasks.iter().any(writes))
}

/// Returns the free memory of the recipe's device. The plan reports an invalid device name.
fn capacity(loaded: &Loaded) -> Capacity {
    let device = loaded.recipe.device.as_deref().and_then(|device| device.parse().ok());
    Capacity::now(device.unwrap_or_default())
}

fn find_config(loaded: &Loaded, view: HubView) -> Result<Option<Config>, EnvironmentError> {
    let model = &loaded.recipe.model;
    let fault = |key: &str, error: ModelError| {
        let of_config = error.config_key().map_or(key.to_owned(), |name| format!("{key}.{name}"));
        let found = loaded.fault_at(&[&of_config, key], format!("{key}: cannot be used: {error}"));
        EnvironmentError::from(loaded.error(vec![found]))
    };
    match (&model.config, &model.name_or_path) {
        (Some(ConfigSource::Inline(map)), _) => {
            Config::from_handwritten(map).map(Some).map_err(|e| fault("model.config", e))
        }
        (Some(ConfigSource::Path(path)), _) => read_file(path).map(Some).map_err(|e| fault("model.config", e)),
        (None, Some(name)) if Path::new(name).is_dir() => {
            let folder = model_folder(loaded, name)?;
            Config::read(&folder).map(Some).map_err(|e| fault("model.name_or_path", e))
        }
        (None, Some(name)) if is_path(name) => {
            let message = format!("model.name_or_path: there is no folder {name}");
            let here = std::env::current_dir().unwrap_or_default();
            let advice =
                format!("paths start at the current folder, {}; a Hub id has the form owner/name", here.display());
            Err(loaded.error(vec![loaded.fault_at(&["model.name_or_path"], message).note(advice)]).into())
        }
        (None, Some(name)) => {
            let is_random = model.kind == Some(ModelType::RandomWeightHf);
            let part = if view.access == HubAccess::Offline && !is_random {
                ModelFiles::All
            } else {
                ModelFiles::WithoutWeights
            };
            from_hub(name, model.revision.as_deref(), part, view)
        }
        (None, None) => Ok(None),
    }
}

/// Returns the model folder that `model.name_or_path` names. An adapter folder is refused: it has its own key.
fn model_folder(loaded: &Loaded, name: &str) -> Result<PathBuf, EnvironmentError> {
    let key = "model.name_or_path";
    let refuse = |fault: Fault| Err(loaded.error(vec![fault]).into());
    match local_model(name) {
        Err(error) => refuse(loaded.fault_at(&[key], format!("{key}: failed to {error}"))),
        Ok(Some(LocalModel { folder, contents: LocalModelKind::Adapter { base }, .. })) => {
            let message = format!("{key}: {} is an adapter, not a model", folder.display());
            let base = base.unwrap_or_else(|| "the adapter's base model".to_owned());
            let advice = format!(
                "to continue training it, set model.name_or_path: {base} and model.adapter_name_or_path: {}; `trainer merge` \
                 merges both into a model",
                folder.display()
            );
            refuse(loaded.fault_at(&[key], message).note(advice))
        }
        Ok(found) => Ok(found.map_or_else(|| PathBuf::from(name), |found| found.folder)),
    }
}

/// Returns true for a path, false for a Hub id, whose only slash separates owner and name.
pub(crate) fn is_path(name: &str) -> bool {
    name.starts_with(['.', '/', '~']) || name.ends_with('/') || name.matches('/').count() > 1 || name.contains('\\')
}

/// Reads a config.json, given its path or its folder.
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
    view: HubView,
) -> Result<Option<Config>, EnvironmentError> {
    let found = match view.access {
        HubAccess::Network => view.hub.model(name, revision, part),
        HubAccess::ThisMachine | HubAccess::Offline => view.hub.cached_only().model(name, revision, part),
    };
    match found {
        Ok(folder) => Ok(Some(Config::read(&folder)?)),
        Err(
            error @ (HubError::InvalidId { .. }
            | HubError::PathNotFound { .. }
            | HubError::NotAModel { .. }
            | HubError::LockedFileDamaged { .. }),
        ) => Err(error.into()),
        Err(_) if view.access == HubAccess::ThisMachine => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_ids_and_paths_are_distinguished() {
        for id in ["gpt2", "org/model", "Qwen/Qwen2.5-0.5B"] {
            assert!(!is_path(id), "{id}");
        }
        for path in ["./model", "/data/model", "~/model", "out/run/global_step_3", "model/", "..\\model"] {
            assert!(is_path(path), "{path}");
        }
    }
}
