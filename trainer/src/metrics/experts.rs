//! Load of experts in a step.

use std::collections::BTreeMap;

use candlewick_model::RouterTotal;
use serde::{Deserialize, Serialize};

/// Load of the experts of all MoE layers in a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExpertLoad {
    /// Tokens of the busiest expert over the mean, in the layer where it is highest; 1 is balanced.
    pub max_over_mean: f64,
    /// Entropy of the selections over its maximum, in the layer where it is lowest; 1 is balanced.
    pub entropy: f64,
    /// Fraction of experts without tokens, over all layers.
    pub unused: f64,
    /// Fraction of selections that the capacity dropped, over all layers.
    #[serde(default)]
    pub dropped: f64,
    /// Each MoE layer, in order.
    pub layers: Vec<LayerLoad>,
}

/// Load of the experts of a layer, and its router's losses and logits.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LayerLoad {
    /// Index of the layer.
    pub layer: usize,
    /// Tokens of the busiest expert over the mean.
    pub max_over_mean: f64,
    /// Entropy of the selections over its maximum.
    pub entropy: f64,
    /// Fraction of experts without tokens.
    pub unused: f64,
    /// Fraction of selections that the capacity dropped.
    pub dropped: f64,
    /// Mean of the router's logits.
    pub logit_mean: f64,
    /// Standard deviation of the router's logits.
    pub logit_std: f64,
    /// Mean of each loss by name, without its coefficient.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub losses: BTreeMap<String, f64>,
}

impl ExpertLoad {
    /// Computes the load from the total of each router and the losses of each layer over the number of MoE layers, both by layer index.
    /// Returns `None` without MoE layers.
    pub fn of(routers: &BTreeMap<usize, RouterTotal>, losses: &BTreeMap<String, Vec<f64>>) -> Option<Self> {
        let losses_of = |layer: usize| {
            // A layer's share is its mean over the number of MoE layers.
            losses.iter().map(|(name, shares)| (name.clone(), shares[layer] * routers.len() as f64)).collect()
        };
        let of_layer = |(layer, total): (&usize, &RouterTotal)| LayerLoad {
            layer: *layer,
            losses: losses_of(*layer),
            ..LayerLoad::of(total)
        };
        let layers: Vec<LayerLoad> = routers.iter().map(of_layer).collect();
        let sum = |of: fn(&RouterTotal) -> f32| routers.values().map(|total| f64::from(of(total))).sum::<f64>();
        let n_selections = sum(|total| total.expert_counts.iter().sum()).max(1.0);
        (!layers.is_empty()).then(|| Self {
            dropped: sum(|total| total.n_dropped) / n_selections,
            max_over_mean: layers.iter().map(|layer| layer.max_over_mean).fold(0.0, f64::max),
            entropy: layers.iter().map(|layer| layer.entropy).fold(1.0, f64::min),
            unused: layers.iter().map(|layer| layer.unused).sum::<f64>() / layers.len() as f64,
            layers,
        })
    }
}

impl LayerLoad {
    fn of(router: &RouterTotal) -> Self {
        let counts = &router.expert_counts;
        let total: f64 = counts.iter().map(|count| f64::from(*count)).sum();
        let fractions = || counts.iter().map(move |count| f64::from(*count) / total.max(1.0));
        let entropy: f64 = fractions().filter(|p| *p > 0.0).map(|p| -p * p.ln()).sum();
        let n_experts = counts.len() as f64;
        let n_logits = (f64::from(router.n_tokens) * n_experts).max(1.0);
        let [logit_mean, mean_square] = [router.logit_sum, router.logit_squares].map(|sum| f64::from(sum) / n_logits);
        Self {
            max_over_mean: fractions().fold(0.0, f64::max) * n_experts,
            entropy: if counts.len() > 1 { entropy / n_experts.ln() } else { 1.0 },
            unused: counts.iter().filter(|count| **count == 0.0).count() as f64 / n_experts,
            dropped: f64::from(router.n_dropped) / total.max(1.0),
            logit_mean,
            logit_std: (mean_square - logit_mean * logit_mean).max(0.0).sqrt(),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn router(expert_counts: Vec<f32>) -> RouterTotal {
        RouterTotal { expert_counts, ..RouterTotal::default() }
    }

    #[test]
    fn a_balanced_layer_has_load_and_entropy_one() {
        let layer = LayerLoad::of(&router(vec![5.0; 8]));
        assert!((layer.max_over_mean - 1.0).abs() < 1e-12 && (layer.entropy - 1.0).abs() < 1e-12, "{layer:?}");
    }

    #[test]
    fn the_summary_has_the_most_unbalanced_layer() {
        let full = RouterTotal { n_dropped: 10.0, ..router(vec![20.0, 0.0, 0.0, 0.0]) };
        let routers = [(1, router(vec![5.0; 4])), (3, full)].into();
        // The mean of the loss over both layers is 2; each has half of its own mean.
        let losses = [("z_loss".to_owned(), vec![0.0, 0.5, 0.0, 1.5])].into();
        let load = ExpertLoad::of(&routers, &losses).expect("there are two layers");
        let of_layers: Vec<_> = load.layers.iter().map(|layer| (layer.layer, layer.losses["z_loss"])).collect();
        assert_eq!(of_layers, [(1, 1.0), (3, 3.0)]);
        assert_eq!((load.dropped, load.layers[1].dropped), (0.25, 0.5));
        assert_eq!((load.max_over_mean, load.entropy, load.unused), (4.0, 0.0, 3.0 / 8.0));
        assert_eq!(load.layers.iter().map(|layer| layer.unused).collect::<Vec<_>>(), [0.0, 0.75]);
        assert_eq!(ExpertLoad::of(&BTreeMap::new(), &losses), None);
    }

    #[test]
    fn logits_have_their_mean_and_deviation() {
        // Two tokens with the logits 1 and 3.
        let total = RouterTotal { n_tokens: 2.0, logit_sum: 8.0, logit_squares: 20.0, ..router(vec![2.0, 0.0]) };
        let layer = LayerLoad::of(&total);
        assert_eq!((layer.logit_mean, layer.logit_std), (2.0, 1.0));
    }
}
