//! The `data` section.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer, StrDeserializer};
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize as DeriveDeserialize, Serialize};

use super::model::JsonMap;
use super::number::{HumanFloat, HumanInt};
use crate::data::{
    MaskingStrategy, PackingStrategy, RowOrder, StoppingStrategy, TrainOnEos, TrainedRole, Truncation,
    UnrenderedMessages,
};

/// The training and evaluation data.
#[derive(Clone, Debug, Default, PartialEq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DataSection {
    /// The kind of data. Default: the run's `type`.
    #[serde(rename = "type")]
    pub kind: Option<DataType>,
    /// The training data: a name (`name`, `name:split`, `name:split[10:20]`), a map, or a list of these.
    #[serde(deserialize_with = "one_source_or_many")]
    #[schemars(with = "DataSourcesSchema")]
    pub sources: Vec<DataSource>,
    /// The evaluation data, in the forms of `sources`. `eval_interval` sets the steps between evaluations. Default: none.
    #[serde(deserialize_with = "one_source_or_many")]
    #[schemars(with = "DataSourcesSchema")]
    pub eval_sources: Vec<DataSource>,
    /// The fractions of `sources` for training and for held-out evaluation. They sum to 1. Not allowed with
    /// `eval_sources`. Default `[1.0, 0.0]`.
    pub train_eval_split: Option<(HumanFloat, HumanFloat)>,
    /// The maximum length of a row in tokens. Default: the model config's `max_position_embeddings`.
    pub max_length: Option<HumanInt>,
    /// The handling of samples longer than `max_length`: `error` (fails and reports the three longest),
    /// `truncate`, `drop` or `split` (into samples of `max_length`). Packed causal data are always split. Default `error` for
    /// `sft`, `split` for `causal`.
    pub truncation: Option<Truncation>,
    /// ArcticTraining's name of `truncation: drop`: `true` drops samples longer than `max_length`.
    pub filter_samples: Option<bool>,
    /// The order of an epoch's rows: `shuffle` (default; a new permutation each epoch, from `data.seed`), `sequential`
    /// or `longest_first`. The last one shuffles too, but starts with the longest rows: a run that does not fit in
    /// memory fails at once.
    pub order: Option<RowOrder>,
    /// Packs several samples into a row. They do not attend to each other. Default false for `sft`, true for `causal`.
    pub pack_samples: Option<bool>,
    /// The order in which whole samples are packed; each goes into the fullest row in which it fits. `best_fit` keeps the shuffled
    /// order, but samples longer than half a row come first. `bfd` (best-fit decreasing, TRL's name) places the longest
    /// first: it fills rows a little better, but puts samples of equal length into the same rows. Default `best_fit`.
    pub packing_strategy: Option<PackingStrategy>,
    /// Packs rows of exactly `max_length` tokens: a sample that does not fit is split between two rows. Default true for
    /// packed `causal` data, else false.
    pub always_max_length: Option<bool>,
    /// Drops a last row shorter than `max_length` (`always_max_length`) and a last step with too few rows. Default false.
    pub drop_last: Option<bool>,
    /// The probability that a pack is one sequence whose samples attend to each other, for long-context distillation.
    /// Default 0.
    pub fuse_positions_prob: Option<HumanFloat>,
    /// Repeats the samples until they fill a row of `max_length`, if all of them together are shorter. Needs `pack_samples`.
    /// Default false.
    pub repeat_to_pack_max_length: Option<bool>,
    /// Reads, tokenizes and packs rows while training, instead of tokenizing all data before the first step. Needs
    /// `train_iters`. Evaluation data are not streamed. Default false.
    pub streaming: Option<bool>,
    /// The number of consecutive rows that `streaming` shuffles and packs together. It bounds the memory. Default 1024.
    pub buffer_size: Option<HumanInt>,
    /// Interleaves the sources, and sets the end of an epoch: `first_exhausted` (when the first source has no row left;
    /// default with `weight`) or `all_exhausted` (when every source was read to its end; the others begin again).
    /// Without `weight`, the sources take turns. Default: no interleaving, every row once.
    pub stopping_strategy: Option<StoppingStrategy>,
    /// Computes the loss on the assistant's tokens only. Default true. `false` is `masking_strategy: train_on_all`.
    pub mask_inputs: Option<bool>,
    /// The turns that the loss covers: `train_on_assistant` (every turn of `roles_to_train`), `train_on_last` (the last of
    /// these turns) or `train_on_all` (every token). Default `train_on_assistant`.
    pub masking_strategy: Option<MaskingStrategy>,
    /// The roles whose turns the loss covers: `assistant`, `user`, `system`, `tool`. Default `[assistant]`.
    pub roles_to_train: Option<Vec<TrainedRole>>,
    /// The end-of-turn tokens that the loss covers: `turn` (of the turns that it covers), `all`, `last` (of the last turn
    /// that it covers) or `none`. Default `turn`.
    pub train_on_eos: Option<TrainOnEos>,
    /// Masks an empty `<think></think>` at the start of an assistant's turn in the loss. Default false.
    pub ignore_empty_think: Option<bool>,
    /// Trains on empty answers. Default false: their turns are masked in the loss.
    pub train_on_empty_answers: Option<bool>,
    /// The handling of rows with messages or tool calls that the chat template does not render: `error` (default; fails and
    /// reports their number and the first row), `drop` (drops the rows) or `mask` (masks these turns in the loss).
    pub unrendered_messages: Option<UnrenderedMessages>,
    /// Adds BOS before a text that no chat template renders (`type: causal`). Default: the tokenizer's setting.
    pub add_bos_token: Option<bool>,
    /// Adds EOS after a text that no chat template renders (`type: causal`), to separate documents. Default true.
    pub add_eos_token: Option<bool>,
    /// The padding of rows: `none`, `div_length` (to a multiple of it) or `max_length`. Default: `div_length` if that key
    /// is set, else `none`. Attention needs no padding.
    pub pad_to: Option<PadTo>,
    /// Pads rows to a multiple of this number of tokens. Default 256 with `pad_to: div_length`.
    pub div_length: Option<HumanInt>,
    /// The number of tokenizer threads. Default: 16, at most the number of cores.
    pub num_proc: Option<HumanInt>,
    /// The number of data loader workers. As in PyTorch, two batches are prepared ahead for each of them, but on one thread;
    /// with `streaming`, two chunks of `buffer_size` rows. 0 prepares each batch when its step begins. Batches and losses do
    /// not depend on it. Default 0, or 1 with `streaming`.
    pub dl_num_workers: Option<HumanInt>,
    /// Seeds the split, the shuffle and the packing. Default 42.
    pub seed: Option<HumanInt>,
    /// The folder of the token cache. Default `$XDG_CACHE_HOME/candlewick/tokens`, or `~/.cache/candlewick/tokens`.
    pub cache_dir: Option<String>,
    /// The kind of file system of the cache: `auto`, `local` or `shared`. No effect.
    pub cache_fs_type: Option<CacheFsType>,
    /// Fails if the token cache lacks the data, instead of tokenizing them. Default false.
    pub fail_on_missing_cache: Option<bool>,
    /// Deprecated in ArcticTraining. No effect.
    pub use_data_cache: Option<bool>,
    /// Deprecated in ArcticTraining. No effect.
    pub cache_processed_data: Option<bool>,
    /// A key of `type: dpo`. Not implemented yet.
    pub max_prompt_length: Option<HumanInt>,
    /// A key of `type: dpo`. Not implemented yet.
    pub dpo_prompt_truncation_mode: Option<String>,
}

