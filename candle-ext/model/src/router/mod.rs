//! Routers during training: settings, losses, totals, and the inputs that all layers share.

mod expert_counts_summed_over_layers;
mod global_counts;
mod loss;
mod noise;
mod observe;
mod replay;
mod rows;
mod select;
mod settings;
mod totals;

pub use expert_counts_summed_over_layers::ExpertCountsSummedOverLayers;
pub use global_counts::GlobalExpertCounts;
pub use loss::RouterLoss;
pub use replay::{ReplayedExperts, RoutingRecord};
pub use rows::RouterRows;
pub use settings::{ExpertCapacity, ExpertSelection, ForcedExpertLoad, RouterDtype, RouterSettings};
pub use totals::{ROUTER_TOTALS, RouterTotal};

use crate::LayerOutputs;

pub(crate) use observe::RoutedLayer;
pub(crate) use select::{RouterLogits, select};

/// Inputs of all routers in a forward pass. The default is that of inference.
#[derive(Clone, Copy, Debug)]
pub struct RouterContext<'a> {
    /// Settings.
    pub settings: &'a RouterSettings,
    /// Rows that losses and totals cover; `None` if neither is wanted.
    pub rows: Option<&'a RouterRows>,
    /// Side outputs to add the totals to.
    pub outputs: Option<&'a LayerOutputs>,
    /// Selections of the step so far, for [`RouterLoss::GlobalLoadBalancing`].
    pub global_counts: Option<&'a GlobalExpertCounts>,
    /// Selections of all layers, for [`RouterLoss::TransformersLoadBalancing`].
    pub expert_counts_summed_over_layers: Option<&'a ExpertCountsSummedOverLayers>,
    /// Record of the selections to add to.
    pub record: Option<&'a RoutingRecord>,
    /// Experts that replace the selections.
    pub replayed: Option<&'a ReplayedExperts>,
    /// Index of the micro-batch in the step.
    pub micro_idx: usize,
    /// Seed of the noise in the micro-batch.
    pub noise_key: u64,
    /// The most tokens that a rank has in the micro-batch. Experts are padded to the capacity for them; `None` pads none.
    pub most_tokens: Option<usize>,
}

impl Default for RouterContext<'_> {
    fn default() -> Self {
        static INFERENCE: RouterSettings = RouterSettings::INFERENCE;
        Self {
            settings: &INFERENCE,
            rows: None,
            outputs: None,
            global_counts: None,
            expert_counts_summed_over_layers: None,
            record: None,
            replayed: None,
            micro_idx: 0,
            noise_key: 0,
            most_tokens: None,
        }
    }
}
