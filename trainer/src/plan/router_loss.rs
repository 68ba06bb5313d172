//! Losses of routers in a plan.

use candlewick_model::RouterLoss;
use candlewick_parallel::AuxiliaryLoss;
use serde::Serialize;

/// Losses of the routers of a mixture-of-experts model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RouterLossPlan {
    /// Coefficient of each layer's load-balancing loss; 0 turns it off.
    pub aux_loss_coeff: f64,
    /// Coefficient of each layer's z-loss; 0 turns it off.
    pub z_loss_coeff: f64,
    /// Number of layers with experts.
    pub n_layers: usize,
}

impl RouterLossPlan {
    fn coefficient(&self, loss: RouterLoss) -> f64 {
        match loss {
            RouterLoss::LoadBalancing => self.aux_loss_coeff,
            RouterLoss::Z => self.z_loss_coeff,
        }
    }

    /// Returns the router losses with a coefficient.
    pub fn router_losses(&self) -> Vec<RouterLoss> {
        RouterLoss::ALL.into_iter().filter(|loss| self.coefficient(*loss) > 0.0).collect()
    }

    /// Returns the auxiliary losses of a step of `n_tokens` tokens.
    ///
    /// Metrics show the mean over tokens and layers. As in Megatron-LM, each layer adds its loss with the coefficient.
    pub fn auxiliary(&self, n_tokens: usize) -> Vec<AuxiliaryLoss> {
        let loss = |loss: RouterLoss| AuxiliaryLoss {
            name: loss.name().to_owned(),
            coefficient: self.coefficient(loss) * self.n_layers as f64,
            normalizer: (n_tokens * self.n_layers) as f64,
        };
        self.router_losses().into_iter().map(loss).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layer_adds_its_loss_and_metrics_show_their_mean() {
        let plan = RouterLossPlan { aux_loss_coeff: 0.01, z_loss_coeff: 0.0, n_layers: 4 };
        assert_eq!(plan.router_losses(), [RouterLoss::LoadBalancing]);
        let [loss] = plan.auxiliary(10).try_into().expect("one loss has a coefficient");
        // Four layers whose loss is 1 for each of ten tokens.
        let sum = 4.0 * 10.0;
        assert_eq!(sum / loss.normalizer, 1.0);
        assert!((loss.coefficient * sum / loss.normalizer - 4.0 * 0.01).abs() < 1e-12);
    }
}