/// The kind of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DataType {
    /// Conversations.
    Sft,
    /// Plain text.
    Causal,
}

/// The padding of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PadTo {
    /// No padding.
    None,
    /// To a multiple of `div_length`.
    DivLength,
    /// To `max_length`.
    MaxLength,
}

/// The kind of file system of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CacheFsType {
    /// Detected.
    Auto,
    /// On one machine.
    Local,
    /// Shared by several machines.
    Shared,
}

/// One data set, or a part of one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
#[schemars(with = "DataSourceSchema")]
pub struct DataSource(pub SourceOptions);

/// The two ways to write a source.
#[derive(JsonSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only its schema is used")]
enum DataSourceSchema {
    /// `name`, `name:split` or `name:split[10:20]`.
    Name(String),
    /// A map with options.
    Map(Box<SourceOptions>),
}

/// The two ways to write sources.
#[derive(JsonSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only its schema is used")]
enum DataSourcesSchema {
    /// One source.
    One(Box<DataSource>),
    /// Several sources.
    Many(Vec<DataSource>),
}

/// One data set with its options.
#[derive(Clone, Debug, Default, PartialEq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SourceOptions {
    /// The source type, for local files and the Hub: `huggingface`, `huggingface_instruct` or `huggingface_causal`.
    /// `snowflake` reads a query or a table over Snowflake's SQL REST API. Default `huggingface_instruct` for `sft`, `huggingface_causal` for `causal`.
    #[serde(rename = "type")]
    pub kind: Option<SourceType>,
    /// A json, jsonl, parquet, csv or txt file, a folder of these, or a Hub id. The suffix `:split` or `:split[10:20]`
    /// selects a split or rows of it.
    pub name_or_path: Option<String>,
    /// The branch, tag or commit of a Hub id. Default `main`.
    pub revision: Option<String>,
    /// The split. Default `train`; in `eval_sources` the data set's evaluation split.
    pub split: Option<String>,
    /// The row format: `messages`, `sharegpt`, `alpaca`, `prompt_completion`, `text` or `token_ids`. Default: detected.
    pub format: Option<String>,
    /// The fraction of the rows to use, sampled with `sample_seed`. Default: all rows.
    pub sample_ratio: Option<HumanFloat>,
    /// The number of rows to use, sampled with `sample_seed`. Default: all rows.
    pub sample_count: Option<HumanInt>,
    /// Seeds the sampling of rows. Default 42.
    pub sample_seed: Option<HumanInt>,
    /// `false` reads tokenized rows: lists of numbers in the columns `input_ids` and `labels` (-100: no loss). `labels` may
    /// be missing for `type: causal`. Default true.
    pub process: Option<bool>,
    /// Arguments of `datasets.load_dataset`. `name` is `subset`. `data_files` has patterns, or a map from splits to
    /// patterns; with `name_or_path: json`, `csv`, `parquet` or `text` it has the paths of the files. `field` is a key
    /// of a json file. `sample_by` splits a text file by `line`, `paragraph` or `document` (default of `type: causal`;
    /// else `line`). `delimiter` or `sep` separates csv columns. `verification_mode`, `trust_remote_code`, `num_proc`
    /// and `keep_in_memory` have no effect.
    pub kwargs: JsonMap,
    /// The data set's split names by their usual names: `{train: train_sft}`. Default: the built-in names.
    pub split_mapping: StringPairs,
    /// The configuration of a data set with several (`main` of gsm8k). ArcticTraining names it `kwargs.name`.
    pub subset: Option<String>,
    /// The relative frequency of the source's rows. Each next row comes from a source drawn by its weight. Set it for
    /// every source or for none. Default: no interleaving, every row once.
    pub weight: Option<HumanFloat>,
    /// The number of times that an epoch reads each row. `2.5` reads half of the rows a third time, others in each
    /// epoch. Below 1 it reads a part of the rows. Default 1.
    pub repeat: Option<HumanFloat>,
    /// Renders prompts and completions with the chat template. `false` joins both texts as they are, and adds EOS.
    /// Default true.
    pub apply_chat_template: Option<bool>,
    /// Role to column (`user: question`), or role to a path (`user: messages.role.user`), in the order of a chat.
    /// Default: the roles of the row format.
    pub role_mapping: StringPairs,
    /// The key of a message's text. Default: the first of content, text, message, value.
    pub content_key: Option<String>,
    /// The column of plain text. Default `text`.
    pub column: Option<String>,
    /// Removes null fields of nested structs, such as tool schemas and arguments of tool calls, as TRL's function of this name.
    /// Parquet adds them, because all structs of a column have the same fields. Default: true for Parquet, else false.
    pub remove_none_values: Option<bool>,
    /// The SQL query of `type: snowflake`.
    pub sql: Option<String>,
    /// The table of `type: snowflake`: `table`, `schema.table` or `database.schema.table`.
    pub table_name: Option<String>,
    /// A Snowflake Dataset. Not supported: the SQL REST API does not return its files.
    pub dataset_uri: Option<String>,
    /// The new names of columns of `type: snowflake`: `{TEXT: text}`. Default: unchanged.
    pub column_mapping: StringPairs,
    /// The maximum number of rows of `type: snowflake`. Default: all rows.
    pub limit: Option<HumanInt>,
    /// The rows of a batch in ArcticTraining's client of `type: snowflake`. No effect.
    pub batch_size: Option<HumanInt>,
}

