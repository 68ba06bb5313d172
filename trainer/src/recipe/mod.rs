//! What the user wrote: a YAML recipe in ArcticTraining's schema, as a superset, and `key=value` arguments.
//!
//! Nothing is decided here. [`Plan::resolve`](crate::plan::Plan::resolve) turns a [`Recipe`] into what will happen.

mod arctic_moe;
mod data;
mod ddp_backend;
mod decode;
mod deprecated;
mod error;
mod eval;
mod foreign_keys;
mod keys;
mod load;
mod model;
mod node;
mod number;
mod optimizer;
mod output;
mod overrides;
mod schema;
mod tilde;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use crate::data::{RowOrder, Truncation, UnrenderedToolCalls};
pub use arctic_moe::ArcticMoe;
pub use data::{CacheFsType, DataSection, DataSource, DataType, PadTo, SourceOptions, SourceType, StringPairs};
pub use ddp_backend::DdpBackend;
pub use error::{Fault, RecipeError, RecipeSource};
pub use eval::EvalSection;
pub(crate) use keys::{foreign_key_advice, of_option as key_of_option};
pub use load::{Loaded, Origin};
pub use model::{
    ActivationCheckpoint, AttnImplementation, ConfigSource, FloatDtype, JsonMap, ModelSection, ModelType,
    TokenizerSection, TokenizerType,
};
pub use node::{RecipeEntry, RecipeLocation, RecipeNode, RecipeValue};
pub use number::{HumanFloat, HumanInt, parse_number};
pub use optimizer::{
    DeepSpeedConfig, OptimizerSection, OptimizerType, SchedulerKwargs, SchedulerName, SchedulerSection, SchedulerType,
};
pub use output::{
    AllRanks, CheckpointSection, CheckpointType, GenerateSection, LogLevel, LoggerSection, OnNonfinite, Prompt,
    RankList, WandbSection,
};
pub use schema::json_schema;

