//! The resolved run: plain data without logic.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::PathBuf;
use std::sync::Arc;

use candlewick_ops::{DeviceChoice, LossScaling};
use candlewick_parallel::{DecayedParams, OptimizerGroup, OptimizerGroups, OptimizerKind, ParamPattern};
use serde::{Serialize, Serializer};

use super::eval::{BestPlan, EarlyStoppingPlan, EvalPlan, TasksPlan};
use super::model::{ModelPlan, TokenizerPlan};
use super::objective::ObjectivePlan;
use super::pipeline::PipelinePlan;
use super::precision::Fp8Plan;
use super::profiling::ProfilingPlan;
use super::ranks::RanksPlan;
use super::router::RouterPlan;
use super::setting::ResolvedSetting;
use crate::checkpoint::CheckpointPlan;
use crate::data::DataPlan;
use crate::metrics::LogPlan;
use crate::recipe::{DeterministicMode, FloatDtype, MemoryMode, OnNonfinite, Prompt, SpikeAction};
use crate::schedule::Schedule;

/// A resolved run.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// The recipe file.
    pub recipe: PathBuf,
    /// Seeds the initial weights and LoRA factors.
    pub seed: u64,
    /// The device that computes.
    #[serde(serialize_with = "shown")]
    pub device: DeviceChoice,
    /// The degrees of parallelism.
    pub ranks: RanksPlan,
    /// The pipeline stages; one stage means no pipeline.
    pub pipeline: PipelinePlan,
    /// The mode of memory settings: `manual` or `auto`.
    pub memory: MemoryMode,
    /// The selection of the rows of a micro-batch.
    pub micro_batch: MicroBatchChoice,
    /// The model.
    pub model: ModelPlan,
    /// The losses of the routers; `None` for a dense model.
    pub moe: Option<RouterPlan>,
    /// FP8 training; `None` if all layers multiply in the compute dtype.
    pub fp8: Option<Fp8Plan>,
    /// The tokenizer.
    pub tokenizer: TokenizerPlan,
    /// The data and the batches.
    pub data: DataPlan,
    /// The training objective.
    pub objective: ObjectivePlan,
    /// Label smoothing of the training loss; 0 for none.
    pub label_smoothing_factor: f64,
    /// The optimizer.
    pub optimizer: OptimizerPlan,
    /// The fraction of the parameters whose master weights and moments a GPU run offloads to host memory and updates
    /// there.
    pub optimizer_on_host: f64,
    /// True if a GPU run also offloads the weights, and copies a unit's weights to the GPU to compute it.
    pub weights_on_host: bool,
    /// The learning rate schedule. It is checked against the number of steps once the data are counted.
    pub schedule: Schedule,
    /// Evaluation, if there are data for it.
    pub eval: Option<EvalPlan>,
    /// Task evaluation during training.
    pub tasks: Option<TasksPlan>,
    /// The metric of the best checkpoint.
    pub best: Option<BestPlan>,
    /// Early stopping.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub early_stopping: Option<EarlyStoppingPlan>,
    /// The conditions that end the run early.
    pub exit: ExitPlan,
    /// The checkpoints.
    pub checkpoints: Vec<CheckpointPlan>,
    /// The checkpoint that a stopped run writes if no entry of `checkpoints` is `sharded`. It is deleted when the run completes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_checkpoint: Option<CheckpointPlan>,
    /// The folder of a checkpoint from which the run starts, if it has none of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resume_from_checkpoint: Option<PathBuf>,
    /// Metrics and their files.
    pub log: LogPlan,
    /// Measurements of times and memory.
    pub profiling: ProfilingPlan,
    /// The reaction to a loss or gradient that is not finite.
    pub on_nonfinite: OnNonfinite,
    /// The independence of results from the batch.
    pub deterministic: DeterministicMode,
    /// The loss watchdog.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_watchdog: Option<LossWatchdogPlan>,
    /// Sample generations.
    pub generate: Option<GeneratePlan>,
    /// Log messages.
    pub logger: LoggerPlan,
    /// Every setting with its origin.
    pub settings: Vec<ResolvedSetting>,
    /// The keys of the recipe that `settings` summarizes, as written: `checkpoint.0.save_every_n_steps`.
    pub written: Vec<ResolvedSetting>,
    /// Notes for the user, such as keys that are accepted and have no effect, with the reason.
    pub notes: Vec<String>,
    /// The recipe with its bases and arguments, from which `trainer replay` makes the plan again.
    #[serde(skip)]
    pub merged_recipe: serde_json::Value,
}