/// A map from string to string that keeps its order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(with = "std::collections::BTreeMap<String, String>")]
pub struct StringPairs(pub Vec<(String, String)>);

/// The type of a data source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SourceType {
    /// Any rows.
    Huggingface,
    /// Conversations.
    HuggingfaceInstruct,
    /// Plain text.
    HuggingfaceCausal,
    /// A Snowflake query or table.
    Snowflake,
}

impl<'de> Deserialize<'de> for DataSource {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOf;
        impl<'de> Visitor<'de> for OneOf {
            type Value = DataSource;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("text (a name such as `name:split`) or a map with name_or_path")
            }
            fn visit_str<E>(self, name: &str) -> Result<DataSource, E> {
                Ok(DataSource(SourceOptions { name_or_path: Some(name.to_owned()), ..SourceOptions::default() }))
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<DataSource, A::Error> {
                SourceOptions::deserialize(MapAccessDeserializer::new(map)).map(DataSource)
            }
        }
        deserializer.deserialize_any(OneOf)
    }
}

impl<'de> Deserialize<'de> for StringPairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder;
        impl<'de> Visitor<'de> for InOrder {
            type Value = StringPairs;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a map")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<StringPairs, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(StringPairs(pairs))
            }
        }
        deserializer.deserialize_map(InOrder)
    }
}

