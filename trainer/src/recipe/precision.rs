//! The section `precision`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{HumanFloat, HumanInt};

/// FP8 training, with the names of Megatron-LM's flags without their prefix. The linear layers and the routed
/// experts of decoder layers multiply in FP8; embedding, output layer, routers, norms and attention stay in `model.dtype`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PrecisionSection {
    /// The recipe of the scales, as in TransformerEngine: `delayed` (from the largest magnitudes, amaxes, of earlier steps),
    /// `current` (from each tensor's own amax) or `blockwise` (from the amax of each block of 1x128, or 128x128 of a weight).
    /// Default `none`: no FP8.
    pub recipe: Option<PrecisionRecipe>,
    /// The formats: `hybrid` (E4M3, and E5M2 for gradients of outputs) or `e4m3`. Default `hybrid`; `e4m3` with `blockwise`.
    pub format: Option<Fp8FormatName>,
    /// `delayed`: divides scales by 2^margin. Default 0.
    pub margin: Option<HumanInt>,
    /// `delayed`: the number of steps whose amaxes are kept. Default 1024.
    pub amax_history_len: Option<HumanInt>,
    /// `delayed`: the amax of the history that decides the scale: `max` (default) or `most_recent`.
    pub amax_compute_algo: Option<AmaxComputeAlgo>,
    /// `current` and `blockwise`: rounds scales down to powers of two. Default false with `current`, true with `blockwise`.
    pub power_of_two_scales: Option<bool>,
    /// `current` and `blockwise`: smaller amaxes count as this one. Default 0.
    pub amax_epsilon: Option<HumanFloat>,
    /// The rounding of the gradients of outputs to FP8: `nearest` (default) or `stochastic`.
    pub gradient_rounding: Option<GradientRounding>,
    /// Keeps the first and the last decoder layers in `model.dtype`. Default false.
    pub first_last_layers_bf16: Option<bool>,
    /// The number of first layers that `first_last_layers_bf16` keeps. Default 1.
    pub num_layers_at_start_in_bf16: Option<HumanInt>,
    /// The number of last layers that `first_last_layers_bf16` keeps. Default 1.
    pub num_layers_at_end_in_bf16: Option<HumanInt>,
    /// With ZeRO stage 3 and `delayed` or `current`: gathers weights that multiply in FP8 as codes of a byte, not in
    /// `model.dtype`. No result changes. torchtitan's name is `enable_fsdp_float8_all_gather`. Default false.
    pub fp8_param_gather: Option<bool>,
    /// The number of steps between statistics of all quantized tensors in metrics.jsonl, as TransformerEngine's debug feature
    /// `LogFp8TensorStats`: amax, underflows, overflows and mean squared error. Such a step takes longer. Default 0: none.
    pub stats_interval: Option<HumanInt>,
    /// The modules that have statistics: those whose names contain one of these texts, as in `exclude_modules`. Default: all.
    pub stats_modules: Option<Vec<String>>,
    /// The tensors that have statistics: of `input`, `weight` and `grad_output`. TransformerEngine's names are `activation`,
    /// `weight` and `gradient`. Default: all.
    pub stats_tensors: Option<Vec<Fp8TensorName>>,
    /// Measures at the start of the run which linear layers are faster in FP8 on rank 0's device, with the time of
    /// quantization, and keeps the others in `model.dtype`. `trainer fp8-advise` prints the measurement. Default false.
    pub exclude_slower_modules: Option<bool>,
    /// Rounds the operands of linear layers to FP8 but multiplies them in `model.dtype`, on any device, as TransformerEngine's debug
    /// feature `FakeQuant`. Scales are powers of two. It shows the effect of FP8 on the loss without a GPU for FP8. Default false.
    pub fake_quantize: Option<bool>,
    /// Multiplies routed experts in FP8, too. Their codes are multiplied in `model.dtype`, so they gain no speed. Default true
    /// on a CPU, false on a GPU, where FP8 makes them slower.
    pub quantize_experts: Option<bool>,
    /// Keeps the linear layers and routed experts whose names contain one of these texts in `model.dtype`:
    /// `[o_proj, layers.3.mlp, experts]`. torchtitan's name is `filter_fqns`. Default: none.
    pub exclude_modules: Option<Vec<String>>,
}

/// A recipe of FP8 scales.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PrecisionRecipe {
    /// No FP8.
    #[default]
    None,
    /// Delayed scaling.
    Delayed,
    /// Current scaling; Megatron-LM's name is `tensorwise`.
    #[serde(alias = "tensorwise")]
    Current,
    /// Blockwise scaling.
    Blockwise,
}

/// FP8 formats of inputs, weights and gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Fp8FormatName {
    /// E4M3, and E5M2 for gradients of outputs.
    Hybrid,
    /// E4M3.
    E4m3,
}

/// A tensor that a linear layer quantizes to FP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Fp8TensorName {
    /// The input.
    #[serde(alias = "activation")]
    Input,
    /// The weight.
    Weight,
    /// The gradient of the output.
    #[serde(alias = "gradient")]
    GradOutput,
}

impl Fp8TensorName {
    /// All tensors.
    pub const ALL: [Self; 3] = [Self::Input, Self::Weight, Self::GradOutput];
}

/// The amax of a history that decides a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AmaxComputeAlgo {
    /// The largest.
    Max,
    /// That of the last step.
    MostRecent,
}

/// A rounding of gradients to FP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum GradientRounding {
    /// To the nearest number.
    Nearest,
    /// Up or down at random, with the right mean.
    Stochastic,
}
