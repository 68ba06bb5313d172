//! The `checkpoint`, `logger`, `wandb`, `mlflow` and `generate` sections.

use std::fmt;

use schemars::JsonSchema;
use serde::de::{self, Deserialize, Deserializer, SeqAccess, Visitor};
use serde::{Deserialize as DeriveDeserialize, Serialize};

use super::model::{FloatDtype, JsonMap};
use super::number::{HumanFloat, HumanInt, StepInterval};
use super::value_or_list::ValueOrList;

/// A checkpoint: its type, folder and interval.
#[derive(Clone, Debug, PartialEq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CheckpointSection {
    /// The checkpoint type. `sharded` (default; alias `deepspeed`) has everything that a bit-exact resume needs.
    /// `huggingface` has only the weights, in a folder that transformers loads.
    #[serde(rename = "type")]
    pub kind: Option<CheckpointType>,
    /// The folder of the checkpoints, with a subfolder each. Relative paths start at the current folder. Default: the folder
    /// `checkpoints` of the run's `output_dir`, or `model` with type `huggingface`.
    pub output_dir: Option<String>,
    /// `false` turns this entry off. Default true.
    pub enabled: Option<bool>,
    /// Resumes from this run's newest complete checkpoint in the entry's folder, if there is one. Only one `sharded` entry may
    /// set it. Default false.
    pub auto_resume: Option<bool>,
    /// The number of steps between checkpoints; below 1, a fraction of all steps, as transformers' `save_steps`. Default 0:
    /// off.
    pub save_every_n_steps: Option<StepInterval>,
    /// The number of checkpoints in an epoch, with axolotl's name. Not allowed with the other intervals. Default 0: off.
    pub saves_per_epoch: Option<HumanInt>,
    /// The number of epochs between checkpoints. Default 0: off.
    pub save_every_n_epochs: Option<HumanInt>,
    /// Writes a checkpoint after the last step. Default false.
    pub save_end_of_training: Option<bool>,
    /// The number of newest checkpoints of this run to keep. The best one (`metric_for_best_model`) is kept in addition.
    /// Default: all.
    pub save_total_limit: Option<HumanInt>,
    /// Keeps every checkpoint whose step is a multiple of this, in addition to `save_total_limit`, with Megatron-LM's name.
    /// Default: none.
    pub save_retain_interval: Option<HumanInt>,
    /// The dtype of the weights of a `huggingface` checkpoint: `bf16`, `f32` or `fp16`. Default: `model.dtype`.
    pub dtype: Option<FloatDtype>,
    /// Writes a `sharded` checkpoint asynchronously, from a copy of master weights and moments in memory. Default false.
    pub async_save: Option<bool>,
}

/// The checkpoint type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CheckpointType {
    /// A resumable checkpoint.
    #[serde(alias = "deepspeed")]
    Sharded,
    /// A Hugging Face folder with the weights only.
    Huggingface,
}

/// Log messages and log files.
#[derive(Clone, Debug, Default, PartialEq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LoggerSection {
    /// The folder of the log files `logs/rank_0.log`, ... Default `/dev/null`: no files.
    pub output_dir: Option<String>,
    /// The log level: `DEBUG`, `INFO`, `WARNING` or `ERROR`. `-v`, `-q` and `RUST_LOG` override it. Default `WARNING`.
    pub level: Option<LogLevel>,
    /// The ranks that log to stderr: a list, or `"*"` for all. Default `[0]`.
    pub print_output_ranks: Option<RankList>,
    /// The ranks that write log files: a list, or `"*"` for all. Default `"*"`.
    pub file_output_ranks: Option<RankList>,
}

/// The log level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
pub enum LogLevel {
    /// All messages.
    #[serde(alias = "debug")]
    Debug,
    /// Information, warnings and errors.
    #[serde(alias = "info")]
    Info,
    /// Warnings and errors.
    #[serde(alias = "warning", alias = "WARN", alias = "warn")]
    Warning,
    /// Errors.
    #[serde(alias = "error", alias = "CRITICAL", alias = "critical")]
    Error,
}

/// A selection of ranks.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum RankList {
    /// All ranks: `"*"`.
    All(AllRanks),
    /// A list of ranks.
    Only(Vec<HumanInt>),
}

/// The string `*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub enum AllRanks {
    /// All ranks.
    #[serde(rename = "*")]
    Star,
}

