//! The `data` section.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer, StrDeserializer};
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize as DeriveDeserialize, Serialize};

use super::model::JsonMap;
use super::number::{HumanFloat, HumanInt};
use crate::data::{RowOrder, Truncation, UnrenderedToolCalls};

/// What is trained and evaluated on.
#[derive(Clone, Debug, Default, PartialEq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DataSection {
    /// Default: that of the run's `type`.
    #[serde(rename = "type")]
    pub kind: Option<DataType>,
    /// The training data: a name (`name`, `name:split`, `name:split[10:20]`), a map, or a list of them.
    #[serde(deserialize_with = "one_source_or_many")]
    #[schemars(with = "DataSourcesSchema")]
    pub sources: Vec<DataSource>,
    /// The evaluation data. Needs `eval_interval`.
    #[serde(deserialize_with = "one_source_or_many")]
    #[schemars(with = "DataSourcesSchema")]
    pub eval_sources: Vec<DataSource>,
    /// How much of `sources` is trained on and how much is held out for evaluation; sums to 1. Excludes
    /// `eval_sources`. Default `[1.0, 0.0]`.
    pub train_eval_split: Option<(HumanFloat, HumanFloat)>,
    /// The longest row in tokens. Default: the model config's `max_position_embeddings`.
    pub max_length: Option<HumanInt>,
    /// The handling of samples longer than `max_length`: `error` (the run is refused with the three longest; default
    /// of `sft`), `truncate`, `drop` or `split` (into samples of `max_length`; default of `causal`). Packed causal data
    /// are always split.
    pub truncation: Option<Truncation>,
    /// ArcticTraining's spelling: an explicit `true` is `truncation: drop`.
    pub filter_samples: Option<bool>,
    /// The order of an epoch: `shuffle` (default; a new permutation every epoch, from `data.seed`), `sequential`, or
    /// `longest_first` (shuffled, but the longest rows come first, so that a run that does not fit fails at once).
    pub order: Option<RowOrder>,
    /// Puts several samples into one row, which do not see each other. Default false for `sft`, true for `causal`.
    pub pack_samples: Option<bool>,
    /// Packs rows of exactly `max_length`: samples are cut where a row ends and go on in the next one.
    pub always_max_length: Option<bool>,
    /// Drops what does not fill the last row or the last step of an epoch.
    pub drop_last: Option<bool>,
    /// The probability that a pack's samples are read as one sequence, for long-context distillation. Default 0.
    pub fuse_positions_prob: Option<HumanFloat>,
    /// Not implemented yet.
    pub repeat_to_pack_max_length: Option<bool>,
    /// Learns from the assistant's tokens only. Default true.
    pub mask_inputs: Option<bool>,
    /// Does not learn from an empty `<think></think>` at the start of an assistant's turn. Default false.
    pub ignore_empty_think: Option<bool>,
    /// Learns to write an empty answer where the data have one. Default false: such a turn is not learned.
    pub train_on_empty_answers: Option<bool>,
    /// The handling of rows with tool calls that the chat template does not render: `error` (default: the run is
    /// refused with their number and the first row), `drop` (the rows are left out) or `mask` (the rows stay, and these
    /// turns are not learned).
    pub unrendered_tool_calls: Option<UnrenderedToolCalls>,
    /// Puts BOS before a text that no chat template renders (`type: causal`). Default: as the tokenizer adds it.
    pub add_bos_token: Option<bool>,
    /// Puts EOS after a text that no chat template renders (`type: causal`); it separates documents. Default true.
    pub add_eos_token: Option<bool>,
    /// What rows are padded to: `none` (default: rows are not padded, attention reads each at its own length),
    /// `div_length` or `max_length`. Setting `div_length` implies it.
    pub pad_to: Option<PadTo>,
    /// Rows are padded to a multiple of this. Default 256 where `pad_to: div_length` is asked.
    pub div_length: Option<HumanInt>,
    /// Threads that tokenise. Default: 16, or as many as there are cores if fewer.
    pub num_proc: Option<HumanInt>,
    /// ArcticTraining's loader processes. Accepted; a batch is made from mapped tokens in the step itself.
    pub dl_num_workers: Option<HumanInt>,
    /// Seeds the split, the shuffle and the packing. Default 42.
    pub seed: Option<HumanInt>,
    /// The folder that keeps tokens between runs. Default `$XDG_CACHE_HOME/candlewick/tokens`, or below `~/.cache`.
    pub cache_dir: Option<String>,
    /// Accepted; `auto`, `local` and `shared` are the same to one process.
    pub cache_fs_type: Option<CacheFsType>,
    /// Refuses to tokenise: the tokens must be in the cache already. Default false.
    pub fail_on_missing_cache: Option<bool>,
    /// Deprecated in ArcticTraining, where it has no effect; neither here.
    pub use_data_cache: Option<bool>,
    /// Deprecated in ArcticTraining, where it has no effect; neither here.
    pub cache_processed_data: Option<bool>,
    /// Of `type: dpo`. Not implemented yet.
    pub max_prompt_length: Option<HumanInt>,
    /// Of `type: dpo`. Not implemented yet.
    pub dpo_prompt_truncation_mode: Option<String>,
}

