//! Routers in a plan.

use std::path::PathBuf;

use candlewick_model::{ExpertCapacity, ExpertSelection, ForcedExpertLoad, RouterDtype, RouterLoss, RouterSettings};
use candlewick_ops::DropPolicy;
use candlewick_parallel::AuxiliaryLoss;
use serde::Serialize;

use crate::recipe::{HumanFloat, MoeBenchmarkSection, MoeRouterDtype, TokenDropPolicy};

/// Settings of the routers of a mixture-of-experts model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RouterPlan {
    /// Losses of each layer.
    pub losses: Vec<RouterLossTerm>,
    /// True if Sinkhorn balancing selects the experts during training.
    pub sinkhorn: bool,
    /// Number of layers with experts.
    pub n_layers: usize,
    /// Change of each expert bias per step; 0 keeps the biases.
    pub bias_update_rate: f64,
    /// Limit of the tokens of an expert over those of a balanced load; `None` drops no token.
    pub capacity_factor: Option<f64>,
    /// Tokens that an expert beyond its capacity keeps.
    pub drop_policy: TokenDropPolicy,
    /// True if the input of each expert is padded to its capacity during training.
    pub pads_to_capacity: bool,
    /// Half the width of the range of random factors on the routers' input.
    pub input_jitter_eps: f64,
    /// Dtype of the matmuls of the routers.
    pub dtype: MoeRouterDtype,
    /// Forced load of a benchmark.
    pub benchmark: MoeBenchmarkSection,
    /// Record of the experts, if the run writes or replays one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub routing_replay: Option<RoutingReplayPlan>,
}

/// Record of the experts of each token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RoutingReplayPlan {
    /// The run writes its experts into this folder.
    Record(PathBuf),
    /// The run takes its experts from this folder.
    Replay(PathBuf),
}

/// A loss of the routers with its coefficient.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RouterLossTerm {
    /// The loss.
    #[serde(serialize_with = "loss_name")]
    pub loss: RouterLoss,
    /// The coefficient of each layer's loss, or of transformers' loss over all layers, above 0.
    pub coefficient: f64,
}

fn loss_name<S: serde::Serializer>(loss: &RouterLoss, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(loss.name())
}

impl RouterPlan {
    /// Returns the engine's settings of the routers.
    pub fn settings(&self) -> RouterSettings {
        RouterSettings {
            losses: self.losses.iter().map(|term| term.loss).collect(),
            bias_update_rate: self.bias_update_rate,
            selection: if self.sinkhorn { ExpertSelection::Sinkhorn } else { ExpertSelection::TopK },
            capacity: self.capacity_factor.map(|factor| ExpertCapacity { factor, policy: self.policy() }),
            input_jitter_eps: self.input_jitter_eps,
            dtype: self.dtype.into(),
            forced_load: match self.benchmark.router_force_biased {
                Some(HumanFloat(std)) => ForcedExpertLoad::Biased { std },
                None if self.benchmark.is_on() => ForcedExpertLoad::Random,
                None => ForcedExpertLoad::None,
            },
        }
    }

    /// Returns the factor of the capacity to which experts are padded; `None` without padding.
    pub fn padded_capacity_factor(&self) -> Option<f64> {
        self.capacity_factor.filter(|_| self.pads_to_capacity)
    }

    fn policy(&self) -> DropPolicy {
        match self.drop_policy {
            TokenDropPolicy::Probs => DropPolicy::Weights,
            TokenDropPolicy::Position => DropPolicy::Position,
        }
    }

    /// Returns the auxiliary losses of a step of `n_tokens` tokens.
    ///
    /// Metrics show the mean over tokens and layers. As in Megatron-LM, each layer adds its loss with the coefficient.
    /// transformers' loss is that mean.
    pub fn auxiliary(&self, n_tokens: usize) -> Vec<AuxiliaryLoss> {
        let loss = |term: &RouterLossTerm| AuxiliaryLoss {
            name: term.loss.name().to_owned(),
            coefficient: match term.loss {
                RouterLoss::TransformersLoadBalancing => term.coefficient,
                _ => term.coefficient * self.n_layers as f64,
            },
            normalizer: (n_tokens * self.n_layers) as f64,
        };
        self.losses.iter().map(loss).collect()
    }
}

impl From<MoeRouterDtype> for RouterDtype {
    fn from(dtype: MoeRouterDtype) -> Self {
        match dtype {
            MoeRouterDtype::Fp32 => Self::F32,
            MoeRouterDtype::Fp64 => Self::F64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layer_adds_its_loss_and_metrics_show_their_mean() {
        let term = |loss| RouterLossTerm { loss, coefficient: 0.01 };
        let losses = [RouterLoss::LoadBalancing, RouterLoss::TransformersLoadBalancing].map(term).to_vec();
        let plan = RouterPlan {
            losses,
            sinkhorn: false,
            n_layers: 4,
            bias_update_rate: 0.0,
            capacity_factor: None,
            drop_policy: TokenDropPolicy::Probs,
            pads_to_capacity: false,
            input_jitter_eps: 0.0,
            dtype: MoeRouterDtype::Fp32,
            benchmark: MoeBenchmarkSection::default(),
            routing_replay: None,
        };
        assert_eq!(plan.settings().losses, [RouterLoss::LoadBalancing, RouterLoss::TransformersLoadBalancing]);
        let [loss, of_transformers] = plan.auxiliary(10).try_into().expect("there are two losses");
        // Four layers whose loss is 1 for each of ten tokens.
        let sum = 4.0 * 10.0;
        assert_eq!(sum / loss.normalizer, 1.0);
        assert!((loss.coefficient * sum / loss.normalizer - 4.0 * 0.01).abs() < 1e-12);
        // transformers' loss is a mean over layers.
        assert!((of_transformers.coefficient * sum / of_transformers.normalizer - 0.01).abs() < 1e-12);
    }
}
