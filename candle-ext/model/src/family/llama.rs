//! Llama. The other families are defined by their differences from it.

use super::{Bias, FamilySpec, QkNorm, Window};

pub(super) const SPEC: FamilySpec = FamilySpec {
    title: "Llama",
    examples: "Llama 2, Llama 3.1, Llama 3.2 1B and 3B, Llama 3.3, TinyLlama, SmolLM2, Yi",
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    hidden_size: 4096,
    intermediate_size: 11008,
    vocab_size: 32000,
    n_layers: 32,
    n_heads: 32,
    n_kv_heads: None,
    head_dim: None,
    max_positions: 2048,
    rms_norm_eps: 1e-6,
    rope_theta: 10_000.0,
    partial_rotary: None,
    bos_id: Some(1),
    eos_id: Some(2),
    qkv_bias: Bias::Key("attention_bias"),
    o_bias: Bias::Key("attention_bias"),
    mlp_bias: Bias::Key("mlp_bias"),
    qk_norm: QkNorm::None,
    qk_norm_key: None,
    window: Window::None,
    divisible_hidden: true,
    moe: None,
    upcycles_to: Some("mixtral"),
    multimodal: None,
};