/// Names of data factories.
#[derive(Clone, Copy, Debug, PartialEq, Eq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DataType {
    /// Conversations.
    Sft,
    /// Plain text.
    Causal,
    /// Preferences. Not implemented yet.
    Dpo,
}

/// What rows are padded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PadTo {
    /// Nothing.
    None,
    /// A multiple of `div_length`.
    DivLength,
    /// `max_length`.
    MaxLength,
}

/// Kinds of file systems.
#[derive(Clone, Copy, Debug, PartialEq, Eq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CacheFsType {
    /// Detected.
    Auto,
    /// One machine's.
    Local,
    /// Several machines'.
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
    /// With its options.
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
    /// `huggingface`, `huggingface_instruct` (default of `sft`) or `huggingface_causal` (default of `causal`), for local
    /// files and the Hub alike. `snowflake` is not implemented yet.
    #[serde(rename = "type")]
    pub kind: Option<SourceType>,
    /// A json, jsonl, parquet, csv or txt file, a folder of them, or a Hub id; `:split` or `:split[10:20]` may follow.
    pub name_or_path: Option<String>,
    /// The branch, tag or commit of a Hub id. Default `main`.
    pub revision: Option<String>,
    /// The split. Default `train` (`eval` in `eval_sources`).
    pub split: Option<String>,
    /// The row format: `messages`, `sharegpt`, `alpaca`, `prompt_completion` or `text`. Default: detected.
    pub format: Option<String>,
    /// Uses this share of the rows, drawn with `sample_seed`.
    pub sample_ratio: Option<HumanFloat>,
    /// Uses this many rows, drawn with `sample_seed`.
    pub sample_count: Option<HumanInt>,
    /// Seeds the draw. Default 42.
    pub sample_seed: Option<HumanInt>,
    /// `false` reads rows that are tokenised already. Not implemented yet.
    pub process: Option<bool>,
    /// Arguments of `datasets.load_dataset`: `name` (as `subset`), `data_files` (patterns, or a map from splits to them;
    /// with `name_or_path: json`, `csv`, `parquet` or `text` they are paths of their own), `field` (json), `sample_by`
    /// (text: line, paragraph or document; default document with `type: causal`, else line), `delimiter` or `sep` (csv). `verification_mode`, `trust_remote_code`,
    /// `num_proc` and `keep_in_memory` change nothing here.
    pub kwargs: JsonMap,
    /// Split names by their usual names: `{train: train_sft}`.
    pub split_mapping: StringPairs,
    /// The configuration of a data set that has several (`main` of gsm8k); `kwargs.name` is its name in ArcticTraining.
    pub subset: Option<String>,
    /// Role to column (`user: question`), or role to a path (`user: messages.role.user`), in the order of a chat.
    pub role_mapping: StringPairs,
    /// The key of a message's text. Default: the first of content, text, message, value.
    pub content_key: Option<String>,
    /// The column of a plain text. Default `text`.
    pub column: Option<String>,
    /// Of `type: snowflake`. Not implemented yet.
    pub sql: Option<String>,
    /// Of `type: snowflake`. Not implemented yet.
    pub table_name: Option<String>,
    /// Of `type: snowflake`. Not implemented yet.
    pub dataset_uri: Option<String>,
    /// Of `type: snowflake`. Not implemented yet.
    pub column_mapping: StringPairs,
    /// Of `type: snowflake`. Not implemented yet.
    pub limit: Option<HumanInt>,
    /// Of `type: snowflake`. Not implemented yet.
    pub batch_size: Option<HumanInt>,
}

/// A map of texts, in the order of writing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(with = "std::collections::BTreeMap<String, String>")]
pub struct StringPairs(pub Vec<(String, String)>);

/// Names of source types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SourceType {
    /// Rows as they are.
    Huggingface,
    /// Conversations.
    HuggingfaceInstruct,
    /// Plain text.
    HuggingfaceCausal,
    /// A warehouse. Not implemented yet.
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
