//! The settings that decide the tokens of a run and their order.
//!
//! `Plan::resolve` fills a [`DataPlan`]. The code below it reads no recipe and supplies no default.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize, Serializer};

/// The data sources, the tokenization and the batches of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DataPlan {
    /// The kind of rows: conversations with loss masks, or plain text.
    pub kind: DataKind,
    /// The training sources, concatenated in this order.
    pub sources: Vec<SourcePlan>,
    /// The evaluation sources. Empty unless `eval_fraction` is zero.
    pub eval_sources: Vec<SourcePlan>,
    /// The held-out fraction of `sources`: the second number of `train_eval_split`.
    pub eval_fraction: f64,
    /// The maximum length of a row (a sample or a pack of samples) in tokens.
    pub max_length: usize,
    /// The handling of samples longer than `max_length`. [`Packing::Exact`] ignores it and splits them.
    #[serde(rename = "overlong")]
    pub truncation: Truncation,
    /// The packing of several samples into a row.
    pub packing: Packing,
    /// The probability that a pack is one sequence, for long-context distillation: positions continue and the samples
    /// attend to each other. Zero: never.
    pub fuse_positions_prob: f64,
    /// The padding of rows.
    pub padding: Padding,
    /// True drops the last row of [`Packing::Exact`] if it is shorter than `max_length`, and the last step of an epoch
    /// if it lacks rows. The token statistics count both.
    pub drop_last: bool,
    /// The order of an epoch's rows.
    pub order: RowOrder,
    /// The mixture of the training sources.
    #[serde(default)]
    pub mixture: Mixture,
    /// The turns that are trained on.
    pub masking_strategy: MaskingStrategy,
    /// The roles whose turns are trained on.
    pub roles_to_train: Vec<TrainedRole>,
    /// The end-of-turn tokens that are trained on.
    pub train_on_eos: TrainOnEos,
    /// True masks an empty `<think></think>` at the start of an assistant's turn.
    pub ignore_empty_think: bool,
    /// True trains on empty answers, false masks them.
    pub train_on_empty_answers: bool,
    /// The handling of rows with messages or tool calls that the chat template does not render.
    #[serde(alias = "unrendered_tool_calls")]
    pub unrendered_messages: UnrenderedMessages,
    /// True adds BOS before a text that no template renders. `None`: the tokenizer's setting.
    pub add_bos_token: Option<bool>,
    /// True adds EOS after a text that no template renders.
    pub add_eos_token: bool,
    /// Rows in a micro-batch.
    pub micro_batch_size: usize,
    /// Micro-batches of a step on each data-parallel rank.
    pub gradient_accumulation_steps: usize,
    /// The number of ranks that compute different micro-batches.
    pub data_ranks: usize,
    /// The minimum number of steps of an epoch, which repeats the data to reach it. Zero: no repetition.
    pub min_iterations: usize,
    /// The end of training.
    pub horizon: Horizon,
    /// True repeats the first step.
    pub overfit_first_batch: bool,
    /// Seeds the split, the shuffle and the packing.
    pub seed: u64,
    /// The folder of the token cache.
    pub cache_dir: PathBuf,
    /// True fails if the cache lacks the tokens.
    pub fail_on_missing_cache: bool,
    /// The number of tokenizer threads.
    pub num_proc: usize,
    /// The number of tokens after which a text is cut, without special tokens. `None`: texts are whole.
    #[serde(default)]
    pub max_text_tokens: Option<usize>,
    /// True repeats the sequences until they fill a row of `max_length`, if all of them together are shorter.
    #[serde(default)]
    pub repeat_to_pack_max_length: bool,
    /// The number of data loader workers; 0 builds each batch when its step begins.
    #[serde(default)]
    pub dl_num_workers: usize,
    /// Reads and tokenizes rows while training; `None` tokenizes all rows before the first step.
    #[serde(default)]
    pub streaming: Option<StreamingPlan>,
    /// Extra variables for the chat template, such as `enable_thinking`.
    pub template_kwargs: serde_json::Map<String, serde_json::Value>,
}

