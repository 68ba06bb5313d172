//! Qwen3: q and k normalised per head instead of biased; the head size is 128 unless config.json says otherwise.

use super::{Bias, FamilySpec, QkNorm, qwen2};

pub(super) const SPEC: FamilySpec = FamilySpec {
    title: "Qwen3",
    examples: "Qwen3 0.6B to 32B",
    model_type: "qwen3",
    architecture: "Qwen3ForCausalLM",
    head_dim: Some(128),
    qkv_bias: Bias::Key("attention_bias"),
    o_bias: Bias::Key("attention_bias"),
    qk_norm: QkNorm::PerHead,
    upcycles_to: Some("qwen3_moe"),
    ..qwen2::SPEC
};
