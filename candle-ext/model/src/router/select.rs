//! Selection of the experts.

use candle_core::{Result, Tensor};
use candlewick_ops::{self as ops, CountedExperts, ExpertChoice, RouterSpec, RouterStatisticsSpec, Routing};

use super::{ExpertCapacity, ExpertSelection, RoutedLayer, RouterContext, RouterLoss};
use crate::{ExpertPadding, TokenParallel};

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
pub(crate) fn select(router: &RouterLogits, context: &RouterContext, tokens: &dyn TokenParallel) -> Result<Routing> {
    let RouterLogits { layer_idx, logits, bias, spec } = *router;
    let logits = &context.forced(logits, layer_idx)?;
    let balanced = match (context.replayed, context.settings.selection) {
        (None, ExpertSelection::Sinkhorn) => Some(ops::sinkhorn(logits)?),
        _ => None,
    };
    let choice = match (context.replayed, &balanced) {
        (Some(replayed), _) => ExpertChoice::Given(replayed.of_layer(layer_idx)?),
        (None, Some(balanced)) => ExpertChoice::BySelection(balanced),
        (None, None) => ExpertChoice::ByScore { bias },
    };
    let (routing, statistics) = match context.counted(choice, spec) {
        Some(counted) => {
            let (routing, statistics) = ops::route_with_statistics(logits, choice, spec, counted)?;
            (routing, Some(statistics))
        }
        None => (ops::route_by_choice(logits, choice, spec)?, None),
    };
    if let Some(record) = context.record {
        record.add(context.micro_idx, layer_idx, &routing.assignment.experts);
    }
    let kept = match context.settings.capacity {
        Some(capacity) => {
            let (t, e) = logits.dims2()?;
            Some(ops::limit_capacity(&routing, capacity.n_rows(t, spec, e), capacity.policy)?)
        }
        None => None,
    };
    if let (Some(statistics), Some(rows)) = (&statistics, context.rows) {
        RoutedLayer { layer_idx, logits, rows, kept: kept.as_ref(), statistics, spec }.observe(context, tokens)?;
    }
    Ok(kept.unwrap_or(routing))
}

impl RouterContext<'_> {
    /// Returns the rows that losses and totals cover; `None` if there are neither.
    fn counted(&self, choice: ExpertChoice, spec: RouterSpec) -> Option<RouterStatisticsSpec<'_>> {
        let losses = &self.settings.losses;
        let rows = self.rows.filter(|_| self.outputs.is_some() || !losses.is_empty())?;
        let is_by_score = matches!(choice, ExpertChoice::ByScore { bias: None }) && spec.groups.is_none();
        // The z-loss counts no experts.
        let experts = match is_by_score || losses.iter().all(|loss| *loss == RouterLoss::Z) {
            true => CountedExperts::Chosen,
            false => CountedExperts::TopScores,
        };
        Some(RouterStatisticsSpec { token_mask: rows.token_mask.as_ref(), experts })
    }

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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candle_core::Device;
    use candlewick_ops::{DropPolicy, ScoreFunction, TopKOrder};

    use super::*;
    use crate::router::RoutingRecord;
    use crate::{RouterSettings, SingleDevice};

    /// Both tokens select experts 0 and 1, which compute one token each.
    #[test]
    fn a_record_has_the_selections_before_the_capacity_drops_any() {
        let logits = &Tensor::new(&[[3f32, 2.0, 0.0, 0.0], [3.0, 2.0, 0.0, 0.0]], &Device::Cpu).unwrap();
        let (score, order) = (ScoreFunction::Softmax, TopKOrder::ScoreFirst);
        let spec = RouterSpec { top_k: 2, score, order, normalize: true, groups: None, scaling: 1.0 };
        let capacity = Some(ExpertCapacity { factor: 1.0, policy: DropPolicy::Position });
        let settings = RouterSettings { capacity, ..RouterSettings::default() };
        let record = RoutingRecord::default();
        let context = RouterContext { settings: &settings, record: Some(&record), ..RouterContext::default() };
        let router = RouterLogits { layer_idx: 3, logits, bias: None, spec };
        let kept = select(&router, &context, &SingleDevice).unwrap();
        let experts = |experts: &Tensor| experts.to_vec2::<u32>().unwrap();
        assert_eq!(experts(&kept.assignment.experts), [[0, 1], [u32::MAX; 2]]);
        assert_eq!(experts(&record.take_selected()[&(0, 3)]), [[0, 1], [0, 1]]);
    }
}
