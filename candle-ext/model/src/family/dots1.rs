//! dots.llm1: Qwen3's attention with DeepSeek-V3's experts (sigmoid scores, groups, expert bias, shared experts).

use super::{
    FamilySpec, HubExpertNames, MoeFamily, MoeLayers, SharedExpertFamily, TopKNormalization, Window, WindowLayers,
    qwen2_moe, qwen3,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    title: "dots.llm1",
    examples: "dots.llm1",
    model_type: "dots1",
    architecture: "Dots1ForCausalLM",
    hidden_size: 4608,
    intermediate_size: 10944,
    vocab_size: 152_064,
    n_layers: 62,
    n_heads: 32,
    n_kv_heads: Some(32),
    head_dim: None,
    max_positions: 2048,
    window: Window::Some { window: 4096, needs_flag: false, layers: WindowLayers::From(62) },
    moe: Some(&MOE),
    ..qwen3::SPEC
};

pub(super) const MOE: MoeFamily = MoeFamily {
    n_experts: ("n_routed_experts", 128),
    expert_size: ("moe_intermediate_size", 1408),
    top_k: 6,
    sigmoid: true,
    normalization: TopKNormalization::Key(false),
    has_groups: true,
    expert_bias: true,
    shared_expert: SharedExpertFamily::Plain { default: 0 },
    layers: MoeLayers::FirstDense { default: 0 },
    aux_loss_coefficient: 0.0,
    names: HubExpertNames { shared_expert: "shared_experts", ..qwen2_moe::MOE.names },
};