/// Reads a list of sources, or one source that stands for a list of one.
fn one_source_or_many<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<DataSource>, D::Error> {
    struct OneOf;
    impl<'de> Visitor<'de> for OneOf {
        type Value = Vec<DataSource>;

        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            f.write_str("a list of sources, or one source: text (a name such as `name:split`) or a map")
        }
        fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<Self::Value, E> {
            DataSource::deserialize(StrDeserializer::new(name)).map(|source| vec![source])
        }
        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
            DataSource::deserialize(MapAccessDeserializer::new(map)).map(|source| vec![source])
        }
        fn visit_seq<A: SeqAccess<'de>>(self, sources: A) -> Result<Self::Value, A::Error> {
            Vec::deserialize(SeqAccessDeserializer::new(sources))
        }
    }
    deserializer.deserialize_any(OneOf)
}

/// Reads a list, one item that stands for a list of one, or `none` for an empty list.
pub(super) fn one_or_many<'de, D, T>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    struct OneOf<T>(std::marker::PhantomData<T>);
    impl<'de, T: Deserialize<'de>> Visitor<'de> for OneOf<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            f.write_str("a list of maps, one map, or none")
        }
        fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Vec<T>, E> {
            match text {
                "none" => Ok(Vec::new()),
                _ => Err(E::invalid_value(serde::de::Unexpected::Str(text), &self)),
            }
        }
        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Vec<T>, A::Error> {
            T::deserialize(MapAccessDeserializer::new(map)).map(|item| vec![item])
        }
        fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<T>, A::Error> {
            let mut items = Vec::new();
            while let Some(item) = seq.next_element()? {
                items.push(item);
            }
            Ok(items)
        }
    }
    deserializer.deserialize_any(OneOf(std::marker::PhantomData))
}

/// The schema of [`one_or_many`].
pub(super) struct OneOrMany<T>(std::marker::PhantomData<T>);

impl<T: JsonSchema> JsonSchema for OneOrMany<T> {
    fn schema_name() -> Cow<'static, str> {
        format!("OneOrMany{}", T::schema_name()).into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let one = generator.subschema_for::<T>();
        schemars::json_schema!({ "anyOf": [{ "type": "array", "items": one }, one, { "const": "none" }] })
    }
}
