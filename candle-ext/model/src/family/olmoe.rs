//! OLMoE: Llama with 64 experts, and norms over all heads of queries and keys.

use super::{Bias, FamilySpec, MoeFamily, MoeLayers, QkNorm, SharedExpertFamily, llama, qwen2_moe};

pub(super) const SPEC: FamilySpec = FamilySpec {
    title: "OLMoE",
    examples: "OLMoE-1B-7B",
    model_type: "olmoe",
    architecture: "OlmoeForCausalLM",
    hidden_size: 2048,
    intermediate_size: 2048,
    vocab_size: 50304,
    n_layers: 16,
    n_heads: 16,
    max_positions: 4096,
    rms_norm_eps: 1e-5,
    bos_id: None,
    eos_id: Some(50279),
    mlp_bias: Bias::Never,
    qk_norm: QkNorm::AllHeads,
    moe: Some(&MOE),
    ..llama::SPEC
};

const MOE: MoeFamily = MoeFamily {
    n_experts: ("num_experts", 64),
    expert_size: ("intermediate_size", 2048),
    top_k: 8,
    shared_expert: SharedExpertFamily::None,
    layers: MoeLayers::All,
    aux_loss_coefficient: 0.01,
    ..qwen2_moe::MOE
};
