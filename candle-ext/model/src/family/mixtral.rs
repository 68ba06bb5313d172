//! Mixtral: Mistral without a default window, whose MLPs are mixtures of 8 experts.

use super::{FamilySpec, HubExpertNames, MoeFamily, MoeLayers, SharedExpertFamily, TopKNormalization, Window, mistral};

pub(super) const SPEC: FamilySpec = FamilySpec {
    title: "Mixtral",
    examples: "Mixtral 8x7B and 8x22B",
    model_type: "mixtral",
    architecture: "MixtralForCausalLM",
    rms_norm_eps: 1e-5,
    rope_theta: 1e6,
    window: Window::IfSet,
    moe: Some(&MOE),
    ..mistral::SPEC
};

const MOE: MoeFamily = MoeFamily {
    n_experts: ("num_local_experts", 8),
    expert_size: ("intermediate_size", 14336),
    top_k: 2,
    sigmoid: false,
    normalization: TopKNormalization::Always,
    has_groups: false,
    expert_bias: false,
    shared_expert: SharedExpertFamily::None,
    layers: MoeLayers::All,
    aux_loss_coefficient: 0.001,
    names: HubExpertNames { module: "block_sparse_moe", linears: ["w1", "w3", "w2"], shared_expert: "shared_expert" },
};