/// An experiment tracker of `report_to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TrackerName {
    /// TensorBoard's event files in `tensorboard` in `output_dir`.
    Tensorboard,
    /// Weights and Biases.
    Wandb,
    /// An MLflow tracking server.
    Mlflow,
    /// No tracker.
    None,
}

/// Weights and Biases. The environment variables `WANDB_*` apply where a key is not set.
#[derive(Clone, Debug, Default, PartialEq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct WandbSection {
    /// Logs to Weights and Biases, as `report_to: wandb` does. Default false.
    pub enable: Option<bool>,
    /// The entity: a user or team. Default `WANDB_ENTITY`, else the default entity of the API key.
    pub entity: Option<String>,
    /// The project. Default `WANDB_PROJECT`, else `candlewick`.
    pub project: Option<String>,
    /// The run's name. Default `run_name`, else `WANDB_NAME`, else the name of `output_dir`.
    pub name: Option<String>,
}

/// MLflow. The environment variables `MLFLOW_*` apply where a key is not set.
#[derive(Clone, Debug, Default, PartialEq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MlflowSection {
    /// The URL of the tracking server: `http://host:5000`. Default `MLFLOW_TRACKING_URI`.
    pub tracking_uri: Option<String>,
    /// The experiment. Default `MLFLOW_EXPERIMENT_NAME`, else `Default`.
    pub experiment_name: Option<String>,
}

/// Sample generations.
#[derive(Clone, Debug, Default, PartialEq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct GenerateSection {
    /// The prompts. A string is a user message with `sft`, and the start of a text with `causal`. With `sft` a prompt may
    /// also be a list of messages: `[{role: system, content: ...}, {role: user, content: ...}]`.
    pub prompts: Vec<Prompt>,
    /// The maximum number of generated tokens. Default 64.
    pub max_new_tokens: Option<HumanInt>,
    /// The sampling temperature, or a list with one reply for each: `[0, 0.8]`. Default 0: greedy decoding.
    pub temperature: Option<ValueOrList<HumanFloat>>,
    /// The cumulative probability of nucleus sampling. Default 1: all tokens.
    pub top_p: Option<HumanFloat>,
    /// Seeds the sampling. Default: the run's `seed`.
    pub seed: Option<HumanInt>,
    /// Generates after each evaluation, too: into the file `samples.jsonl` of `output_dir`, and as text to the trackers.
    /// Default false.
    pub on_evaluate: Option<bool>,
}

/// One prompt of the sample generations.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum Prompt {
    /// A string.
    Text(String),
    /// The messages of a chat. The model answers the last one.
    Messages(Vec<JsonMap>),
}

/// The reaction to a loss or gradient that is not finite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnNonfinite {
    /// Ends the run with exit code 5. No checkpoint is overwritten.
    #[default]
    Stop,
    /// Skips and counts the step.
    Skip,
}

impl RankList {
    /// Returns true if the selection contains `rank`.
    pub fn contains(&self, rank: usize) -> bool {
        match self {
            RankList::All(_) => true,
            RankList::Only(ranks) => ranks.contains(&HumanInt(rank)),
        }
    }
}

impl<'de> Deserialize<'de> for Prompt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOf;
        impl<'de> Visitor<'de> for OneOf {
            type Value = Prompt;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("text or a list of messages")
            }
            fn visit_str<E>(self, text: &str) -> Result<Prompt, E> {
                Ok(Prompt::Text(text.to_owned()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Prompt, A::Error> {
                let mut messages = Vec::new();
                while let Some(message) = seq.next_element()? {
                    messages.push(message);
                }
                Ok(Prompt::Messages(messages))
            }
        }
        deserializer.deserialize_any(OneOf)
    }
}

impl<'de> Deserialize<'de> for RankList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOf;
        impl<'de> Visitor<'de> for OneOf {
            type Value = RankList;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a list of ranks or \"*\"")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<RankList, E> {
                match text {
                    "*" => Ok(RankList::All(AllRanks::Star)),
                    _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
                }
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<RankList, A::Error> {
                let mut ranks = Vec::new();
                while let Some(rank) = seq.next_element()? {
                    ranks.push(rank);
                }
                Ok(RankList::Only(ranks))
            }
        }
        deserializer.deserialize_any(OneOf)
    }
}
