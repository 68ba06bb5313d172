//! Losses and totals of a routed layer.
//!
//! t tokens, n of them without padding, e experts, k experts per token, s sequences

use candle_core::{DType, Result, Tensor};
use candlewick_ops::{
    self as ops, RouterSpec, Routing, expert_counts, load_balancing_loss, router_z_loss, sequence_load_balancing_loss,
};

use super::loss::{best_experts, fractions};
use super::{RouterContext, RouterLoss, RouterRows};
use crate::ParallelOps;

/// A layer whose router has selected experts.
pub(crate) struct RoutedLayer<'a> {
    pub(crate) layer_idx: usize,
    /// Logits [t, e].
    pub(crate) logits: &'a Tensor,
    /// Selected experts, before the capacity drops any.
    pub(crate) routing: &'a Routing,
    /// Experts with the highest scores, u32 [t, k], without bias, groups or balancing; `None` if they were not computed.
    pub(crate) best_experts: Option<&'a Tensor>,
    pub(crate) spec: RouterSpec,
}

/// Logits and experts of the tokens that count.
struct CountedTokens<'a> {
    layer_idx: usize,
    logits_ne: Tensor,
    /// Experts by score alone, u32 [n, k]. As in Megatron-LM, losses ignore bias, groups and capacity.
    best_nk: Tensor,
    spec: RouterSpec,
    rows: &'a RouterRows,
}

impl RoutedLayer<'_> {
    /// Adds the layer to the totals and its losses to the tape.
    pub(crate) fn observe(&self, context: &RouterContext, parallel_ops: &dyn ParallelOps) -> Result<()> {
        let Some(rows) = context.rows else { return Ok(()) };
        let losses = &context.settings.losses;
        if context.totals.is_none() && losses.is_empty() {
            return Ok(());
        }
        let logits_ne = rows.select(self.logits)?;
        if let Some(totals) = context.totals {
            let experts_nk = rows.select(&self.routing.assignment.experts)?;
            let counts_e = expert_counts(&experts_nk, None, logits_ne.dim(1)?)?.squeeze(0)?;
            let none = Tensor::zeros((), DType::F32, counts_e.device())?;
            totals.add(self.layer_idx, &logits_ne, &counts_e, &none)?;
        }
        if losses.is_empty() {
            return Ok(());
        }
        let best_nk = match self.best_experts {
            Some(experts) => rows.select(experts)?,
            None => best_experts(&logits_ne, self.spec)?,
        };
        let tokens = CountedTokens { layer_idx: self.layer_idx, logits_ne, best_nk, spec: self.spec, rows };
        losses
            .iter()
            .try_for_each(|loss| ops::auxiliary_loss(loss.name(), &tokens.loss(*loss, context, parallel_ops)?))
    }
}

impl CountedTokens<'_> {
    /// Returns a loss, summed over the tokens: an f32 scalar.
    fn loss(&self, loss: RouterLoss, context: &RouterContext, parallel_ops: &dyn ParallelOps) -> Result<Tensor> {
        let (logits_ne, score) = (&self.logits_ne, self.spec.score);
        let balance = |counts_1e: &Tensor| load_balancing_loss(logits_ne, &fractions(counts_1e)?.squeeze(0)?, score);
        let counts_1e = || expert_counts(&self.best_nk, None, logits_ne.dim(1)?);
        match loss {
            RouterLoss::LoadBalancing => balance(&parallel_ops.sum_over_micro_batch(&counts_1e()?)?),
            RouterLoss::SequenceLoadBalancing => {
                let sequences = self.rows.token_sequences();
                let counts_se = expert_counts(&self.best_nk, Some(sequences), logits_ne.dim(1)?)?;
                let counts_se = parallel_ops.sum_over_micro_batch(&counts_se)?;
                sequence_load_balancing_loss(logits_ne, &fractions(&counts_se)?, sequences, score)
            }
            RouterLoss::GlobalLoadBalancing => {
                let counts_1e = || parallel_ops.sum_over_data_parallel(&counts_1e()?);
                let sums = context.global_counts.expect("a step with this loss has global counts");
                balance(&sums.up_to(context.micro_idx, self.layer_idx, counts_1e)?)
            }
            RouterLoss::Z => router_z_loss(logits_ne),
        }
    }
}