/// Settings of rows that are tokenized while training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamingPlan {
    /// The number of rows that are shuffled and packed together.
    pub buffer_size: usize,
}

/// The format of tokenized rows.
pub(crate) const TOKEN_IDS: &str = "token_ids";

/// One data set, or a part of one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SourcePlan {
    /// A file, a folder or a Hub id, with an optional suffix `:split` or `:split[10:20]`.
    pub name_or_path: String,
    /// The split, if `name_or_path` has none. `None`: `train`, or the data set's evaluation split for evaluation.
    pub split: Option<String>,
    /// The configuration of a data set that has several (`main` of gsm8k).
    pub subset: Option<String>,
    /// Usual split names to those of this data set: `train` to `train_sft`. Empty: the built-in names of the data set.
    pub split_mapping: Vec<(String, String)>,
    /// The Hub's branch, tag or commit. `None`: `main`.
    pub revision: Option<String>,
    /// File patterns, each for one split or for any.
    #[serde(default)]
    pub data_files: Vec<(Option<String>, String)>,
    /// The key of a `.json` object that holds the list of rows.
    #[serde(default)]
    pub field: Option<String>,
    /// The rows of a `.txt` file: `line`, `paragraph` or `document`. `None`: a document of [`DataKind::Causal`], else
    /// a line.
    #[serde(default)]
    pub sample_by: Option<String>,
    /// The separator of the columns of a `.csv` file.
    #[serde(default)]
    pub delimiter: Option<u8>,
    /// The name of the row format. `None`: detected and logged.
    pub format: Option<String>,
    /// Role to column (`user: question`), or role to a path (`user: messages.role.user`), in the order of a chat. Empty:
    /// the format's roles.
    pub role_mapping: Vec<(String, String)>,
    /// The key of a message's text. `None`: the first of content, text, message, value.
    pub content_key: Option<String>,
    /// The column of plain text.
    pub column: Option<String>,
    /// False renders prompts and completions without the chat template.
    #[serde(default = "yes")]
    pub apply_chat_template: bool,
    /// The rows whose nested null fields are removed: all, none, or those of Parquet files (`None`).
    #[serde(default)]
    pub remove_none_values: Option<bool>,
    /// The rows of the source that are used.
    pub sampling: Sampling,
    /// Seeds the sampling of rows.
    pub sample_seed: u64,
    /// The query whose result has the rows; `None` reads `name_or_path`.
    #[serde(default)]
    pub snowflake: Option<SnowflakePlan>,
}

impl SourcePlan {
    /// Returns true if the rows are token ids.
    pub(crate) fn is_tokenized(&self) -> bool {
        self.format.as_deref() == Some(TOKEN_IDS)
    }
}

/// A query of Snowflake.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnowflakePlan {
    /// The SQL statement.
    pub statement: String,
    /// The maximum number of rows.
    pub limit: Option<usize>,
    /// The new names of columns.
    pub column_mapping: Vec<(String, String)>,
}

fn yes() -> bool {
    true
}

/// The mixture of the training sources in an epoch. It changes no tokens, so the token cache does not depend on it.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mixture {
    /// Every sample of every source once.
    #[default]
    Concatenate,
    /// Each source's samples this many times. A fraction takes a part of them, another one in each epoch.
    Repeat(Vec<f64>),
    /// Each next sample comes from a source drawn with these probabilities. Empty: from each source in turn.
    Interleave {
        /// The probability of each source. They sum to 1.
        probabilities: Vec<f64>,
        /// The end of an epoch.
        stopping_strategy: StoppingStrategy,
    },
}

/// The end of an epoch of interleaved sources, as in `datasets.interleave_datasets`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum StoppingStrategy {
    /// Ends when the first source has no sample left.
    FirstExhausted,
    /// Ends when every source was read to its end. The others begin again.
    AllExhausted,
}

/// The turns that are trained on, with torchtune's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MaskingStrategy {
    /// Every token of the conversation.
    TrainOnAll,
    /// Every turn of `roles_to_train`.
    TrainOnAssistant,
    /// The last turn of `roles_to_train`.
    TrainOnLast,
}

