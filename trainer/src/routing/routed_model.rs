//! The numbers of a model in its records.

use candlewick_model::Model;

/// The numbers of a model that a record depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RoutedModel {
    /// Experts of a token.
    pub(crate) top_k: usize,
    /// Experts of a layer.
    pub(crate) n_experts: usize,
    /// Indices of the layers with experts; those of MTP layers are last.
    pub(crate) layers: Vec<usize>,
}

impl RoutedModel {
    /// Returns the numbers of a model; `None` for a dense model.
    pub(crate) fn of(model: &Model) -> Option<Self> {
        let moe = model.config().moe()?;
        let layers = model.layers().filter(|layer| layer.n_experts().is_some()).map(|layer| layer.layer_idx);
        Some(Self { top_k: moe.router.top_k, n_experts: moe.n_experts, layers: layers.collect() })
    }
}
