//! The section `moe`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{HumanFloat, ValueOrList};

/// Mixture-of-experts settings, with the names of Megatron-LM's flags without their prefix.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MoeSection {
    /// The balancing of the experts' load: `aux_loss` (default), `seq_aux_loss`, `global_aux_loss`, `transformers_aux_loss`,
    /// `sinkhorn` or `none`. A list of losses adds them, and `aux_loss_coeff` is then a list of the same length.
    pub router_load_balancing_type: Option<ValueOrList<LoadBalancingType>>,
    /// The coefficient of each layer's load-balancing loss, which is 1 if all experts get equally many tokens. 0 turns it
    /// off. `transformers_aux_loss` is one loss for all layers. Default: `router_aux_loss_coef` of the model, which the other
    /// losses multiply by top-k over the number of layers with experts; 0 with LoRA, unless routers have adapters.
    pub aux_loss_coeff: Option<ValueOrList<HumanFloat>>,
    /// The coefficient of each layer's z-loss, the mean square of the log-sum-exp of the router's logits. Megatron-LM's
    /// documentation suggests 1e-3. Default 0.
    pub z_loss_coeff: Option<HumanFloat>,
    /// The change of each expert bias (`e_score_correction_bias`) per optimizer step, which balances the experts without a
    /// loss, as in DeepSeek-V3. It needs a model with expert biases. Default: 1e-3 with random initial weights, as in
    /// Megatron-LM; 0 with pretrained weights and with LoRA.
    pub router_bias_update_rate: Option<HumanFloat>,
    /// The most tokens of an expert in a micro-batch of a rank, over those of a balanced load. Tokens beyond it lose the
    /// expert. Default: no limit.
    pub expert_capacity_factor: Option<HumanFloat>,
    /// The tokens that an expert beyond its capacity keeps: those with the highest weights (`probs`), or the first
    /// (`position`). Default `probs`.
    pub token_drop_policy: Option<TokenDropPolicy>,
    /// Pads the input of each expert to its capacity, so that no numbers of rows are exchanged. Results change by rounding only. It
    /// needs `expert_capacity_factor`. Default false.
    pub pad_expert_input_to_capacity: Option<bool>,
    /// Multiplies the routers' input with random numbers between 1 - eps and 1 + eps during training. Default 0.
    pub input_jitter_eps: Option<HumanFloat>,
    /// The dtype of the matmul that computes the routers' logits, and of its gradients: `fp32` (default) or `fp64`.
    pub router_dtype: Option<MoeRouterDtype>,
    /// Forced loads for benchmarks. The model learns nothing useful, and nothing is saved.
    pub benchmark: MoeBenchmarkSection,
    /// The exchange of tokens between expert-parallel ranks: `alltoall` (default) or `allgather`. `allgather` sends less if a
    /// token selects more experts than `expert_parallel_size`.
    pub token_dispatcher_type: Option<TokenDispatcherType>,
    /// Records the experts of each token in a folder, or replays the experts of such a record.
    pub routing_replay: RoutingReplaySection,
}

/// A balancing of the experts' load, with Megatron-LM's names, and transformers' loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LoadBalancingType {
    /// A loss with the selections of each micro-batch.
    AuxLoss,
    /// A loss with the selections of each sequence.
    SeqAuxLoss,
    /// A loss with the selections of all micro-batches of the step so far, over all ranks.
    GlobalAuxLoss,
    /// The loss of transformers models, with the selections of all layers of a micro-batch.
    TransformersAuxLoss,
    /// Selections that balance each micro-batch, without a loss.
    Sinkhorn,
    /// Nothing.
    None,
}

/// The tokens that an expert beyond its capacity keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TokenDropPolicy {
    /// The tokens with the highest weights.
    Probs,
    /// The first tokens.
    Position,
}

/// A dtype of the routers' matmuls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum MoeRouterDtype {
    /// IEEE single precision.
    #[default]
    #[serde(rename = "fp32", alias = "f32", alias = "float32")]
    Fp32,
    /// IEEE double precision.
    #[serde(rename = "fp64", alias = "f64", alias = "float64")]
    Fp64,
}

/// Forced loads of the experts, for benchmarks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MoeBenchmarkSection {
    /// Replaces the routers' logits by random numbers, which balance the load. Default false.
    pub router_force_load_balancing: Option<bool>,
    /// Adds a random number with this standard deviation to the logits of each expert, which skews the load.
    pub router_force_biased: Option<HumanFloat>,
}

impl MoeBenchmarkSection {
    /// Returns true if a load is forced.
    pub fn is_on(&self) -> bool {
        self.router_force_load_balancing == Some(true) || self.router_force_biased.is_some()
    }
}

/// A record of the experts of each token. Relative paths start at the current folder.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RoutingReplaySection {
    /// The folder to write the experts to that the routers select in training.
    pub record: Option<String>,
    /// The folder of a record whose experts replace the routers' selections in training. All ranks must see it.
    pub replay: Option<String>,
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
