//! Everything that a run does, decided: plain data without logic.

use std::fmt::Display;
use std::path::PathBuf;

use candlewick_ops::{DeviceChoice, LossScaling};
use serde::{Serialize, Serializer};

use super::eval::{BestPlan, EvalPlan, TasksPlan};
use super::model::{ComputeDtype, ModelPlan, TokenizerPlan};
use super::pipeline::PipelinePlan;
use super::ranks::RanksPlan;
use super::setting::Setting;
use crate::checkpoint::CheckpointPlan;
use crate::data::DataPlan;
use crate::metrics::LogPlan;
use crate::recipe::{MemoryModes, OnNonfinite, Prompt};
use crate::schedule::Schedule;

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

fn shown<T: Display, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}
