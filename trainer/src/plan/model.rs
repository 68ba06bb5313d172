//! The model and the tokenizer of a plan.

use std::path::PathBuf;

use candle_core::DType;
use candlewick_model::{Config, LoraConfig, TiledMlp};
use candlewick_ops::{AttentionChoice, GroupedGemmImpl};
use candlewick_parallel::ActivationCheckpointing;
use candlewick_text::template::ChatTemplateSource;
use serde::{Deserialize, Serialize, Serializer};

use crate::recipe::{ActivationCheckpoint, BaseStorage, FloatDtype, HumanFloat, HumanInt, JsonMap};

/// The model of a run.
#[derive(Clone, Debug, Serialize)]
pub struct ModelPlan {
    /// A Hugging Face folder or Hub id; `None` if the recipe holds the config.
    pub name_or_path: Option<String>,
    /// The branch, tag or commit of a Hub id; `None` is `main`.
    pub revision: Option<String>,
    /// The source of the initial weights.
    pub init: WeightInit,
    /// The config with the recipe's overrides. `None` if the Hub's config is not cached: only `check` allows that.
    #[serde(serialize_with = "config_json")]
    pub config: Option<Config>,
    /// The overrides that `config` already contains.
    pub hf_config_kwargs: JsonMap,
    /// The dtype of the weights in forward and backward. `OptimizerPlan::masters` is the dtype of master weights.
    pub dtype: FloatDtype,
    /// True if the residual stream is f32.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub fp32_residual_connection: bool,
    /// LoRA, if only an adapter is trained.
    #[serde(serialize_with = "adapter_json")]
    pub adapter: Option<LoraConfig>,
    /// The adapter folder to continue from; `None` initializes a new adapter.
    pub adapter_folder: Option<PathBuf>,
    /// The storage of frozen linear weights; `None` stores them in `dtype`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantize_base: Option<BaseStorage>,
    /// The losses of the layers for multi-token prediction; `None` without such layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtp: Option<MtpPlan>,
    /// The activations that blocks save for backward.
    pub activations: CheckpointingMode,
    /// The folder to which a CPU run offloads activations.
    pub activation_offload_dir: PathBuf,
    /// True if that folder is in RAM (tmpfs), so that offloading frees no memory.
    pub offloads_to_ram: bool,
    /// True if MLPs are computed in tiles of tokens.
    pub tiled_mlp: bool,
    /// The attention implementation.
    pub attention: AttentionChoice,
    /// The implementation of the experts' matmuls on a GPU.
    pub experts_implementation: GroupedGemmImpl,
}

impl ModelPlan {
    /// Returns the setting of tiled MLPs.
    pub fn tiled_mlp(&self) -> TiledMlp {
        if self.tiled_mlp { TiledMlp::On } else { TiledMlp::Off }
    }
}

/// The training of layers for multi-token prediction (MTP).
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MtpPlan {
    /// The number of MTP layers.
    pub n_layers: usize,
    /// The coefficient of the mean of their losses.
    pub loss_scaling_factor: f64,
}

/// The source of a model's initial weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightInit {
    /// Loads the checkpoint.
    Load,
    /// Initializes randomly, as in transformers.
    Random,
}

/// The activations that blocks save for backward.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckpointingMode {
    /// All activations.
    #[serde(rename = "keep")]
    None,
    /// The blocks' inputs.
    #[serde(rename = "recompute")]
    Full,
    /// The blocks' inputs and attention's outputs.
    Selective,
    /// The blocks' inputs, offloaded to host memory or disk for this fraction of the blocks.
    Offload(f64),
    /// The input of every k-th block, and all activations of the others.
    #[serde(rename = "recompute_every")]
    EveryKth(usize),
}

