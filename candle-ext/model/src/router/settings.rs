//! Settings of routers during training.

use super::RouterLoss;

/// Settings of all routers of a model during training.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouterSettings {
    /// Auxiliary losses. A training step needs a coefficient for each.
    pub losses: Vec<RouterLoss>,
    /// Change of an expert bias per step; 0 keeps the biases.
    pub bias_update_rate: f64,
    /// Selection of the experts.
    pub selection: ExpertSelection,
}

/// Selection of the experts of each token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertSelection {
    /// The model's: the highest scores, with its expert bias and groups.
    #[default]
    TopK,
    /// The highest numbers of the logits that Sinkhorn's algorithm balances over this rank's tokens of a micro-batch.
    Sinkhorn,
}

impl RouterSettings {
    /// The settings of inference.
    pub(crate) const INFERENCE: Self =
        Self { losses: Vec::new(), bias_update_rate: 0.0, selection: ExpertSelection::TopK };
}
