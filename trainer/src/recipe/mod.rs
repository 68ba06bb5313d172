//! The recipe as the user wrote it: YAML in a superset of ArcticTraining's schema, with `key=value` arguments.
//!
//! [`Plan::resolve`](crate::plan::Plan::resolve) validates a [`Recipe`], supplies the defaults and makes a plan of it.

mod arctic_moe;
mod base;
mod callbacks;
mod data;
mod ddp_backend;
mod decode;
mod deprecated;
mod dialect;
mod error;
mod eval;
mod foreign_keys;
mod key_docs;
mod keys;
mod load;
mod micro_batch_size;
mod missing_features;
mod model;
mod moe;
mod node;
mod number;
mod optimizer;
mod output;
mod overrides;
mod precision;
mod reference;
mod schema;
pub mod shipped;
pub mod shipped_data;
mod tilde;
mod value_or_list;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use crate::data::{
    MaskingStrategy, PackingStrategy, RowOrder, StoppingStrategy, TrainOnEos, TrainedRole, Truncation,
    UnrenderedMessages,
};
pub use arctic_moe::ArcticMoe;
pub use callbacks::{EarlyStoppingMode, EarlyStoppingSection, LossWatchdogSection, SpikeAction};
pub use data::{CacheFsType, DataSection, DataSource, DataType, PadTo, SourceOptions, SourceType, StringPairs};
pub use ddp_backend::DdpBackend;
pub use dialect::RecipeDialect;
pub use error::{BaseRecipe, Fault, RecipeError, RecipeSource};
pub use eval::EvalSection;
pub use key_docs::{KeyDoc, NamedKey, ValueDoc, find_key, key_docs};
pub(crate) use keys::{foreign_key_advice, numbered, of_option as key_of_option};
pub use load::{Loaded, Origin};
pub use micro_batch_size::MicroBatchSize;
pub(crate) use missing_features::missing_feature_advice;
pub use missing_features::{MISSING_FEATURES, MissingFeature};
pub use model::{
    ActivationCheckpoint, AttnImplementation, BaseStorage, ConfigSource, ExpertsImplementation, FloatDtype, JsonMap,
    ModelSection, ModelType, TokenizerSection, TokenizerType,
};
pub use moe::{
    LoadBalancingType, MoeBenchmarkSection, MoeRouterDtype, MoeSection, RoutingReplaySection, TokenDispatcherType,
    TokenDropPolicy,
};
pub(crate) use node::parse as parse_yaml;
pub use node::{RecipeEntry, RecipeLocation, RecipeNode, RecipeValue};
pub use number::{HumanFloat, HumanInt, StepInterval, parse_number};
pub use optimizer::{
    DeepSpeedConfig, OptimizerGroupSection, OptimizerSection, OptimizerType, SchedulerKwargs, SchedulerName,
    SchedulerSection, SchedulerType,
};
pub use output::{
    AllRanks, CheckpointSection, CheckpointType, GenerateSection, LogLevel, LoggerSection, MlflowSection, OnNonfinite,
    Prompt, RankList, TrackerName, WandbSection,
};
pub use precision::{
    AmaxComputeAlgo, Fp8FormatName, Fp8TensorName, GradientRounding, PrecisionRecipe, PrecisionSection,
};
pub use reference::key_reference;
pub use schema::json_schema;
pub(crate) use shipped_data::{missing_path_advice, missing_shipped_file};
pub use value_or_list::ValueOrList;