impl CheckpointingMode {
    /// Returns the one of two that saves fewer activations.
    #[must_use]
    pub fn leaner(self, other: Self) -> Self {
        // The fraction of recomputed blocks, plus the fraction of offloaded inputs.
        let saving = |it| match it {
            Self::None => 0.0,
            Self::EveryKth(k) => 1.0 / k as f64,
            // Selective saves more memory than recomputing every second block, for every model shape.
            Self::Selective => 0.75,
            Self::Full => 1.0,
            Self::Offload(fraction) => 1.0 + fraction,
        };
        if saving(other) > saving(self) { other } else { self }
    }

    /// Returns the value of `model.activation_checkpoint` with this meaning.
    pub fn to_recipe(self) -> ActivationCheckpoint {
        match self {
            Self::None => ActivationCheckpoint::None,
            Self::Full => ActivationCheckpoint::Full,
            Self::Selective => ActivationCheckpoint::Selective,
            Self::Offload(fraction) if fraction >= 1.0 => ActivationCheckpoint::Offload,
            Self::Offload(fraction) => ActivationCheckpoint::OffloadFraction(HumanFloat(fraction)),
            Self::EveryKth(k) => ActivationCheckpoint::Every(HumanInt(k)),
        }
    }
}

/// The tokenizer of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TokenizerPlan {
    /// A folder or a Hub id.
    pub name_or_path: String,
    /// The branch, tag or commit of a Hub id; `None` is `main`.
    pub revision: Option<String>,
    /// A chat template that replaces the tokenizer's own.
    pub chat_template: Option<ChatTemplateSource>,
    /// Extra variables of the chat template.
    pub chat_template_kwargs: JsonMap,
}

/// Returns the candle dtype.
pub(crate) fn dtype(dtype: FloatDtype) -> DType {
    match dtype {
        FloatDtype::Bf16 => DType::BF16,
        FloatDtype::F32 => DType::F32,
        FloatDtype::F16 => DType::F16,
    }
}

/// Returns the checkpointing mode of each block. A partial offload takes the first blocks: backward reads them last.
pub(crate) fn checkpointing(activations: CheckpointingMode, n_blocks: usize) -> Vec<ActivationCheckpointing> {
    let of_block = |block_idx: usize| match activations {
        CheckpointingMode::None => ActivationCheckpointing::None,
        CheckpointingMode::Full => ActivationCheckpointing::Full,
        CheckpointingMode::Selective => ActivationCheckpointing::Selective,
        CheckpointingMode::Offload(fraction) if block_idx < (fraction * n_blocks as f64).round() as usize => {
            ActivationCheckpointing::Offload
        }
        CheckpointingMode::Offload(_) => ActivationCheckpointing::Full,
        CheckpointingMode::EveryKth(k) if block_idx.is_multiple_of(k) => ActivationCheckpointing::Full,
        CheckpointingMode::EveryKth(_) => ActivationCheckpointing::None,
    };
    (0..n_blocks).map(of_block).collect()
}

fn config_json<S: Serializer>(config: &Option<Config>, serializer: S) -> Result<S::Ok, S::Error> {
    config.as_ref().map(Config::to_json).serialize(serializer)
}

fn adapter_json<S: Serializer>(adapter: &Option<LoraConfig>, serializer: S) -> Result<S::Ok, S::Error> {
    adapter.as_ref().map(LoraConfig::to_json).serialize(serializer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_blocks_are_offloaded_and_every_kth_is_recomputed() {
        use ActivationCheckpointing::{Full, None, Offload, Selective};
        for (activations, want) in [
            (CheckpointingMode::None, [None; 5]),
            (CheckpointingMode::Full, [Full; 5]),
            (CheckpointingMode::Selective, [Selective; 5]),
            (CheckpointingMode::Offload(1.0), [Offload; 5]),
            (CheckpointingMode::Offload(0.0), [Full; 5]),
            (CheckpointingMode::Offload(0.7), [Offload, Offload, Offload, Offload, Full]),
            (CheckpointingMode::Offload(0.2), [Offload, Full, Full, Full, Full]),
            (CheckpointingMode::EveryKth(2), [Full, None, Full, None, Full]),
        ] {
            assert_eq!(checkpointing(activations, 5), want, "{activations:?}");
        }
    }
}
