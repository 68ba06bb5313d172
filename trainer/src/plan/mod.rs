//! What will happen: every check, every default and every derived number of a run, made once.
//!
//! [`Plan::resolve`] is pure: it asks no device and no network. What it must know of the outside (the model's config,
//! the number of cores) comes in as [`Known`]. No code below the plan validates a setting or supplies a default.

mod backend;
mod batches;
mod checkpoints;
mod deepspeed;
mod eval;
mod facts;
mod known;
mod memory;
mod model;
mod optimizer;
mod output;
mod pipeline;
mod ranks;
mod refused;
mod resolver;
mod sources;
mod table;
mod temp_dir;

use std::fmt::Display;
use std::path::PathBuf;

use candlewick_model::{Config, LoraConfig, MlpRows};
use candlewick_ops::{AttentionChoice, DeviceChoice, LossScaling};
use serde::{Deserialize, Serialize, Serializer};

use crate::checkpoint::CheckpointPlan;
use crate::data::DataPlan;
use crate::metrics::LogPlan;
use crate::recipe::{
    ActivationCheckpoint, Free, HumanFloat, HumanInt, Loaded, MemoryModes, OnNonfinite, Prompt, RecipeError,
};
use crate::schedule::Schedule;

pub use eval::{BestPlan, EvalPlan, HELD_OUT, TasksPlan};
pub(crate) use known::is_path;
pub use known::{Engines, Known, KnownError, Machines, Reach, Seat};
pub(crate) use output::conversation;
pub use pipeline::PipelinePlan;
pub use ranks::RanksPlan;
pub use table::{Setting, Shown};
pub use temp_dir::TempDir;

use resolver::Resolver;

/// A run, resolved.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// The recipe file.
    pub recipe: PathBuf,
    /// Seeds the initial weights and LoRA factors.
    pub seed: u64,
    /// What computes.
    #[serde(serialize_with = "shown")]
    pub device: DeviceChoice,
    /// How the ranks share the work.
    pub ranks: RanksPlan,
    /// The stages of a pipeline, if there is one.
    pub pipeline: PipelinePlan,
    /// Who chose what trades time for memory.
    pub memory: MemoryModes,
    /// The model.
    pub model: ModelPlan,
    /// The tokenizer.
    pub tokenizer: TokenizerPlan,
    /// The data, and how they become steps.
    pub data: DataPlan,
    /// The optimizer.
    pub optimizer: OptimizerPlan,
    /// The share of the parameters whose masters and moments a GPU run keeps, and updates, in the host's memory.
    pub optimizer_on_host: f64,
    /// Whether a GPU run keeps the weights there too, and fetches those of each unit when it is computed.
    pub weights_on_host: bool,
    /// The learning rate over the run. It is checked against the number of steps once the data are counted.
    pub schedule: Schedule,
    /// Evaluation, if there are data for it.
    pub eval: Option<EvalPlan>,
    /// Tasks that are asked during training.
    pub tasks: Option<TasksPlan>,
    /// Which save is the best.
    pub best: Option<BestPlan>,
    /// When the run ends early.
    pub exit: ExitPlan,
    /// What is saved.
    pub checkpoints: Vec<CheckpointPlan>,
    /// What is reported.
    pub log: LogPlan,
    /// What happens when a loss or gradient is not finite.
    pub on_nonfinite: OnNonfinite,
    /// Sample generations after training.
    pub generate: Option<GeneratePlan>,
    /// Log messages.
    pub logger: LoggerPlan,
    /// Every setting with its origin, for people.
    pub settings: Vec<Setting>,
    /// What the user may want to know: keys that were accepted and have no effect, and why.
    pub notes: Vec<String>,
}

/// The model of a run.
#[derive(Clone, Debug, Serialize)]
pub struct ModelPlan {
    /// A Hugging Face folder or Hub id; `None` if the recipe holds the config.
    pub name_or_path: Option<String>,
    /// The branch, tag or commit of a Hub id; `None` is `main`.
    pub revision: Option<String>,
    /// Where the weights come from.
    pub init: Init,
    /// The config with the recipe's overrides. `None` if the Hub has it and this machine has not: never in a run, only
    /// in a check.
    #[serde(serialize_with = "config_json")]
    pub config: Option<Config>,
    /// The overrides that are in `config` already.
    pub hf_config_kwargs: Free,
    /// The number format of the weights in forward and backward. Master weights are f32.
    pub dtype: ComputeDtype,
    /// LoRA, if only an adapter is trained.
    #[serde(serialize_with = "adapter_json")]
    pub adapter: Option<LoraConfig>,
    /// The folder whose adapter is trained on; `None` draws a new one.
    pub adapter_folder: Option<PathBuf>,
    /// What blocks keep for backward.
    pub activations: Activations,
    /// Where the CPU parks activations.
    pub parking_folder: PathBuf,
    /// Whether that folder is memory itself, so that nothing is saved.
    pub parks_in_memory: bool,
    /// Whether MLPs are computed in tiles.
    pub tiled_mlp: bool,
    /// What computes attention.
    pub attention: AttentionChoice,
}

