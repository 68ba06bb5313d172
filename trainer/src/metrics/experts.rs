//! Load of experts in a step.

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
    /// Each MoE layer, in order.
    pub layers: Vec<LayerLoad>,
}

/// Load of the experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerLoad {
    /// Tokens of the busiest expert over the mean.
    pub max_over_mean: f64,
    /// Entropy of the selections over its maximum.
    pub entropy: f64,
    /// Experts without tokens.
    pub n_unused: usize,
}

impl ExpertLoad {
    /// Computes the load from the selections of each expert, by layer. Returns `None` without MoE layers.
    pub fn of(counts: &[Vec<f32>]) -> Option<Self> {
        let layers: Vec<LayerLoad> = counts.iter().map(|counts| LayerLoad::of(counts)).collect();
        let n_experts: usize = counts.iter().map(Vec::len).sum();
        (!layers.is_empty()).then(|| Self {
            max_over_mean: layers.iter().map(|layer| layer.max_over_mean).fold(0.0, f64::max),
            entropy: layers.iter().map(|layer| layer.entropy).fold(1.0, f64::min),
            unused: layers.iter().map(|layer| layer.n_unused).sum::<usize>() as f64 / n_experts as f64,
            layers,
        })
    }
}

impl LayerLoad {
    fn of(counts: &[f32]) -> Self {
        let total: f64 = counts.iter().map(|count| f64::from(*count)).sum();
        let fractions = || counts.iter().map(move |count| f64::from(*count) / total.max(1.0));
        let entropy: f64 = fractions().filter(|p| *p > 0.0).map(|p| -p * p.ln()).sum();
        let n_experts = counts.len() as f64;
        Self {
            max_over_mean: fractions().fold(0.0, f64::max) * n_experts,
            entropy: if counts.len() > 1 { entropy / n_experts.ln() } else { 1.0 },
            n_unused: counts.iter().filter(|count| **count == 0.0).count(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_balanced_layer_has_load_and_entropy_one() {
        let layer = LayerLoad::of(&[5.0; 8]);
        assert!((layer.max_over_mean - 1.0).abs() < 1e-12 && (layer.entropy - 1.0).abs() < 1e-12, "{layer:?}");
    }

    #[test]
    fn the_summary_has_the_most_unbalanced_layer() {
        let load = ExpertLoad::of(&[vec![5.0; 4], vec![20.0, 0.0, 0.0, 0.0]]);
        let load = load.expect("there are two layers");
        assert_eq!((load.max_over_mean, load.entropy, load.unused), (4.0, 0.0, 3.0 / 8.0));
        assert_eq!(ExpertLoad::of(&[]), None);
    }
}
