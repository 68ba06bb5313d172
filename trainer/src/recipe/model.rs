//! The `model` and `tokenizer` sections.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};
use serde::{Deserialize as DeriveDeserialize, Serialize};

use super::number::{HumanFloat, HumanInt};

/// A map whose keys belong to another program's schema.
pub type JsonMap = serde_json::Map<String, serde_json::Value>;

/// The model that is trained.
#[derive(Clone, Debug, Default, PartialEq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ModelSection {
    /// How the model is made: `huggingface` (default) and `liger` both load `name_or_path`, with the same fused ops;
    /// `random-weight-hf` takes only its config and draws the weights.
    #[serde(rename = "type")]
    pub kind: Option<ModelType>,
    /// A Hugging Face folder or Hub id. Optional if `config` is given.
    pub name_or_path: Option<String>,
    /// The branch, tag or commit of a Hub id. Default `main`.
    pub revision: Option<String>,
    /// Builds the model from a Hugging Face config instead of a checkpoint: either the map itself or the path of a
    /// `config.json`. The weights are drawn as transformers draws them, from `seed`.
    pub config: Option<ConfigSource>,
    /// The number format of the weights in forward and backward: `bf16` (default), `f32` or `fp16`, with the aliases of
    /// ArcticTraining (`bfloat16`, `torch.bfloat16`, `float`, `half`, ...). The optimizer's master weights and the
    /// gradients are always f32. `fp16` scales losses as `deepspeed.fp16` says, by default as DeepSpeed does.
    pub dtype: Option<FloatDtype>,
    /// The name that ArcticTraining gives a saved model. Not implemented yet: the folder is named by
    /// `checkpoint.output_dir`.
    pub save_name: Option<String>,
    /// What computes attention: `auto` (default: cuDNN on a GPU where it is there and takes the case, else `fused`),
    /// `cudnn`, `fused` (our kernels) or `reference` (plain tensor operations with all scores in memory, to compare
    /// with). transformers' names: `sdpa`, `flash_attention_2` and `flash_attention_3` are `auto`, `eager` is `reference`.
    /// All compute the same but for rounding.
    pub attn_implementation: Option<AttnImplementation>,
    /// Whether attention gives the same bits twice. Default `false`. Only cuDNN's backward does not by itself: `auto`
    /// then takes `fused`, and `cudnn` takes memory that grows with the square of the length on Hopper.
    pub attn_deterministic: Option<bool>,
    /// What blocks keep for backward: `none` (no checkpointing: everything is kept, fastest), `full` (only each
    /// block's input; forward runs again), `selective` (attention's output, too, which is not computed again), `offload` (as `full`, inputs parked: in the host's memory by a GPU, in
    /// unlinked files in `TMPDIR` by the CPU), `{offload: 0.7}` (parks those of this share of the blocks, the first
    /// ones, and keeps the others' in memory) or `{every: k}` (recompute every k-th block, keep the others). Unset is `none`, unlike ArcticTraining, whose default is `full`:
    /// a model that fits should not pay for memory it does not need.
    pub activation_checkpoint: Option<ActivationCheckpoint>,
    /// ArcticTraining's spelling: `true` is `activation_checkpoint: none`, an explicit `false` is `full`.
    pub disable_activation_checkpoint: Option<bool>,
    /// A PEFT LoRA config: `peft_type: LORA`, `r`, `lora_alpha`, `target_modules` (names or `all-linear`), ... Only the
    /// adapter is trained.
    pub peft_config: Option<JsonMap>,
    /// An adapter folder to go on from: its own config says what is trained, so `peft_config` stays away.
    pub adapter_name_or_path: Option<String>,
    /// Overrides of the model's config.json. Changing `num_hidden_layers` draws the weights anew instead of loading
    /// them, as ArcticTraining does.
    pub hf_config_kwargs: JsonMap,
}

/// How a model is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ModelType {
    /// From a checkpoint.
    Huggingface,
    /// From a checkpoint; the name of ArcticTraining's fused kernels.
    Liger,
    /// From a config, with random weights.
    RandomWeightHf,
}

/// A number format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, DeriveDeserialize, Serialize, JsonSchema)]
pub enum FloatDtype {
    /// bfloat16.
    #[serde(rename = "bf16", alias = "bfloat16", alias = "bfloat", alias = "torch.bfloat16")]
    Bf16,
    /// IEEE single precision.
    #[serde(rename = "f32", alias = "fp32", alias = "float32", alias = "float", alias = "torch.float32")]
    F32,
    /// IEEE half precision.
    #[serde(rename = "f16", alias = "fp16", alias = "float16", alias = "half", alias = "torch.float16")]
    F16,
}

/// What computes attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AttnImplementation {
    /// cuDNN where it is there and takes the case, else our kernels.
    #[serde(alias = "sdpa", alias = "flash_attention_2", alias = "flash_attention_3")]
    Auto,
    /// cuDNN.
    Cudnn,
    /// Our kernels.
    Fused,
    /// Plain tensor operations with all scores in memory.
    #[serde(alias = "eager")]
    Reference,
}

