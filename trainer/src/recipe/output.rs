//! The `checkpoint`, `logger`, `wandb` and `generate` sections.

use std::fmt;

use schemars::JsonSchema;
use serde::de::{self, Deserialize, Deserializer, SeqAccess, Visitor};
use serde::{Deserialize as DeriveDeserialize, Serialize};

use super::model::{FloatDtype, JsonMap};
use super::number::{HumanFloat, HumanInt};

/// What is saved, when and where.
#[derive(Clone, Debug, PartialEq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CheckpointSection {
    /// `sharded` (default; `deepspeed` is accepted as its name): everything that a bit-exact resume needs.
    /// `huggingface`: the weights alone, as a folder that transformers loads.
    #[serde(rename = "type")]
    pub kind: Option<CheckpointType>,
    /// The folder that receives one folder a save. Relative paths start at the current folder.
    pub output_dir: String,
    /// `false` keeps the entry but does nothing. Default true.
    pub enabled: Option<bool>,
    /// Starts from the newest complete save in `output_dir`, if there is one. At most one `sharded` entry may set it.
    pub auto_resume: Option<bool>,
    /// Saves every so many steps. Default 0: never.
    pub save_every_n_steps: Option<HumanInt>,
    /// Saves every so many epochs. Default 0: never.
    pub save_every_n_epochs: Option<HumanInt>,
    /// Saves after the last step. Default false.
    pub save_end_of_training: Option<bool>,
    /// Keeps only this many of the newest checkpoints of this run, and the best (`metric_for_best_model`). Default: all.
    pub save_total_limit: Option<HumanInt>,
    /// The dtype of the weights of a `huggingface` checkpoint: `bf16`, `f32` or `fp16`. Default: `model.dtype`.
    pub dtype: Option<FloatDtype>,
    /// Writes a `sharded` save while training goes on, from a copy of the weights and moments in memory. Default false.
    pub async_save: Option<bool>,
}

/// Names of checkpoint types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CheckpointType {
    /// Resumable.
    #[serde(alias = "deepspeed")]
    Sharded,
    /// Weights only.
    Huggingface,
}

/// Log files and what is printed.
#[derive(Clone, Debug, Default, PartialEq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LoggerSection {
    /// The folder of `logs/rank_0.log`. Default `/dev/null`: no file.
    pub output_dir: Option<String>,
    /// `DEBUG`, `INFO`, `WARNING` or `ERROR`. Default WARNING; `-v` and `-q` and `RUST_LOG` go before it.
    pub level: Option<LogLevel>,
    /// The ranks that print: a list, or `"*"`. Default `[0]`.
    pub print_output_ranks: Option<RankList>,
    /// The ranks that write log files: a list, or `"*"`. Default `"*"`.
    pub file_output_ranks: Option<RankList>,
}

/// Names of log levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
pub enum LogLevel {
    /// Everything.
    #[serde(alias = "debug")]
    Debug,
    /// What happens.
    #[serde(alias = "info")]
    Info,
    /// What may be wrong.
    #[serde(alias = "warning", alias = "WARN", alias = "warn")]
    Warning,
    /// What is wrong.
    #[serde(alias = "error", alias = "CRITICAL", alias = "critical")]
    Error,
}

/// Some ranks, or all of them.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum RankList {
    /// `"*"`.
    All(AllRanks),
    /// A list of ranks.
    Only(Vec<HumanInt>),
}

/// The text `*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub enum AllRanks {
    /// All of them.
    #[serde(rename = "*")]
    Star,
}

/// Weights and Biases.
#[derive(Clone, Debug, Default, PartialEq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct WandbSection {
    /// `true` is not implemented yet. Default false.
    pub enable: Option<bool>,
    /// The entity.
    pub entity: Option<String>,
    /// The project.
    pub project: Option<String>,
    /// The run's name.
    pub name: Option<String>,
}

/// Sample generations that are printed after training.
#[derive(Clone, Debug, Default, PartialEq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct GenerateSection {
    /// Prompts: a text each, or with `sft` also a list of messages, such as
    /// `[{role: system, content: ...}, {role: user, content: ...}]`. A text is a user's message (`sft`), or is continued
    /// (`causal`).
    pub prompts: Vec<Prompt>,
    /// Default 64.
    pub max_new_tokens: Option<HumanInt>,
    /// 0 (default) takes the likeliest token.
    pub temperature: Option<HumanFloat>,
    /// Samples from the likeliest tokens whose probabilities reach this sum. Default 1: all.
    pub top_p: Option<HumanFloat>,
    /// Default: the run's `seed`.
    pub seed: Option<HumanInt>,
}

/// One prompt of the sample generations.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum Prompt {
    /// A text.
    Text(String),
    /// The messages of a chat, the last of which is answered.
    Messages(Vec<JsonMap>),
}

/// What happens when a step's loss or gradient is not finite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnNonfinite {
    /// The run ends with exit code 5; nothing is saved over an older checkpoint.
    #[default]
    Stop,
    /// The step is skipped and counted.
    Skip,
}

impl RankList {
    /// Tells whether a rank is among them.
    pub fn has(&self, rank: usize) -> bool {
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
                f.write_str("a text or a list of messages")
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