/// The settings of the optimizer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OptimizerPlan {
    /// The base learning rate.
    pub learning_rate: f64,
    /// Decoupled weight decay, not applied to norms and biases.
    pub weight_decay: f64,
    /// The kind of optimizer with its hyperparameters.
    #[serde(flatten)]
    pub kind: OptimizerKindPlan,
    /// Parameters with settings of their own. The first group that matches a parameter counts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<OptimizerGroupPlan>,
    /// The maximum global norm of the gradients; `None` does not clip.
    pub gradient_clipping: Option<f64>,
    /// The dtype of master weights and gradients: f32, or bf16 if the model is bf16.
    pub masters: FloatDtype,
    /// The dtype of the moments: f32 or bf16.
    pub moments: FloatDtype,
    /// True if updated masters in bf16 are rounded stochastically.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub bf16_stochastic_round: bool,
    /// The loss scaling of fp16.
    pub loss_scaling: LossScaling,
}

/// Parameters with optimizer settings of their own.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OptimizerGroupPlan {
    /// The name in logs and metrics.
    pub name: String,
    /// A regular expression that occurs in the names of the parameters.
    pub pattern: String,
    /// The peak learning rate. The schedule is that of the run.
    pub learning_rate: f64,
    /// The weight decay of all parameters of the group; `None` if that of the optimizer applies, to matrices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// The kind of optimizer with its hyperparameters.
    #[serde(flatten)]
    pub kind: OptimizerKindPlan,
}

/// A kind of optimizer. It is compared and serialized by its hyperparameters.
#[derive(Clone, Debug)]
pub struct OptimizerKindPlan(pub Arc<dyn OptimizerKind>);

impl PartialEq for OptimizerKindPlan {
    fn eq(&self, other: &Self) -> bool {
        (self.0.name(), self.0.settings()) == (other.0.name(), other.0.settings())
    }
}

impl Serialize for OptimizerKindPlan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.settings())
    }
}

impl OptimizerPlan {
    /// Returns the learning rate of each group by name in a step with the learning rate `lr`.
    pub fn group_rates(&self, lr: f64) -> BTreeMap<String, f64> {
        let rate = |group: &OptimizerGroupPlan| lr * (group.learning_rate / self.learning_rate);
        self.groups.iter().map(|group| (group.name.clone(), rate(group))).collect()
    }

    /// Returns the groups of parameters for the engine. Each multiplies the learning rate of the step.
    pub fn groups(&self) -> OptimizerGroups {
        let by_pattern = self.groups.iter().map(|group| OptimizerGroup {
            pattern: ParamPattern::parse(&group.pattern).ok(),
            kind: Arc::clone(&group.kind.0),
            lr_factor: group.learning_rate / self.learning_rate,
            weight_decay: group.weight_decay.unwrap_or(self.weight_decay),
            decayed: if group.weight_decay.is_some() { DecayedParams::All } else { DecayedParams::Matrices },
        });
        let others = OptimizerGroup::of_all(Arc::clone(&self.kind.0), self.weight_decay);
        OptimizerGroups::new(by_pattern.collect(), others)
    }
}

/// The conditions that end a run early.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ExitPlan {
    /// The step at which the run ends.
    pub iteration: Option<usize>,
    /// The number of steps of this process after which the run ends.
    pub iteration_this_run: Option<usize>,
    /// The file whose creation ends the run; `None` without an output folder.
    pub kill_switch_path: Option<PathBuf>,
}

/// The loss watchdog.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LossWatchdogPlan {
    /// The reaction to a loss spike.
    pub action: SpikeAction,
    /// The number of robust standard deviations between the median loss and the limit.
    pub sigma_factor: f64,
    /// The number of last losses that determine the limit.
    pub rolling_interval_length: usize,
    /// The number of first steps without this limit.
    pub warmup_steps: usize,
    /// A fixed limit.
    pub max_loss: Option<f64>,
    /// The number of loss spikes that are skipped or rewound.
    pub max_events: usize,
}

/// Sample generations.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GeneratePlan {
    /// The prompts: texts and chats.
    pub prompts: Vec<Prompt>,
    /// The maximum number of generated tokens.
    pub max_new_tokens: usize,
    /// The sampling temperatures, with a reply for each; 0 is greedy decoding.
    #[serde(rename = "temperature")]
    pub temperatures: Vec<f64>,
    /// The cumulative probability of nucleus sampling.
    pub top_p: f64,
    /// Seeds the sampling.
    pub seed: u64,
    /// True if each evaluation generates, too.
    pub on_evaluate: bool,
}

/// The settings of log messages; [`LogPlan`] has those of metrics.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LoggerPlan {
    /// A directive of tracing's filter: `debug`, `info`, `warn` or `error`; `None` is the program's default.
    pub level: Option<String>,
    /// True if log messages go to stderr.
    pub print: bool,
    /// The log file.
    pub file: Option<PathBuf>,
}

/// The settings of commands without a recipe.
impl Default for LoggerPlan {
    fn default() -> Self {
        Self { level: None, print: true, file: None }
    }
}

fn shown<T: Display, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

/// The selection of the rows of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MicroBatchChoice {
    /// By the recipe.
    Recipe,
    /// By the free memory: `micro_batch_size: auto`.
    FreeMemory,
}
