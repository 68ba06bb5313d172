//! Qwen2 and Qwen2.5: a bias on q, k and v (none on o), and a sliding window in the later layers if switched on.

use super::{Bias, FamilySpec, Window, WindowLayers, llama};

pub(super) const SPEC: FamilySpec = FamilySpec {
    title: "Qwen2",
    examples: "Qwen2, Qwen2.5, Qwen2.5-Coder, QwQ, R1-Distill-Qwen",
    model_type: "qwen2",
    architecture: "Qwen2ForCausalLM",
    intermediate_size: 22016,
    vocab_size: 151_936,
    n_kv_heads: Some(32),
    max_positions: 32768,
    bos_id: None,
    eos_id: None,
    qkv_bias: Bias::Always,
    o_bias: Bias::Never,
    mlp_bias: Bias::Never,
    window: Window::Some { window: 4096, needs_flag: true, layers: WindowLayers::From(28) },
    divisible_hidden: false,
    upcycles_to: Some("qwen2_moe"),
    ..llama::SPEC
};
