//! Selection of the experts.

use candle_core::{Result, Tensor};
use candlewick_ops::{self as ops, RouterSpec, Routing};

use super::{ExpertCapacity, ExpertSelection, RoutedLayer, RouterContext};
use crate::{ExpertPadding, ParallelOps};

/// Logits of a router.
pub(crate) struct RouterLogits<'a> {
    pub(crate) layer_idx: usize,
    /// Logits [t, e].
    pub(crate) logits: &'a Tensor,
    /// Expert bias, f32 [e].
    pub(crate) bias: Option<&'a Tensor>,
    pub(crate) spec: RouterSpec,
}

/// Selects the experts of each token within the capacity, or takes replayed ones. Adds the layer's losses and totals, and its
/// experts to a record.
pub(crate) fn select(
    router: &RouterLogits,
    context: &RouterContext,
    parallel_ops: &dyn ParallelOps,
) -> Result<Routing> {
    let RouterLogits { layer_idx, logits, bias, spec } = *router;
    let logits = &context.forced(logits, layer_idx)?;
    let (routing, is_best) = match (context.replayed, context.settings.selection) {
        (Some(replayed), _) => (ops::route_to(logits, replayed.of_layer(layer_idx)?, spec)?, false),
        (None, ExpertSelection::TopK) => (ops::route(logits, bias, spec)?, bias.is_none() && spec.groups.is_none()),
        (None, ExpertSelection::Sinkhorn) => (ops::route_by(logits, &ops::sinkhorn(logits)?, spec)?, false),
    };
    if let Some(record) = context.record {
        record.add(context.micro_idx, layer_idx, &routing.assignment.experts);
    }
    let best_experts = is_best.then_some(&routing.assignment.experts);
    let kept = match context.settings.capacity {
        Some(capacity) => {
            let (t, e) = logits.dims2()?;
            Some(ops::limit_capacity(&routing, capacity.n_rows(t, spec, e), capacity.policy)?)
        }
        None => None,
    };
    RoutedLayer { layer_idx, logits, routing: &routing, kept: kept.as_ref(), best_experts, spec }
        .observe(context, parallel_ops)?;
    Ok(kept.unwrap_or(routing))
}

impl RouterContext<'_> {
    /// Returns the padding of a layer's `n_experts` experts. It is at least the capacity of this rank's tokens.
    pub(crate) fn padding(&self, spec: RouterSpec, n_experts: usize) -> Option<ExpertPadding> {
        let (most_tokens, capacity) = (self.most_tokens?, self.settings.capacity?);
        Some(ExpertPadding { most_tokens, rows_per_expert: capacity.n_rows(most_tokens, spec, n_experts) })
    }
}

impl ExpertCapacity {
    /// Returns the most rows of each of `n_experts` experts from `n_tokens` tokens.
    fn n_rows(self, n_tokens: usize, spec: RouterSpec, n_experts: usize) -> usize {
        ops::expert_capacity(n_tokens, spec.top_k, n_experts, self.factor)
    }
}
