//! Settings of routers during training.

use candlewick_ops::DropPolicy;

use super::RouterLoss;

/// Settings of all routers of a model during training.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouterSettings {
    /// Auxiliary losses. A training step needs a coefficient for each.
    pub losses: Vec<RouterLoss>,
    /// Change of an expert bias per step; 0 keeps the biases.
    pub bias_update_rate: f64,
    /// Dtype in which logits are computed.
    pub dtype: RouterDtype,
    /// Selection of the experts.
    pub selection: ExpertSelection,
    /// Limit of the tokens of an expert; `None` drops no token.
    pub capacity: Option<ExpertCapacity>,
    /// Half the width of the range of random factors on the routers' input, around 1; 0 for none.
    pub input_jitter_eps: f64,
    /// Load of the experts in a benchmark.
    pub forced_load: ForcedExpertLoad,
}

/// Dtype in which a router's logits are computed from its input and weight. They are then rounded to f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RouterDtype {
    /// f32.
    #[default]
    F32,
    /// f64, for the gradients of input and weight, too. The output of an adapter stays f32.
    F64,
}

/// Limit of the tokens of an expert in a micro-batch of a rank. Tokens beyond it lose the expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertCapacity {
    /// Limit over the tokens of an expert under a balanced load.
    pub factor: f64,
    /// Choice of the tokens to keep.
    pub policy: DropPolicy,
}

/// Load of the experts that does not depend on the model, for benchmarks. The model learns nothing useful.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum ForcedExpertLoad {
    /// The model's load.
    #[default]
    None,
    /// Random logits instead of the model's: a balanced load.
    Random,
    /// A random number for each expert of a layer, added to its logits: an unbalanced load.
    Biased {
        /// Standard deviation of the numbers.
        std: f64,
    },
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
    pub(crate) const INFERENCE: Self = Self {
        losses: Vec::new(),
        bias_update_rate: 0.0,
        dtype: RouterDtype::F32,
        selection: ExpertSelection::TopK,
        capacity: None,
        input_jitter_eps: 0.0,
        forced_load: ForcedExpertLoad::None,
    };

    /// Returns the settings of evaluation in the same run: the dtype, without losses, noise and capacity.
    pub fn of_evaluation(&self) -> Self {
        Self { dtype: self.dtype, ..Self::INFERENCE }
    }
}
