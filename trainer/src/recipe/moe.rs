//! The section `moe`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::HumanFloat;

/// Mixture-of-experts settings, with the names of Megatron-LM's flags without their prefix.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MoeSection {
    /// The coefficient of each layer's load-balancing loss, which is 1 if all experts get equally many tokens. 0 turns it
    /// off. Default: `router_aux_loss_coef` of the model; 0 with LoRA.
    pub aux_loss_coeff: Option<HumanFloat>,
    /// The coefficient of each layer's z-loss, the mean square of the log-sum-exp of the router's logits. Megatron-LM's
    /// documentation suggests 1e-3. Default 0.
    pub z_loss_coeff: Option<HumanFloat>,
    /// The exchange of tokens between expert-parallel ranks: `alltoall` (default) or `allgather`. `allgather` sends less if a
    /// token selects more experts than `expert_parallel_size`.
    pub token_dispatcher_type: Option<TokenDispatcherType>,
}

/// Exchange of tokens between expert-parallel ranks, with Megatron-LM's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TokenDispatcherType {
    /// Each row travels to the ranks of its expert.
    #[default]
    AllToAll,
    /// Every rank gets all tokens.
    AllGather,
}
