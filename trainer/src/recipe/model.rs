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
    /// The source of the model: `huggingface` (default) and `liger` load `name_or_path`, with the same fused kernels.
    /// `random-weight-hf` loads only its config and initializes the weights randomly.
    #[serde(rename = "type")]
    pub kind: Option<ModelType>,
    /// A Hugging Face folder or Hub id. Required unless `config` is set.
    pub name_or_path: Option<String>,
    /// The branch, tag or commit of a Hub id. Default `main`.
    pub revision: Option<String>,
    /// A Hugging Face config (a map, or the path of a `config.json`) that builds the model instead of a checkpoint. The
    /// weights are initialized randomly as in transformers, from `seed`.
    pub config: Option<ConfigSource>,
    /// The dtype of the weights in forward and backward: `bf16` (default), `f32` or `fp16`, with ArcticTraining's aliases
    /// (`bfloat16`, `torch.bfloat16`, `float`, `half`, ...). Master weights and gradients are f32, unless
    /// `deepspeed.bf16` sets bf16. `fp16` uses the loss scaling of `deepspeed.fp16`, with DeepSpeed's defaults.
    /// With `f32`, `deepspeed.torch_autocast` sets a 16-bit dtype of matmuls.
    pub dtype: Option<FloatDtype>,
    /// Keeps the residual stream in f32 while the layers compute in `dtype`, with Megatron-LM's name: the embeddings are
    /// converted to f32, and outputs of attention and MLPs are added in f32. Needs `dtype: bf16` or `fp16`. Default false.
    pub fp32_residual_connection: Option<bool>,
    /// The name of the saved model, a folder in `output_dir` of each checkpoint of type `huggingface`. Default: none, the
    /// models are in `output_dir` itself.
    pub save_name: Option<String>,
    /// The attention implementation: `auto`, `cudnn`, `fused` (Candlewick's kernels) or `reference` (plain tensor
    /// operations with all scores in memory, for tests). Default `auto`: cuDNN on a GPU if it is installed and supports
    /// the case, else `fused`. Of transformers' names, `sdpa`, `flash_attention_2` and `flash_attention_3` are `auto` and
    /// `eager` is `reference`. Results differ by rounding only.
    pub attn_implementation: Option<AttnImplementation>,
    /// The implementation of the experts' matmuls on a GPU: `fused` (default; Candlewick's kernels), `cutlass`
    /// (CUTLASS's grouped GEMM, in bf16 on Hopper, with the tiles of scripts/build-cutlass) or `cublas` (cuBLASLt's grouped GEMM, in
    /// 16-bit dtypes: Hopper with cuBLAS 13.4 or newer, Blackwell with 13.3 or newer). `auto` is `cutlass` in cases in which it
    /// was measured to be faster, else `fused`. Results differ by rounding only. `cutlass` has not run on a GPU yet.
    pub experts_implementation: Option<ExpertsImplementation>,
    /// `true` makes attention bit-reproducible. Default `false`. Only cuDNN's backward is nondeterministic: with `true`,
    /// `auto` selects `fused`, and `cudnn` needs memory quadratic in the sequence length on Hopper.
    pub attn_deterministic: Option<bool>,
    /// Activation checkpointing. `none` (default; ArcticTraining's default is `full`) saves all activations and is
    /// fastest. `full` saves each block's input and recomputes the block in backward. `selective` also saves attention's
    /// output, which is then not recomputed. `offload` is `full` with the inputs offloaded: by a GPU to host memory, by
    /// the CPU to unlinked files in `TMPDIR`. `{offload: 0.7}` offloads the inputs of the first 70% of the blocks.
    /// `{every: k}` recomputes every k-th block only.
    pub activation_checkpoint: Option<ActivationCheckpoint>,
    /// ArcticTraining's key: `true` is `activation_checkpoint: none`, `false` is `full`. Default: unset.
    pub disable_activation_checkpoint: Option<bool>,
    /// A PEFT LoRA config: `peft_type: LORA`, `r`, `lora_alpha`, `target_modules` (names or `all-linear`),
    /// `target_parameters` (such as `mlp.experts.gate_up_proj`), ... It trains only the adapter. Default: trains all weights.
    pub peft_config: Option<JsonMap>,
    /// The folder of an adapter to continue training. It has its own config and excludes `peft_config`.
    pub adapter_name_or_path: Option<String>,
    /// The storage of the frozen weights of linear layers and experts in a LoRA run, with torchtune's name: `fp8` (E4M3 with a
    /// scale per 128x128 elements, a byte per weight). Default: `model.dtype`. Adapters, biases, norms, routers, embedding and
    /// output layer stay in `model.dtype`.
    pub quantize_base: Option<BaseStorage>,
    /// The number of layers for multi-token prediction (MTP) after the last layer, as DeepSeek-V3's
    /// `num_nextn_predict_layers`. Layer k learns to predict each token k positions further. Layers that the checkpoint
    /// lacks are initialized randomly. Default 0: MTP layers of the checkpoint are neither loaded nor exported.
    pub mtp_num_layers: Option<HumanInt>,
    /// The coefficient of the mean loss of the MTP layers. Default 0.1, as in Megatron-LM.
    pub mtp_loss_scaling_factor: Option<HumanFloat>,
    /// Overrides of the model's config.json. An override that changes parameter shapes, such as `num_hidden_layers`,
    /// initializes the weights randomly instead of loading them, as in ArcticTraining.
    pub hf_config_kwargs: JsonMap,
}

