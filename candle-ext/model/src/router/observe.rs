//! Losses and totals of a routed layer.
//!
//! t tokens, n of them without padding, e experts, k experts per token, s sequences

use candle_core::{Result, Tensor};
use candlewick_ops::{
    self as ops, RouterSpec, RouterStatistics, Routing, balance_factors, expert_counts, expert_score_sums,
    load_balancing_loss, router_z_loss, sequence_load_balancing_loss,
};

use super::totals::{ROUTER_TOTALS, total_of};
use super::{RouterContext, RouterLoss, RouterRows};
use crate::TokenParallel;

/// A layer whose router has selected experts.
pub(crate) struct RoutedLayer<'a> {
    pub(crate) layer_idx: usize,
    /// Logits [t, e].
    pub(crate) logits: &'a Tensor,
    /// Rows without padding.
    pub(crate) rows: &'a RouterRows,
    /// Selected experts within the capacity; `None` without one.
    pub(crate) kept: Option<&'a Routing>,
    /// Sums over these rows, before the capacity drops any. As in Megatron-LM, its best experts ignore bias and groups.
    pub(crate) statistics: &'a RouterStatistics,
    pub(crate) spec: RouterSpec,
}

impl RoutedLayer<'_> {
    /// Adds the layer to the totals and its losses to the tape.
    pub(crate) fn observe(&self, context: &RouterContext, tokens: &dyn TokenParallel) -> Result<()> {
        if let Some(outputs) = context.outputs {
            outputs.add(ROUTER_TOTALS, self.layer_idx, total_of(self.statistics.totals()?, self.n_kept()?)?)?;
        }
        let losses = &context.settings.losses;
        if losses.is_empty() {
            return Ok(());
        }
        let logits_ne = self.rows.select(self.logits)?;
        let add = |loss: &RouterLoss| ops::auxiliary_loss(loss.name(), &self.loss(*loss, &logits_ne, context, tokens)?);
        losses.iter().try_for_each(add)
    }

    /// Returns the selections that the capacity keeps, an f32 scalar; `None` without a capacity.
    fn n_kept(&self) -> Result<Option<Tensor>> {
        let Some(kept) = self.kept else { return Ok(None) };
        let experts = self.rows.select(&kept.assignment.experts)?;
        Ok(Some(expert_counts(&experts, None, self.logits.dim(1)?)?.sum_all()?))
    }

    /// Returns a loss, summed over the tokens: an f32 scalar, or the scores of each expert [e] if their factors are not yet known.
    fn loss(
        &self,
        loss: RouterLoss,
        logits_ne: &Tensor,
        context: &RouterContext,
        tokens: &dyn TokenParallel,
    ) -> Result<Tensor> {
        let statistics = self.statistics;
        let counts_1e = || statistics.tokens_per_expert()?.unsqueeze(0);
        let balance =
            |counts_1e: &Tensor| load_balancing_loss(logits_ne, statistics, &balance_factors(counts_1e)?.squeeze(0)?);
        match loss {
            RouterLoss::LoadBalancing => balance(&tokens.sum_over_micro_batch(&counts_1e()?)?),
            RouterLoss::SequenceLoadBalancing => {
                let (sequences, best_nk) =
                    (self.rows.token_sequences()?, self.rows.select(statistics.counted_experts())?);
                let counts_se = expert_counts(&best_nk, Some(sequences), logits_ne.dim(1)?)?;
                let counts_se = tokens.sum_over_micro_batch(&counts_se)?;
                sequence_load_balancing_loss(logits_ne, &balance_factors(&counts_se)?, sequences, self.spec.score)
            }
            RouterLoss::GlobalLoadBalancing => {
                let counts_1e = || tokens.sum_over_data_parallel(&counts_1e()?);
                let sums = context.global_counts.expect("a step with this loss has global counts");
                balance(&sums.up_to(context.micro_idx, self.layer_idx, counts_1e)?)
            }
            RouterLoss::TransformersLoadBalancing => {
                let counts_e = || tokens.sum_over_micro_batch(&statistics.tokens_per_expert()?);
                let summed = context
                    .expert_counts_summed_over_layers
                    .expect("a step with this loss has counts summed over layers");
                summed.add(context.micro_idx, self.layer_idx, counts_e)?;
                expert_score_sums(logits_ne, statistics)
            }
            RouterLoss::Z => router_z_loss(logits_ne, statistics),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candle_core::{DType, Device, IndexOp};
    use candlewick_ops::{ScoreFunction, Tape, TopKOrder};
    use serde_json::Value;

    use super::super::{RouterLogits, select};
    use super::*;
    use crate::{GlobalExpertCounts, RouterSettings, SingleDevice};

    /// Losses of Megatron-LM, written by `tests/reference/moe_router.py`.
    fn fixture() -> Value {
        serde_json::from_str(include_str!("../../../ops/tests/fixtures/moe_router.json")).unwrap()
    }

    fn matrix(value: &Value) -> Tensor {
        let rows: Vec<Vec<f32>> = serde_json::from_value(value.clone()).unwrap();
        Tensor::new(rows, &Device::Cpu).unwrap()
    }

    fn spec(want: &Value) -> RouterSpec {
        let score = if want["score"] == "softmax" { ScoreFunction::Softmax } else { ScoreFunction::Sigmoid };
        let top_k = want["top_k"].as_u64().unwrap() as usize;
        RouterSpec { top_k, score, order: TopKOrder::ScoreFirst, normalize: false, groups: None, scaling: 1.0 }
    }

    /// Observes the rows `first..first + n_rows` as a micro-batch of packed sequences; the other rows are padding. The
    /// selection has a bias, which losses ignore. Returns the mean over `n_tokens` of the loss, and its gradient.
    fn observed(
        loss: RouterLoss,
        logits: &Tensor,
        spec: RouterSpec,
        [first, n_rows, n_sequences, n_tokens]: [usize; 4],
        counts: (&GlobalExpertCounts, usize),
    ) -> (f64, Tensor) {
        let sequence_of = |row: usize| (row * n_sequences / n_rows) as u32;
        let mark = |row: usize| u32::from((first..first + n_rows).contains(&row));
        let rows = RouterRows {
            token_mask: Some(Tensor::from_iter((0..logits.dim(0).unwrap()).map(mark), &Device::Cpu).unwrap()),
            valid: Some(Tensor::arange(first as u32, (first + n_rows) as u32, &Device::Cpu).unwrap()),
            sequences: Some(Tensor::from_iter((0..n_rows).map(sequence_of), &Device::Cpu).unwrap()),
            tokens: None,
            first_token: 0,
            n_sequences,
        };
        let settings = RouterSettings { losses: vec![loss], ..RouterSettings::default() };
        let (global_counts, micro_idx) = (Some(counts.0), counts.1);
        let (settings, rows) = (&settings, Some(&rows));
        let context = RouterContext { settings, rows, global_counts, micro_idx, ..RouterContext::default() };
        let tape = Tape::record(&[logits], || {
            let bias = Tensor::arange(0f32, logits.dim(1)? as f32, &Device::Cpu)?;
            select(&RouterLogits { layer_idx: 3, logits, bias: Some(&bias), spec }, &context, &SingleDevice)?;
            ops::scale(logits, 1.0, DType::F32)
        })
        .unwrap();
        let mean = f64::from(tape.auxiliary_losses()[0].1.to_scalar::<f32>().unwrap()) / n_tokens as f64;
        let weight = Tensor::new(1.0 / n_tokens as f32, &Device::Cpu).unwrap();
        let grads = tape.backward_with_losses(&logits.zeros_like().unwrap(), &[weight]).unwrap();
        (mean, grads.get(logits).unwrap().clone())
    }

    fn check(want: &Value, (mean, grad): (f64, Tensor)) {
        let value = want["value"].as_f64().unwrap();
        assert!((mean - value).abs() <= 1e-6 * value, "{mean} {value}");
        let want = matrix(&want["grad"]);
        let norm = |x: &Tensor| x.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap().sqrt();
        assert!(norm(&(&grad - &want).unwrap()) <= 2e-6 * norm(&want));
        let padding = grad.i(want.dim(0).unwrap() - 1).unwrap();
        assert_eq!(norm(&padding), 0.0);
    }

    #[test]
    fn the_loss_of_sequences_is_that_of_megatron() {
        let fixture = fixture();
        let logits = matrix(&fixture["logits"]);
        for want in fixture["sequence_load_balancing"].as_array().unwrap() {
            let counts = GlobalExpertCounts::default();
            let found = observed(RouterLoss::SequenceLoadBalancing, &logits, spec(want), [0, 6, 2, 6], (&counts, 0));
            check(want, found);
        }
    }

    #[test]
    fn the_loss_of_the_step_so_far_is_that_of_megatron() {
        let fixture = fixture();
        let logits = matrix(&fixture["logits"]);
        for want in fixture["global_load_balancing"].as_array().unwrap() {
            let counts = GlobalExpertCounts::default();
            let of_micro = |micro_idx: usize| {
                let rows = [3 * micro_idx, 3, 1, 6];
                observed(RouterLoss::GlobalLoadBalancing, &logits, spec(want), rows, (&counts, micro_idx))
            };
            let ([first, second], again) = ([0, 1].map(of_micro), of_micro(0));
            check(want, (first.0 + second.0, (&first.1 + &second.1).unwrap()));
            assert_eq!(first.0, again.0, "a recomputed layer has the counts of its first forward");
        }
    }
}