/// A training recipe: ArcticTraining's schema with Candlewick's extensions.
///
/// Numbers may be written for people: `1_000`, `10^6`, `1e6`, `1.5%`, `4K` (base 10), `4Ki` (base 2).
/// Relative paths start at the current folder.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Recipe {
    /// What kind of training: `sft` (default; conversations) or `causal` (plain text).
    #[serde(rename = "type")]
    pub kind: Option<DataType>,
    /// Python code beside an ArcticTraining recipe. Not supported.
    pub code: Option<String>,
    /// ArcticTraining's switch for its type checks. Has no effect: there are none to skip.
    pub skip_validation: Option<bool>,
    /// The model that is trained.
    pub model: ModelSection,
    /// The tokenizer and its chat template.
    pub tokenizer: TokenizerSection,
    /// What is trained and evaluated on.
    pub data: DataSection,
    /// Log files and what is printed.
    pub logger: LoggerSection,
    /// Weights and Biases.
    pub wandb: WandbSection,
    /// How the learning rate moves.
    pub scheduler: SchedulerSection,
    /// The optimizer.
    pub optimizer: OptimizerSection,
    /// A DeepSpeed config. Keys that cannot matter to one process are accepted; `gradient_clipping`, the numbers of
    /// `fp16`, the switches of `bf16` and `zero_optimization.offload_optimizer` (`device: cpu`, `ratio`) are read; all
    /// others are refused by name.
    pub deepspeed: DeepSpeedConfig,
    /// Gradients are scaled down to this global norm; 0 turns it off. Default 1.0.
    pub gradient_clipping: Option<HumanFloat>,
    /// Passes over the data. Default 1.
    pub epochs: Option<HumanInt>,
    /// Steps; if above 0 it replaces `epochs` as the horizon, 0 leaves it to `epochs`.
    pub train_iters: Option<HumanInt>,
    /// Stops at this step even if data remain; the schedule still aims at the horizon. Default 0: off.
    pub exit_iteration: Option<HumanInt>,
    /// Stops after this many steps of this process; a resumed run goes on. Default 0: off.
    pub exit_iteration_this_run: Option<HumanInt>,
    /// Repeats the data until an epoch holds this many steps. Default 0: off.
    pub min_iterations: Option<HumanInt>,
    /// Rows in a micro-batch. Default 1.
    pub micro_batch_size: Option<HumanInt>,
    /// Micro-batches in a step. Default 1.
    pub gradient_accumulation_steps: Option<HumanInt>,
    /// What computes: `auto` (default: the first GPU, if the program was built for GPUs and there is one), `cpu`, `cuda`
    /// or `cuda:1`.
    pub device: Option<String>,
    /// Whether `auto` may switch on what trades time for memory (`model.activation_checkpoint`), the cheapest that fits
    /// what is free when the run starts; what the recipe sets itself stays. Default `manual`.
    pub memory: Option<MemoryMode>,
    /// Ranks that share the tokens of a micro-batch, and exchange them for heads in attention (Ulysses). It must divide the
    /// attention heads. Default 1.
    pub sequence_parallel_size: Option<HumanInt>,
    /// Ranks, or groups of `sequence_parallel_size` ranks, that share the tokens of a micro-batch, and send each other keys and
    /// values in attention (a ring). Any number of them, whatever the heads. Default 1.
    pub context_parallel_size: Option<HumanInt>,
    /// Ranks that share every matrix, as in Megatron-LM. It must divide the attention heads, the key heads and the width of the
    /// MLP. Default 1.
    pub tensor_parallel_size: Option<HumanInt>,
    /// Megatron-LM's sequence parallelism: tensor-parallel ranks shard the tokens outside of attention and MLP. It saves
    /// activation memory and sends as many bytes. Default true.
    pub sequence_parallel: Option<bool>,
    /// Stages that have some of the blocks each. Default 1.
    pub pipeline_parallel_size: Option<HumanInt>,
    /// The order of a pipeline's forwards and backwards: `1f1b` (default) or `afab`, all forwards and then all backwards.
    pub pipeline_schedule: Option<PipelineScheduleName>,
    /// Model chunks (virtual stages) of each pipeline stage, as in Megatron-LM's interleaved schedule. More chunks shrink
    /// the pipeline bubble and send more. Default 1.
    pub virtual_pipeline_parallel_size: Option<HumanInt>,
    /// The number of blocks of each run, in the order of the model. Default: so many that no stage takes much longer than
    /// another, the last one's head counted.
    pub pipeline_layers: Option<Vec<HumanInt>>,
    /// Seconds for which the other ranks wait for one that is silent, as in transformers (default 1800). One that reads data,
    /// saves or exports is not silent, however long that takes.
    pub ddp_timeout: Option<HumanInt>,
    /// What connects the ranks (transformers' name): `auto` (default: NCCL where GPUs compute, else `local` on one machine and
    /// MPI on several), `local` (processes of one machine), `mpi`, `nccl`, or `staged` (ranks that share a GPU, through the
    /// host). `mpi` and `nccl` are not in every build.
    pub ddp_backend: Option<DdpBackend>,
    /// Expert-parallel degree. Above 1 is not implemented yet.
    pub expert_parallel_size: Option<HumanInt>,
    /// Mixture-of-experts layers of ArcticTraining (`true`, `false` or `auto`). `true` is not implemented yet.
    pub arctic_moe: Option<ArcticMoe>,
    /// Not implemented yet.
    pub enable_arctic_moe_custom_optimization: Option<bool>,
    /// Not implemented yet.
    pub enable_routing_replay: Option<bool>,
    /// ArcticTraining's spelling of `model.activation_checkpoint: offload`.
    pub activation_checkpoint_cpu_offload: Option<bool>,
    /// Computes the MLP of each block in tiles of about as many tokens as the model is wide, keeps nothing of a tile for
    /// backward and computes it again there: less memory for one more forward of the MLP. Default false.
    pub tiled_mlp_compute: Option<bool>,
    /// Seeds the initial weights and LoRA factors. Default 42. The order of the data has `data.seed`.
    pub seed: Option<HumanInt>,
    /// Checkpoints: a list, one entry, or `none` to save nothing. Default: one of type `huggingface` in `model` of
    /// `output_dir`, written at the end.
    #[serde(deserialize_with = "data::one_or_many")]
    #[schemars(with = "data::OneOrMany<CheckpointSection>")]
    pub checkpoint: Vec<CheckpointSection>,
    /// Shows a console line at least every so many steps; 0 leaves it to `train_log_iter_interval`. Default 1.
    pub loss_log_interval: Option<HumanInt>,
    /// Records and shows metrics every so many steps; 0 turns them off. Default 1.
    pub train_log_iter_interval: Option<HumanInt>,
    /// One JSON object is appended here for each step, evaluation, save and resume. Default `metrics.jsonl` in `output_dir`.
    pub train_log_metrics_path: Option<String>,
    /// Evaluates every so many steps, and at the end. Default (and 0): after each epoch.
    pub eval_interval: Option<HumanInt>,
    /// Also evaluates before the first step of a fresh run, to show where it began. Default false.
    pub eval_on_start: Option<bool>,
    /// Tasks of the evaluator that the model is asked during training.
    pub eval: EvalSection,
    /// What says which save is the best, which `save_total_limit` never deletes: `loss` (held-out), or `TASK/METRIC` of
    /// `eval.tasks` such as `arc_easy/acc_norm`. Default: with tasks the first one's first metric, else nothing.
    pub metric_for_best_model: Option<String>,
    /// Whether more of that metric is better. Default: what its task says; false for `loss`.
    pub greater_is_better: Option<bool>,
    /// Shows every so many evaluations; 0 turns them off. Default 1.
    pub eval_log_iter_interval: Option<HumanInt>,
    /// Trains on repetitions of the first step only. Default false.
    pub overfit_first_batch: Option<bool>,
    /// CUDA memory history (`step` or `e2e`). Not implemented yet.
    pub mem_profiler: Option<String>,
    /// Of `mem_profiler`.
    pub mem_profiler_dir: Option<String>,
    /// Of `mem_profiler`.
    pub mem_profiler_max_entries: Option<HumanInt>,
    /// The run ends after the step in which this file appears. Default: `stop` in `output_dir`.
    pub kill_switch_path: Option<String>,
    /// The run's folder: `metrics.jsonl` and `run.json`. Default `runs/<name of the recipe>`.
    pub output_dir: Option<String>,
    /// What happens when a loss or gradient is not finite: `stop` (default, exit code 5) or `skip`.
    pub on_nonfinite: Option<OnNonfinite>,
    /// Sample generations that are printed after training.
    pub generate: Option<GenerateSection>,
    /// Of `type: dpo`. Not implemented yet.
    pub ref_model: Option<JsonMap>,
    /// Of `type: dpo`. Not implemented yet.
    pub beta: Option<HumanFloat>,
    /// Of `type: dpo`. Not implemented yet.
    pub ignore_label_index: Option<serde_json::Number>,
    /// Of `type: dpo`. Not implemented yet.
    pub label_smoothing: Option<HumanFloat>,
    /// Of `type: dpo`. Not implemented yet.
    pub reference_model_deepspeed: Option<JsonMap>,
}

/// Names of a pipeline's schedules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub enum PipelineScheduleName {
    /// One forward, one backward.
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
    /// All forwards, then all backwards.
    #[serde(rename = "afab", alias = "gpipe")]
    AllForwardAllBackward,
}

/// Who chooses what trades time for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MemoryMode {
    /// The recipe.
    Manual,
    /// The plan, by what is free.
    Auto,
}