impl ModelPlan {
    /// Returns how MLPs pass over the tokens.
    pub fn mlp_rows(&self) -> MlpRows {
        if self.tiled_mlp { MlpRows::InTiles } else { MlpRows::Together }
    }
}

/// Where a model's weights come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Init {
    /// From the checkpoint.
    Load,
    /// Drawn, as transformers draws them.
    Random,
}

/// The number format of forward and backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ComputeDtype {
    /// bfloat16.
    Bf16,
    /// Single precision.
    F32,
    /// Half precision.
    F16,
}

impl ComputeDtype {
    /// The bytes of a number.
    pub fn n_bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

/// What blocks keep for backward.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activations {
    /// Everything.
    Keep,
    /// Their inputs.
    Recompute,
    /// Their inputs and attention's outputs.
    Selective,
    /// Their inputs, those of this share of the blocks parked outside of the memory that computes.
    Offload(f64),
    /// Every k-th block its input, the others everything.
    RecomputeEvery(usize),
}

impl Activations {
    /// The one of two that keeps less.
    #[must_use]
    pub fn leaner(self, other: Self) -> Self {
        // Blocks that are computed again, and those of them that are parked besides.
        let spared = |it| match it {
            Self::Keep => 0.0,
            Self::RecomputeEvery(k) => 1.0 / k as f64,
            // More than with every second block, whatever the shape.
            Self::Selective => 0.75,
            Self::Recompute => 1.0,
            Self::Offload(share) => 1.0 + share,
        };
        if spared(other) > spared(self) { other } else { self }
    }

    /// The value of `model.activation_checkpoint` that means this.
    pub fn to_recipe(self) -> ActivationCheckpoint {
        match self {
            Self::Keep => ActivationCheckpoint::None,
            Self::Recompute => ActivationCheckpoint::Full,
            Self::Selective => ActivationCheckpoint::Selective,
            Self::Offload(share) if share >= 1.0 => ActivationCheckpoint::Offload,
            Self::Offload(share) => ActivationCheckpoint::OffloadShare(HumanFloat(share)),
            Self::RecomputeEvery(k) => ActivationCheckpoint::Every(HumanInt(k)),
        }
    }
}

/// The tokenizer of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TokenizerPlan {
    /// A folder or a Hub id.
    pub name_or_path: String,
    /// The branch, tag or commit of a Hub id; `None` is `main`.
    pub revision: Option<String>,
    /// A chat template that replaces the tokenizer's own.
    pub chat_template: Option<ChatTemplateSource>,
    /// Extra variables of the chat template.
    pub chat_template_kwargs: Free,
}

/// Where a chat template is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChatTemplateSource {
    /// In a file.
    File(PathBuf),
    /// In the recipe.
    Inline(String),
}

/// AdamW's numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OptimizerPlan {
    /// The base learning rate.
    pub learning_rate: f64,
    /// Decoupled; spares norms and biases.
    pub weight_decay: f64,
    /// Decay rate of the first moment.
    pub beta1: f64,
    /// Decay rate of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// The largest global norm of a gradient; `None` does not clip.
    pub gradient_clipping: Option<f64>,
    /// The number format of master weights and gradients: f32, or bf16 like the model.
    pub masters: ComputeDtype,
    /// The number format of the moments: f32 or bf16.
    pub moments: ComputeDtype,
    /// The factor on losses, which half precision needs.
    pub loss_scaling: LossScaling,
}

/// The events that end a run before its horizon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ExitPlan {
    /// At this step.
    pub iteration: Option<usize>,
    /// After this many steps of this process.
    pub iteration_this_run: Option<usize>,
    /// The file whose appearance ends the run; `None` where no folder holds it.
    pub kill_switch_path: Option<PathBuf>,
}

/// Sample generations.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GeneratePlan {
    /// The texts that the model answers or continues, and the chats that it answers.
    pub prompts: Vec<Prompt>,
    /// The most tokens of an answer.
    pub max_new_tokens: usize,
    /// 0 takes the likeliest token.
    pub temperature: f64,
    /// The share of probability that is sampled from.
    pub top_p: f64,
    /// Seeds the sampling.
    pub seed: u64,
}

