//! GLM-4.5 and GLM-4.6: half of each head is rotated, biases on q, k and v, and DeepSeek-V3's experts.
//!
//! transformers ignores the layer for multi-token prediction after the last decoder layer, and so does this crate.

use super::{Bias, FamilySpec, MoeFamily, MoeLayers, QkNorm, SharedExpertFamily, TopKNormalization, dots1, llama};

pub(super) const SPEC: FamilySpec = FamilySpec {
    title: "GLM-4.5",
    examples: "GLM-4.5, GLM-4.5-Air, GLM-4.6",
    model_type: "glm4_moe",
    architecture: "Glm4MoeForCausalLM",
    intermediate_size: 10944,
    vocab_size: 151_552,
    n_layers: 46,
    n_heads: 96,
    n_kv_heads: Some(8),
    max_positions: 131_072,
    rms_norm_eps: 1e-5,
    partial_rotary: Some(0.5),
    bos_id: None,
    eos_id: None,
    o_bias: Bias::Never,
    mlp_bias: Bias::Never,
    qk_norm: QkNorm::PerHead,
    qk_norm_key: Some("use_qk_norm"),
    divisible_hidden: false,
    moe: Some(&MOE),
    ..llama::SPEC
};

const MOE: MoeFamily = MoeFamily {
    top_k: 8,
    normalization: TopKNormalization::Key(true),
    shared_expert: SharedExpertFamily::Plain { default: 1 },
    layers: MoeLayers::FirstDense { default: 1 },
    ..dots1::MOE
};
