//! Mistral: Llama without biases and with a sliding window in every layer.

use super::{Bias, FamilySpec, Window, llama};

pub(super) const SPEC: FamilySpec = FamilySpec {
    title: "Mistral",
    examples: "Mistral 7B, Mistral Nemo, Mistral Small 3 (2501)",
    model_type: "mistral",
    architecture: "MistralForCausalLM",
    intermediate_size: 14336,
    n_kv_heads: Some(8),
    max_positions: 4096 * 32,
    qkv_bias: Bias::Never,
    o_bias: Bias::Never,
    mlp_bias: Bias::Never,
    window: Window::Every(4096),
    divisible_hidden: false,
    ..llama::SPEC
};
