//! The section `moe`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{HumanFloat, OneOrMany};

/// Mixture-of-experts settings, with the names of Megatron-LM's flags without their prefix.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MoeSection {
    /// The balancing of the experts' load: `aux_loss` (default), `seq_aux_loss`, `global_aux_loss`, `sinkhorn` or `none`. A
    /// list of losses adds them, and `aux_loss_coeff` is then a list of the same length.
    pub router_load_balancing_type: Option<OneOrMany<LoadBalancingType>>,
    /// The coefficient of each layer's load-balancing loss, which is 1 if all experts get equally many tokens. 0 turns it
    /// off. Default: `router_aux_loss_coef` of the model; 0 with LoRA.
    pub aux_loss_coeff: Option<OneOrMany<HumanFloat>>,
    /// The coefficient of each layer's z-loss, the mean square of the log-sum-exp of the router's logits. Megatron-LM's
    /// documentation suggests 1e-3. Default 0.
    pub z_loss_coeff: Option<HumanFloat>,
    /// The change of each expert bias (`e_score_correction_bias`) per optimizer step, which balances the experts without a
    /// loss, as in DeepSeek-V3. It needs a model with expert biases. Default: 1e-3 with random initial weights, as in
    /// Megatron-LM; 0 with pretrained weights and with LoRA.
    pub router_bias_update_rate: Option<HumanFloat>,
}

/// A balancing of the experts' load, with Megatron-LM's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LoadBalancingType {
    /// A loss with the selections of each micro-batch.
    AuxLoss,
    /// A loss with the selections of each sequence.
    SeqAuxLoss,
    /// A loss with the selections of all micro-batches of the step so far, over all ranks.
    GlobalAuxLoss,
    /// Selections that balance each micro-batch, without a loss.
    Sinkhorn,
    /// Nothing.
    None,
}