/// A role whose turns can be trained on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TrainedRole {
    /// Messages of `system` or `developer`.
    #[serde(alias = "developer")]
    System,
    /// Messages of the user.
    #[serde(alias = "human")]
    User,
    /// Messages of the assistant.
    #[serde(alias = "gpt")]
    Assistant,
    /// Results of tools.
    #[serde(alias = "function", alias = "ipython", alias = "observation")]
    Tool,
}

impl TrainedRole {
    /// Lists roles by their names.
    pub(crate) fn list(roles: &[Self]) -> String {
        let name = |role: &Self| match role {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        };
        roles.iter().map(name).collect::<Vec<_>>().join(", ")
    }
}

/// The end-of-turn tokens that are trained on, as in axolotl.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TrainOnEos {
    /// Tokens that end a turn that is trained on.
    Turn,
    /// Tokens that end any turn.
    All,
    /// The token that ends the last turn that is trained on.
    Last,
    /// No end-of-turn token.
    None,
}

/// The kind of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DataKind {
    /// Conversations and prompts with answers.
    Sft,
    /// Plain text; every token is a target.
    Causal,
}

/// The rows of a source that are used.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sampling {
    /// All rows, in their order.
    All,
    /// This fraction of the rows (0 to 1), sampled without replacement.
    Ratio(f64),
    /// This many rows, sampled without replacement.
    Count(usize),
}

/// The handling of samples longer than `max_length`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Truncation {
    /// The run fails and reports the three longest samples.
    Error,
    /// Cuts off the end of the sample.
    Truncate,
    /// Drops the sample.
    Drop,
    /// Splits the sample into sequences of `max_length` and a shorter last one.
    Split,
}

/// The handling of rows with messages or tool calls that the chat template does not render.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum UnrenderedMessages {
    /// The run fails and reports their number and the first row.
    Error,
    /// Drops the rows.
    Drop,
    /// Masks these turns in the loss.
    Mask,
}

/// The packing of several samples into a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Packing {
    /// One sample a row.
    Off,
    /// Whole samples, as many as fit. Each epoch packs them anew.
    Fit(PackingStrategy),
    /// Rows of exactly `max_length`: a sample that does not fit is split between two rows. This is ArcticTraining's
    /// causal packing and `always_max_length`.
    Exact,
}

/// The order in which whole samples are placed. Each goes into the fullest row in which it fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PackingStrategy {
    /// The order of the epoch, except that samples longer than half a row come first.
    BestFit,
    /// Longest first (best-fit decreasing), with TRL's name.
    Bfd,
}

/// The padding of rows. Pad tokens are no targets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Padding {
    /// No padding.
    Nothing,
    /// To a multiple of this (`div_length`), at most `max_length`.
    Multiple(usize),
    /// To `max_length`.
    MaxLength,
}

/// The order of an epoch's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RowOrder {
    /// A new permutation each epoch, from the seed and the epoch.
    Shuffle,
    /// The order of the data.
    Sequential,
    /// Shuffled, but the first step has the longest rows: a run that does not fit in memory fails at once.
    LongestFirst,
}

/// The end of training.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Horizon {
    /// After this number of epochs, above 0. A fraction of an epoch is rounded up to a full step, as in transformers.
    Epochs(#[serde(serialize_with = "as_number")] f64),
    /// After this number of steps (`train_iters`), in as many epochs as needed.
    Steps(usize),
    /// After the first step that reaches this number of tokens without padding (`train_tokens`).
    Tokens(usize),
}

/// Writes a whole number without a decimal point.
#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn as_number<S: Serializer>(number: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    match number.fract() {
        0.0 => serializer.serialize_u64(*number as u64),
        _ => serializer.serialize_f64(*number),
    }
}

impl DataPlan {
    /// Returns the rows of a full step on all ranks.
    pub fn rows_per_step(&self) -> usize {
        self.micro_batch_size * self.gradient_accumulation_steps * self.data_ranks
    }

    /// Returns true if epochs have different numbers of rows: each packs whole samples or draws sources anew.
    pub fn epochs_vary(&self) -> bool {
        matches!(self.packing, Packing::Fit(_)) || matches!(self.mixture, Mixture::Interleave { .. })
    }
}