/// A config written into the recipe, or the path of one.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum ConfigSource {
    /// The path of a config.json.
    Path(String),
    /// The config itself.
    Inline(JsonMap),
}

/// What blocks keep between forward and backward.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationCheckpoint {
    /// Everything.
    None,
    /// Their inputs.
    Full,
    /// Their inputs and attention's outputs.
    Selective,
    /// Their inputs, parked outside of the memory that computes.
    Offload,
    /// Their inputs, those of this share of the blocks parked.
    #[serde(rename = "offload")]
    OffloadShare(HumanFloat),
    /// Every k-th block its input, the others everything.
    Every(HumanInt),
}

/// The tokenizer and its chat template.
#[derive(Clone, Debug, Default, PartialEq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TokenizerSection {
    /// `huggingface`, the only one.
    #[serde(rename = "type")]
    pub kind: Option<TokenizerType>,
    /// A folder or a Hub id. Default: the model's.
    pub name_or_path: Option<String>,
    /// The branch, tag or commit of a Hub id. Default `main`.
    pub revision: Option<String>,
    /// A Jinja chat template that replaces the tokenizer's own: the path of a file, or the template itself (a text with
    /// `{` in it).
    pub chat_template: Option<String>,
    /// Extra variables of the chat template, such as `enable_thinking: false`.
    pub chat_template_kwargs: JsonMap,
    /// Arguments of ArcticTraining's tokenizer call. Not implemented yet.
    pub tokenize_kwargs: JsonMap,
}

/// Names of tokenizer factories.
#[derive(Clone, Copy, Debug, PartialEq, Eq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TokenizerType {
    /// tokenizer.json.
    Huggingface,
}

impl FloatDtype {
    /// Returns the bytes of an element.
    pub fn n_bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

impl<'de> Deserialize<'de> for ConfigSource {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOf;
        impl<'de> Visitor<'de> for OneOf {
            type Value = ConfigSource;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a map (the config itself) or the path of a config.json")
            }
            fn visit_str<E>(self, path: &str) -> Result<ConfigSource, E> {
                Ok(ConfigSource::Path(path.to_owned()))
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ConfigSource, A::Error> {
                JsonMap::deserialize(MapAccessDeserializer::new(map)).map(ConfigSource::Inline)
            }
        }
        deserializer.deserialize_any(OneOf)
    }
}

impl JsonSchema for ConfigSource {
    fn schema_name() -> Cow<'static, str> {
        "ConfigSource".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "A Hugging Face config as a map, or the path of a config.json.",
            "anyOf": [{ "type": "string" }, { "type": "object", "additionalProperties": true }]
        })
    }
}

#[derive(DeriveDeserialize)]
#[serde(deny_unknown_fields)]
struct Numbers {
    every: Option<HumanInt>,
    offload: Option<HumanFloat>,
}

impl<'de> Deserialize<'de> for ActivationCheckpoint {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOf;
        impl<'de> Visitor<'de> for OneOf {
            type Value = ActivationCheckpoint;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("none, full, selective, offload, {offload: share} or {every: k}")
            }
            fn visit_str<E: de::Error>(self, name: &str) -> Result<ActivationCheckpoint, E> {
                match name {
                    "none" => Ok(ActivationCheckpoint::None),
                    "full" => Ok(ActivationCheckpoint::Full),
                    "selective" => Ok(ActivationCheckpoint::Selective),
                    "offload" => Ok(ActivationCheckpoint::Offload),
                    _ => Err(E::unknown_variant(
                        name,
                        &["none", "full", "selective", "offload", "{offload: share}", "{every: k}"],
                    )),
                }
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ActivationCheckpoint, A::Error> {
                match Numbers::deserialize(MapAccessDeserializer::new(map))? {
                    Numbers { every: Some(k), offload: None } => Ok(ActivationCheckpoint::Every(k)),
                    Numbers { every: None, offload: Some(share) } => Ok(ActivationCheckpoint::OffloadShare(share)),
                    _ => Err(de::Error::custom("expected one of the keys `every` and `offload`")),
                }
            }
        }
        deserializer.deserialize_any(OneOf)
    }
}

impl JsonSchema for ActivationCheckpoint {
    fn schema_name() -> Cow<'static, str> {
        "ActivationCheckpoint".into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "What blocks keep for backward.",
            "anyOf": [
                { "enum": ["none", "full", "selective", "offload"] },
                {
                    "type": "object",
                    "properties": { "every": { "type": "integer", "minimum": 1 } },
                    "required": ["every"],
                    "additionalProperties": false
                },
                {
                    "type": "object",
                    "properties": { "offload": generator.subschema_for::<HumanFloat>() },
                    "required": ["offload"],
                    "additionalProperties": false
                }
            ]
        })
    }
}
