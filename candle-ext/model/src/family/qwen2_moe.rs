//! Qwen2-MoE: Qwen2 with 60 experts and a gated shared expert.

use super::{
    Bias, FamilySpec, HubExpertNames, MoeFamily, MoeLayers, SharedExpertFamily, TopKNormalization, Window,
    WindowLayers, qwen2,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    title: "Qwen2-MoE",
    examples: "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    model_type: "qwen2_moe",
    architecture: "Qwen2MoeForCausalLM",
    hidden_size: 2048,
    intermediate_size: 5632,
    n_layers: 24,
    n_heads: 16,
    n_kv_heads: Some(16),
    qkv_bias: Bias::KeyOrTrue("qkv_bias"),
    window: Window::Some { window: 4096, needs_flag: true, layers: WindowLayers::EvenBelow(28) },
    moe: Some(&MOE),
    ..qwen2::SPEC
};

pub(super) const MOE: MoeFamily = MoeFamily {
    n_experts: ("num_experts", 60),
    expert_size: ("moe_intermediate_size", 1408),
    top_k: 4,
    sigmoid: false,
    normalization: TopKNormalization::Key(false),
    has_groups: false,
    expert_bias: false,
    shared_expert: SharedExpertFamily::Gated { default: 5632 },
    layers: MoeLayers::SparseStep,
    aux_loss_coefficient: 0.001,
    names: HubExpertNames {
        module: "mlp",
        linears: ["gate_proj", "up_proj", "down_proj"],
        shared_expert: "shared_expert",
    },
};