/// A training recipe: ArcticTraining's schema with Candlewick's extensions.
///
/// Numbers have many forms: `1_000`, `10^6`, `1e6`, `1.5%`, `4K` (base 10), `4Ki` (base 2).
/// Relative paths start at the current folder.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Recipe {
    /// The kind of training: `sft` (default; conversations) or `causal` (plain text).
    #[serde(rename = "type")]
    pub kind: Option<DataType>,
    /// The Python file of an ArcticTraining recipe. Not supported.
    pub code: Option<String>,
    /// ArcticTraining's switch for its type checks. No effect.
    pub skip_validation: Option<bool>,
    /// Another recipe, whose keys apply unless this file sets them: a path that starts at the folder of this file, or the
    /// name of a shipped recipe. Maps are merged; lists and other values are replaced; null removes a key.
    pub base: Option<String>,
    /// The model that is trained.
    pub model: ModelSection,
    /// The tokenizer and its chat template.
    pub tokenizer: TokenizerSection,
    /// The training and evaluation data.
    pub data: DataSection,
    /// Log messages and log files.
    pub logger: LoggerSection,
    /// The experiment trackers: a list of `tensorboard`, `wandb` and `mlflow`, or one of them. The metrics file is written in
    /// any case. Default `none`.
    pub report_to: Option<ValueOrList<TrackerName>>,
    /// The run's name in the trackers. Default: the name of `output_dir`.
    pub run_name: Option<String>,
    /// Weights and Biases.
    pub wandb: WandbSection,
    /// MLflow.
    pub mlflow: MlflowSection,
    /// The learning rate schedule.
    pub scheduler: SchedulerSection,
    /// The optimizer.
    pub optimizer: OptimizerSection,
    /// A DeepSpeed config. It sets `gradient_clipping`, the loss scaling of `fp16`, the state dtypes of `bf16`, and in
    /// `zero_optimization` the `stage`, `mics_shard_size`, `offload_optimizer` and `offload_param`. Keys that only tune
    /// communication have no effect. Other keys are errors.
    /// `torch_autocast` computes matmuls in 16 bits, and `wall_clock_breakdown` logs the times of a step's phases.
    pub deepspeed: DeepSpeedConfig,
    /// The maximum global norm of the gradients, which are scaled down to it; 0 turns clipping off. Default 1.0.
    pub gradient_clipping: Option<HumanFloat>,
    /// Label smoothing of the training loss, with transformers' name: the probability that each target distribution
    /// spreads evenly over the vocabulary; at least 0 and below 1. Evaluation losses and MTP losses have none. Default 0:
    /// off.
    pub label_smoothing_factor: Option<HumanFloat>,
    /// The number of passes over the data. A fraction, such as 0.5 or 1.5, ends within a pass. Default 1.
    pub epochs: Option<HumanFloat>,
    /// The number of training steps. Above 0 it replaces `epochs`. Default 0: `epochs` decides.
    pub train_iters: Option<HumanInt>,
    /// The number of training tokens, without padding. The run ends with the first step that reaches it. It replaces `epochs`,
    /// and excludes `train_iters`. Default 0: off.
    pub train_tokens: Option<HumanInt>,
    /// Stops the run at this step. The learning rate schedule keeps its full length. Default 0: off.
    pub exit_iteration: Option<HumanInt>,
    /// Stops after this many steps of this process. A resumed run continues with as many. Default 0: off.
    pub exit_iteration_this_run: Option<HumanInt>,
    /// The minimum number of steps in an epoch, which repeats the data to reach it. Default 0: off.
    pub min_iterations: Option<HumanInt>,
    /// The number of rows in a micro-batch, or `auto`: as many rows as the device needs for full speed and the free memory holds.
    /// `auto` keeps the rows of a step: `gradient_accumulation_steps` for each data-parallel rank. Default 1.
    pub micro_batch_size: Option<MicroBatchSize>,
    /// The number of micro-batches of a step on each data-parallel rank; with `micro_batch_size: auto` the number of its rows.
    /// Default 1.
    pub gradient_accumulation_steps: Option<HumanInt>,
    /// The device: `auto`, `cpu`, `cuda` or `cuda:1`. Default `auto`: the first GPU if the build supports CUDA and finds
    /// one, else the CPU.
    pub device: Option<String>,
    /// `auto` selects the fastest `model.activation_checkpoint` that fits the free memory at the start of the run, unless
    /// the recipe sets that key. Default `manual`.
    pub memory: Option<MemoryMode>,
    /// The Ulysses sequence-parallel degree: ranks shard the tokens of a micro-batch and exchange them for attention
    /// heads. It must divide the attention heads. Default 1.
    pub sequence_parallel_size: Option<HumanInt>,
    /// The context-parallel degree: ranks shard the tokens of a micro-batch and exchange keys and values in a ring (ring
    /// attention). The number of heads does not limit it. Default 1.
    pub context_parallel_size: Option<HumanInt>,
    /// The tensor-parallel degree, as in Megatron-LM: ranks shard every matrix. It must divide the attention heads, the
    /// KV heads and the MLP's intermediate size. Default 1.
    pub tensor_parallel_size: Option<HumanInt>,
    /// Megatron-LM's sequence parallelism: tensor-parallel ranks shard the tokens outside of attention and MLP. It saves
    /// activation memory at the same communication volume. Default true.
    pub sequence_parallel: Option<bool>,
    /// The pipeline-parallel degree: the number of stages that the blocks are divided into. Default 1.
    pub pipeline_parallel_size: Option<HumanInt>,
    /// The pipeline schedule: `1f1b` (default; one forward, one backward) or `afab` (GPipe: all forwards, then all
    /// backwards).
    pub pipeline_schedule: Option<PipelineScheduleName>,
    /// The number of model chunks (virtual stages) of each pipeline stage, as in Megatron-LM's interleaved schedule. More
    /// chunks shrink the pipeline bubble and send more data. Default 1.
    pub virtual_pipeline_parallel_size: Option<HumanInt>,
    /// The number of blocks of each model chunk, in the order of the model. Default: balances the time of the stages,
    /// including the head.
    pub pipeline_layers: Option<Vec<HumanInt>>,
    /// The seconds without a heartbeat after which a rank counts as failed. Heartbeats continue while a rank reads data
    /// or writes checkpoints. Default 1800, as in transformers.
    pub ddp_timeout: Option<HumanInt>,
    /// The communication backend, with transformers' name: `auto`, `local` (processes of one machine), `mpi`, `nccl` or
    /// `staged` (several ranks on a GPU, through host memory). Default `auto`: NCCL on GPUs; on CPUs `local` on one
    /// machine, MPI on several. `mpi` and `nccl` need a build with that feature.
    pub ddp_backend: Option<DdpBackend>,
    /// The expert-parallel degree: the number of ranks that divide the experts of each layer. It must divide the experts,
    /// and the ranks of a pipeline stage. Default 1.
    pub expert_parallel_size: Option<HumanInt>,
    /// The expert-tensor-parallel degree: the number of ranks that split the matrices of each expert, with Megatron-LM's
    /// name. It must divide the intermediate size of an expert. Times `expert_parallel_size` it must divide the ranks of a
    /// pipeline stage. Default 1; Megatron-LM's is `tensor_parallel_size`.
    pub expert_tensor_parallel_size: Option<HumanInt>,
    /// ArcticTraining's mixture-of-experts layers: `true`, `false` or `auto`. Models with experts always use ours; `true`
    /// for a dense model is an error.
    pub arctic_moe: Option<ArcticMoe>,
    /// ArcticTraining's fused kernels for experts. No effect: ours are always fused.
    pub enable_arctic_moe_custom_optimization: Option<bool>,
    /// Reuses the experts of the forward when backward recomputes a layer. No effect: routing is always equal in both.
    /// `moe.routing_replay` replays the experts of another run.
    pub enable_routing_replay: Option<bool>,
    /// Mixture-of-experts settings.
    pub moe: MoeSection,
    /// FP8 training.
    pub precision: PrecisionSection,
    /// ArcticTraining's name of `model.activation_checkpoint: offload`. Default false.
    pub activation_checkpoint_cpu_offload: Option<bool>,
    /// Computes each MLP in tiles of about `hidden_size` tokens and recomputes them in backward (ALST's TiledMLP). It saves
    /// memory for one more MLP forward. Default false.
    pub tiled_mlp_compute: Option<bool>,
    /// Seeds the initial weights and LoRA factors. `data.seed` seeds the data order. Default 42.
    pub seed: Option<HumanInt>,
    /// The checkpoints: a list, one entry, or `none` to save nothing. Default: one of type `huggingface` in the folder
    /// `model` of `output_dir`, written at the end.
    #[serde(deserialize_with = "data::one_or_many")]
    #[schemars(with = "data::OneOrMany<CheckpointSection>")]
    pub checkpoint: Vec<CheckpointSection>,
    /// The number of steps between console lines, in addition to those of `train_log_iter_interval`; 0 adds none.
    /// Default 1.
    pub loss_log_interval: Option<HumanInt>,
    /// The number of steps between two steps whose metrics are recorded and shown; 0 turns this off. Default 1.
    pub train_log_iter_interval: Option<HumanInt>,
    /// Counts the gradient elements that are zero in each step, as Megatron-LM's `--log-num-zeros-in-grad`. The metric is
    /// `num_zeros`. Default false.
    pub log_num_zeros_in_grad: Option<bool>,
    /// The file that receives a JSON line for each step, evaluation, checkpoint and resume. Default `metrics.jsonl` in
    /// `output_dir`.
    pub train_log_metrics_path: Option<String>,
    /// The number of steps between evaluations; below 1, a fraction of all steps, as transformers' `eval_steps`. The last step
    /// is always evaluated. Default 0: after each epoch.
    pub eval_interval: Option<StepInterval>,
    /// The number of evaluations in an epoch, with axolotl's name. Not allowed with `eval_interval`. Default: `eval_interval`
    /// decides.
    pub evals_per_epoch: Option<HumanInt>,
    /// Evaluates before the first step of a new run, too. Default false.
    pub eval_on_start: Option<bool>,
    /// Task evaluation during training.
    pub eval: EvalSection,
    /// The metric of the best checkpoint, which `save_total_limit` never deletes: `loss` (of the evaluation data), or
    /// `TASK/METRIC` of `eval.tasks` such as `arc_easy/acc_norm`. Default: the first metric of the first task; without
    /// tasks, none.
    pub metric_for_best_model: Option<String>,
    /// `true` if a higher metric is better. Default: the direction of the metric's task; false for `loss`.
    pub greater_is_better: Option<bool>,
    /// Early stopping. Default: off.
    pub early_stopping: Option<EarlyStoppingSection>,
    /// The number of evaluations between two that are recorded and shown; 0 turns this off. Default 1.
    pub eval_log_iter_interval: Option<HumanInt>,
    /// Repeats the batch of the first step in every step. Default false.
    pub overfit_first_batch: Option<bool>,
    /// Records the memory in use over time, by phase and op: of training steps (`step`), or from before the model is built
    /// (`e2e`). Default null: off.
    pub mem_profiler: Option<MemProfiler>,
    /// The folder of `mem_profiler`, with the files `RANK.json` (Chrome trace) and `RANK.txt` (table) of each rank. Default
    /// `mem-prof` in `output_dir`.
    pub mem_profiler_dir: Option<String>,
    /// The number of newest entries that `mem_profiler` keeps. Default 100_000.
    pub mem_profiler_max_entries: Option<HumanInt>,
    /// The file whose creation ends the run after the current step. Default: `stop` in `output_dir`.
    pub kill_switch_path: Option<String>,
    /// The run's folder, with `metrics.jsonl`, `run.json` and the checkpoints. Default `runs/<name of the recipe>`.
    pub output_dir: Option<String>,
    /// The folder of a `sharded` checkpoint, possibly of another run, from which a new run starts. Once this run has a
    /// checkpoint of its own, `auto_resume` resumes from that one. Default: none.
    pub resume_from_checkpoint: Option<String>,
    /// The reaction to a loss or gradient that is not finite: `stop` (default; exit code 5) or `skip` the step.
    pub on_nonfinite: Option<OnNonfinite>,
    /// `batch_invariant` selects kernels whose result for a row does not depend on the number of rows: with them, evaluation does not depend on
    /// its batches. It costs speed. Default `none`.
    pub deterministic: Option<DeterministicMode>,
    /// The loss watchdog. Default: off.
    pub loss_watchdog: Option<LossWatchdogSection>,
    /// Sample generations, printed after training and, with `on_evaluate`, after each evaluation.
    pub generate: Option<GenerateSection>,
    /// A key of `type: dpo`. Not implemented yet.
    pub ref_model: Option<JsonMap>,
    /// A key of `type: dpo`. Not implemented yet.
    pub beta: Option<HumanFloat>,
    /// A key of `type: dpo`. Not implemented yet.
    pub ignore_label_index: Option<serde_json::Number>,
    /// A key of `type: dpo`. Not implemented yet.
    pub label_smoothing: Option<HumanFloat>,
    /// A key of `type: dpo`. Not implemented yet.
    pub reference_model_deepspeed: Option<JsonMap>,
}

/// The pipeline schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub enum PipelineScheduleName {
    /// One forward, one backward.
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
    /// All forwards, then all backwards.
    #[serde(rename = "afab", alias = "gpipe")]
    AllForwardAllBackward,
}

/// The independence of results from the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DeterministicMode {
    /// A row's bits may depend on the number of rows that are computed with it.
    None,
    /// A row's bits depend on the row alone.
    BatchInvariant,
}

/// The part of a run whose memory is profiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MemProfiler {
    /// The training loop.
    Step,
    /// The whole run, with model loading.
    E2e,
}

/// The selection of settings that trade time for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MemoryMode {
    /// By the recipe.
    Manual,
    /// By the free memory.
    Auto,
}
