//! Qwen3-MoE: Qwen3 with 128 experts and no shared expert.

use super::{FamilySpec, MoeFamily, SharedExpertFamily, Window, WindowLayers, qwen2_moe, qwen3};

pub(super) const SPEC: FamilySpec = FamilySpec {
    title: "Qwen3-MoE",
    examples: "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
    model_type: "qwen3_moe",
    architecture: "Qwen3MoeForCausalLM",
    hidden_size: 2048,
    intermediate_size: 6144,
    n_layers: 24,
    n_heads: 32,
    n_kv_heads: Some(4),
    head_dim: None,
    window: Window::Some { window: 4096, needs_flag: true, layers: WindowLayers::All },
    moe: Some(&MOE),
    ..qwen3::SPEC
};

const MOE: MoeFamily = MoeFamily {
    n_experts: ("num_experts", 128),
    expert_size: ("moe_intermediate_size", 768),
    top_k: 8,
    shared_expert: SharedExpertFamily::None,
    ..qwen2_moe::MOE
};
