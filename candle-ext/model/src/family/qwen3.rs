//! Qwen3: q and k normalised per head instead of biased; the head size is 128 unless config.json says otherwise.

use super::{Bias, Traits, qwen2::QWEN2};

pub(super) const QWEN3: Traits = Traits {
    model_type: "qwen3",
    architecture: "Qwen3ForCausalLM",
    head_dim: Some(128),
    qkv_bias: Bias::Key("attention_bias"),
    o_bias: Bias::Key("attention_bias"),
    qk_norm: true,
    ..QWEN2
};