/// Log messages: not the metrics, which are [`LogPlan`]'s.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LoggerPlan {
    /// A directive of tracing's filter: `debug`, `info`, `warn` or `error`; `None` is the program's default.
    pub level: Option<String>,
    /// Whether they go to stderr.
    pub print: bool,
    /// The log file.
    pub file: Option<PathBuf>,
}

/// For commands without a recipe.
impl Default for LoggerPlan {
    fn default() -> Self {
        Self { level: None, print: true, file: None }
    }
}

impl Plan {
    /// Decides everything, or says everything that is wrong.
    pub fn resolve(loaded: &Loaded, known: &Known) -> Result<Self, RecipeError> {
        let mut resolver = Resolver::new(loaded, known);
        refused::check(&mut resolver);
        deepspeed::check(&mut resolver);
        let kind = batches::resolve_kind(&mut resolver);
        let model = model::resolve(&mut resolver);
        let tokenizer = model::resolve_tokenizer(&mut resolver);
        let pipeline = pipeline::resolve(&mut resolver, model.config.as_ref());
        let ranks = ranks::resolve(&mut resolver, &model, pipeline.stages);
        let data = batches::resolve(&mut resolver, kind, ranks.n_data(), &model, &tokenizer);
        pipeline::note_bubble(&mut resolver, &pipeline, data.gradient_accumulation_steps);
        let optimizer = optimizer::resolve(&mut resolver, model.dtype);
        optimizer::note_default_rate(&mut resolver, &model);
        let optimizer_on_host = deepspeed::optimizer_on_host(&mut resolver);
        let weights_on_host = deepspeed::weights_on_host(&mut resolver);
        let schedule = optimizer::resolve_schedule(&mut resolver);
        optimizer::check_known_horizon(&mut resolver, &data, &optimizer, &schedule);
        let eval = eval::resolve_held_out(&mut resolver, &data);
        let tasks = eval::resolve_tasks(&mut resolver);
        let best = eval::resolve_best(&mut resolver, eval.as_ref(), tasks.as_ref());
        let exit = output::resolve_exit(&mut resolver);
        let checkpoints = checkpoints::resolve(&mut resolver);
        let log = output::resolve_log(&mut resolver);
        let logger = output::resolve_logger(&mut resolver);
        let generate = output::resolve_generate(&mut resolver);
        let recipe = &loaded.recipe;
        let seed = resolver.count("seed", recipe.seed, 42) as u64;
        let device = device(&mut resolver);
        let on_nonfinite = resolver.pick("on_nonfinite", recipe.on_nonfinite, OnNonfinite::Stop);
        let memory = resolver.pick("memory", recipe.memory, MemoryModes::Manual);
        let (settings, notes) = resolver.finish()?;
        let plan = Self {
            recipe: loaded.source().path.clone(),
            seed,
            device,
            ranks,
            pipeline,
            memory,
            model,
            tokenizer,
            data,
            optimizer,
            optimizer_on_host,
            weights_on_host,
            schedule,
            eval,
            tasks,
            best,
            exit,
            checkpoints,
            log,
            on_nonfinite,
            generate,
            logger,
            settings,
            notes,
        };
        match memory {
            MemoryModes::Manual => Ok(plan),
            MemoryModes::Auto => memory::resolve(plan, loaded, known),
        }
    }
}

fn device(resolver: &mut Resolver) -> DeviceChoice {
    let name = resolver.pick("device", resolver.recipe().device.clone(), "auto".into());
    let device = name.parse().unwrap_or_else(|problem: String| {
        resolver.wrong(&["device"], format!("device: {problem}"));
        DeviceChoice::Auto
    });
    let is_here = resolver.known.seat.machines != Machines::Unknown;
    if matches!(device, DeviceChoice::Cuda(_)) && is_here && !resolver.known.engines.nccl {
        resolver.note(format!(
            "device: {device}, but this program was built without CUDA; scripts/build-gpu builds one with it"
        ));
    }
    device
}

fn shown<T: Display, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

fn config_json<S: Serializer>(config: &Option<Config>, serializer: S) -> Result<S::Ok, S::Error> {
    config.as_ref().map(Config::to_json).serialize(serializer)
}

fn adapter_json<S: Serializer>(adapter: &Option<LoraConfig>, serializer: S) -> Result<S::Ok, S::Error> {
    adapter.as_ref().map(LoraConfig::to_json).serialize(serializer)
}