/// The source of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ModelType {
    /// From a checkpoint.
    Huggingface,
    /// From a checkpoint. In ArcticTraining it selects Liger kernels.
    Liger,
    /// From a config, with random weights.
    RandomWeightHf,
}

/// A floating-point dtype.
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

/// A storage of frozen weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum BaseStorage {
    /// E4M3 with a scale per 128x128 elements.
    Fp8,
}

/// The attention implementation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AttnImplementation {
    /// cuDNN if it is installed and supports the case, else `fused`.
    #[serde(alias = "sdpa", alias = "flash_attention_2", alias = "flash_attention_3")]
    Auto,
    /// cuDNN.
    Cudnn,
    /// Candlewick's kernels.
    Fused,
    /// Plain tensor operations with all scores in memory.
    #[serde(alias = "eager")]
    Reference,
}

/// The implementation of the experts' matmuls on a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ExpertsImplementation {
    /// CUTLASS in cases in which it was measured to be faster, else Candlewick's kernels.
    Auto,
    /// Candlewick's kernels.
    #[default]
    Fused,
    /// cuBLASLt's grouped GEMM.
    Cublas,
    /// CUTLASS's grouped GEMM.
    Cutlass,
}

/// A model config: a map in the recipe, or the path of a config.json.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum ConfigSource {
    /// The path of a config.json.
    Path(String),
    /// The config itself.
    Inline(JsonMap),
}

/// The activations that blocks save for backward.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationCheckpoint {
    /// All activations.
    None,
    /// The blocks' inputs.
    Full,
    /// The blocks' inputs and attention's outputs.
    Selective,
    /// The blocks' inputs, all offloaded.
    Offload,
    /// The blocks' inputs, offloaded for this fraction of the blocks.
    #[serde(rename = "offload")]
    OffloadFraction(HumanFloat),
    /// The input of every k-th block, and all activations of the others.
    Every(HumanInt),
}

/// The tokenizer and its chat template.
#[derive(Clone, Debug, Default, PartialEq, DeriveDeserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TokenizerSection {
    /// The tokenizer type. Only `huggingface` exists.
    #[serde(rename = "type")]
    pub kind: Option<TokenizerType>,
    /// A folder or a Hub id. Default: `model.name_or_path`.
    pub name_or_path: Option<String>,
    /// The branch, tag or commit of a Hub id. Default `main`.
    pub revision: Option<String>,
    /// A chat template: a built-in one (`chatml`, `qwen2.5`, `qwen3`, `llama3`, `mistral`, `gemma`, `llama2`, `zephyr`, `vicuna`,
    /// `alpaca`), the path of a Jinja file, or the template itself (recognized by `{`). Default: the tokenizer's own.
    pub chat_template: Option<String>,
    /// Extra variables of the chat template, such as `enable_thinking: false`. Default: none.
    pub chat_template_kwargs: JsonMap,
    /// Arguments of ArcticTraining's tokenizer call for `type: causal`: `truncation: true` with `max_length` cuts each text
    /// after that number of tokens, without BOS and EOS. `add_special_tokens: false`, `padding: false`, `verbose` and
    /// `return_*` keep the defaults. Default: none.
    pub tokenize_kwargs: JsonMap,
}

/// The tokenizer type.
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
                f.write_str("none, full, selective, offload, {offload: fraction} or {every: k}")
            }
            fn visit_str<E: de::Error>(self, name: &str) -> Result<ActivationCheckpoint, E> {
                match name {
                    "none" => Ok(ActivationCheckpoint::None),
                    "full" => Ok(ActivationCheckpoint::Full),
                    "selective" => Ok(ActivationCheckpoint::Selective),
                    "offload" => Ok(ActivationCheckpoint::Offload),
                    _ => Err(E::unknown_variant(
                        name,
                        &["none", "full", "selective", "offload", "{offload: fraction}", "{every: k}"],
                    )),
                }
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ActivationCheckpoint, A::Error> {
                match Numbers::deserialize(MapAccessDeserializer::new(map))? {
                    Numbers { every: Some(k), offload: None } => Ok(ActivationCheckpoint::Every(k)),
                    Numbers { every: None, offload: Some(fraction) } => {
                        Ok(ActivationCheckpoint::OffloadFraction(fraction))
                    }
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
        let every = "Recomputes every k-th block only, and saves all activations of the others.";
        let mut offload = generator.subschema_for::<HumanFloat>();
        offload.insert("description".into(), "The fraction of the blocks whose inputs are offloaded.".into());
        json_schema!({
            "description": "The activations that blocks save for backward.",
            "anyOf": [
                { "enum": ["none", "full", "selective", "offload"] },
                {
                    "type": "object",
                    "properties": { "every": { "type": "integer", "minimum": 1, "description": every } },
                    "required": ["every"],
                    "additionalProperties": false
                },
                {
                    "type": "object",
                    "properties": { "offload": offload },
                    "required": ["offload"],
                    "additionalProperties": false
                }
            ]
        })
    }
}
