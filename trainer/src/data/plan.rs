//! Everything that decides which tokens a run sees and in which order.
//!
//! The recipe fills a [`DataPlan`]; nothing below it reads a recipe or supplies a default.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a run reads, how it becomes tokens, and how the tokens become steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DataPlan {
    /// Whether rows are conversations with masks, or plain text.
    pub kind: DataKind,
    /// What is trained on, concatenated in this order.
    pub sources: Vec<SourcePlan>,
    /// What is evaluated on. Empty, unless `eval_fraction` is zero.
    pub eval_sources: Vec<SourcePlan>,
    /// The second number of `train_eval_split`: the share of `sources` held out.
    pub eval_fraction: f64,
    /// The longest row, in tokens: of a sample, or of a pack of samples.
    pub max_length: usize,
    /// What becomes of a sample longer than `max_length`. Not asked under [`Packing::Exact`],
    /// which slices every sample anyway.
    #[serde(rename = "overlong")]
    pub truncation: Truncation,
    /// Whether several samples share a row.
    pub packing: Packing,
    /// The probability that a pack's samples are read as one sequence (positions run on and the
    /// samples see each other), for long-context distillation. Zero: never.
    pub fuse_positions_prob: f64,
    /// What rows are padded to.
    pub padding: Padding,
    /// Drop what does not fill: the last pack of [`Packing::Exact`] if it is shorter than
    /// `max_length`, and the last step of an epoch if it lacks rows. What is lost is counted.
    pub drop_last: bool,
    /// The order of an epoch's rows.
    pub order: RowOrder,
    /// Learn from the assistant's tokens only. Otherwise from every token.
    pub mask_inputs: bool,
    /// Do not learn from an empty `<think></think>` at the start of an assistant's turn.
    pub ignore_empty_think: bool,
    /// Learn to write an empty answer where the data have one.
    pub train_on_empty_answers: bool,
    /// The handling of rows with tool calls that the chat template does not render.
    pub unrendered_tool_calls: UnrenderedToolCalls,
    /// Puts BOS before a text that no template renders. `None`: as the tokenizer adds it.
    pub add_bos_token: Option<bool>,
    /// Puts EOS after a text that no template renders.
    pub add_eos_token: bool,
    /// Rows in a micro-batch.
    pub micro_batch_size: usize,
    /// Micro-batches in a step, on each data rank.
    pub gradient_accumulation_steps: usize,
    /// Ranks that compute different micro-batches of a step.
    pub data_ranks: usize,
    /// An epoch repeats the data until it holds this many steps. Zero: once.
    pub min_iterations: usize,
    /// When the stream ends.
    pub horizon: Horizon,
    /// Every step is the first one.
    pub overfit_first_batch: bool,
    /// Seeds the split, the shuffle and the packing.
    pub seed: u64,
    /// Where tokens are kept between runs.
    pub cache_dir: PathBuf,
    /// Refuse to tokenise: the tokens must be in the cache already.
    pub fail_on_missing_cache: bool,
    /// Threads that tokenise.
    pub num_proc: usize,
    /// Extra variables for the chat template, such as `enable_thinking`.
    pub template_kwargs: serde_json::Map<String, serde_json::Value>,
}

/// One data set, or a part of one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SourcePlan {
    /// A file, a folder, a Hub id; with `:split` or `:split[10:20]` behind it if wanted.
    pub name_or_path: String,
    /// The split, if `name_or_path` does not name it. `None`: `train`, or for evaluation whatever
    /// the data set keeps for that.
    pub split: Option<String>,
    /// The configuration of a data set that has several (`main` of gsm8k).
    pub subset: Option<String>,
    /// What splits are called in this data set: `train` to `train_sft`. Empty: as is known of it.
    pub split_mapping: Vec<(String, String)>,
    /// The Hub's branch, tag or commit. `None`: `main`.
    pub revision: Option<String>,
    /// Patterns that name the files outright, each for one split or for any.
    #[serde(default)]
    pub data_files: Vec<(Option<String>, String)>,
    /// The key of a `.json` object that holds the list of rows.
    #[serde(default)]
    pub field: Option<String>,
    /// The rows of a `.txt` file: `line`, `paragraph` or `document`. `None`: a document of [`DataKind::Causal`], else
    /// a line.
    #[serde(default)]
    pub sample_by: Option<String>,
    /// What stands between the columns of a `.csv` file.
    #[serde(default)]
    pub delimiter: Option<u8>,
    /// The row format by name. `None`: detected, and said aloud.
    pub format: Option<String>,
    /// Role to column (`user: question`), or role to a path (`user: messages.role.user`), in the
    /// order of a chat. Empty: by format.
    pub role_mapping: Vec<(String, String)>,
    /// The key of a message's text, where it is not one of the usual ones.
    pub content_key: Option<String>,
    /// The column of a plain text.
    pub column: Option<String>,
    /// How many of its rows are used.
    pub sampling: Sampling,
    /// Seeds the choice of rows.
    pub sample_seed: u64,
}

/// What the data are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DataKind {
    /// Conversations and prompts with answers.
    Sft,
    /// Plain text, every token of which is learned.
    Causal,
}

/// How many rows of a source are used.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sampling {
    /// All of them, in their own order.
    All,
    /// This share of them (0 to 1), drawn without replacement.
    Ratio(f64),
    /// This many of them, drawn without replacement.
    Count(usize),
}

/// What becomes of a sample longer than the longest row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Truncation {
    /// The run is refused, with the three longest rows.
    Error,
    /// The sample's end is cut off.
    Truncate,
    /// The sample is left out.
    Drop,
    /// The sample becomes several of the longest length and a rest.
    Split,
}

/// The handling of rows with tool calls that the chat template does not render.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum UnrenderedToolCalls {
    /// The run is refused, with their number and the first row.
    Error,
    /// The rows are left out.
    Drop,
    /// The rows stay, and the turns with these calls are not learned.
    Mask,
}

/// Whether several samples share a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Packing {
    /// One sample a row.
    Off,
    /// Whole samples, as many as fit, packed anew each epoch.
    Fit,
    /// Every row is exactly the longest length: samples are cut where a row ends and go on in the
    /// next one. (ArcticTraining's causal packing, and `always_max_length`.)
    Exact,
}

/// What a row's length is rounded up to, with pad tokens that nothing learns from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Padding {
    /// Rows stay as they are.
    Nothing,
    /// A multiple of this (`div_length`), but not past the longest length.
    Multiple(usize),
    /// The longest length.
    MaxLength,
}

/// The order of an epoch's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RowOrder {
    /// A permutation drawn from the seed and the epoch.
    Shuffle,
    /// As they stand in the data.
    Sequential,
    /// Shuffled, but the first step of the run has the longest rows, so that a run that will not
    /// fit in memory fails at once.
    LongestFirst,
}

/// When the stream ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Horizon {
    /// After so many passes over the data.
    Epochs(usize),
    /// After so many steps (`train_iters`), in as many epochs as they take.
    Steps(usize),
}

impl DataPlan {
    /// Rows in a full step, over all ranks.
    pub fn rows_per_step(&self) -> usize {
        self.micro_batch_size * self.gradient_accumulation_steps * self.data_ranks
    }
}
