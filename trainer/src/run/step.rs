//! One optimizer step: forward and backward over its micro-batches, clipping, AdamW.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use candlewick_comm::sum;
use candlewick_ops::{AdamW, Seqs, derive_key};
use candlewick_parallel::{Engine, LossScale, Micro};

use crate::data::{Batch, Dataset, Step};
use crate::plan::OptimizerPlan;
use crate::recipe::OnNonfinite;

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Outcome {
    /// The mean loss over the step's target tokens.
    pub(super) loss: f64,
    /// The norm of the gradient before clipping.
    pub(super) grad_norm: f64,
    /// Whether the weights stayed as they were, because the loss or the gradient was not finite.
    pub(super) is_skipped: bool,
    /// The time of forward and backward, all micro-batches together.
    pub(super) compute: Duration,
}

/// A loss or gradient that is not finite, and the rows that it came from.
#[derive(Debug, thiserror::Error)]
#[error(
    "failed to take step {step}: the {what} is not finite. {rows}. Lower the learning rate, look at these rows, or set \
     on_nonfinite to skip"
)]
pub struct NonFinite {
    step: usize,
    what: &'static str,
    rows: String,
}

/// The update of a step, resolved.
pub(super) struct Update<'a> {
    pub(super) plan: &'a OptimizerPlan,
    pub(super) on_nonfinite: OnNonfinite,
    /// The learning rate.
    pub(super) lr: f64,
    /// The step's number, counted from 1.
    pub(super) number: usize,
    /// Updates of the weights up to and with this one: the step without those that were skipped.
    pub(super) n_updates: usize,
    /// Chooses what dropout drops in this step.
    pub(super) dropout_key: u64,
}

/// Computes the gradient of `step` and updates the weights with it.
///
/// Every partial sum of losses is scaled by the target tokens of the whole step over all ranks, so that accumulation,
/// packing and padding give one number.
pub(super) fn take(engine: &Engine, dataset: &Dataset, step: &Step, update: &Update) -> Result<Outcome> {
    let n_targets = sum(engine.group(), step.n_targets as f64)?;
    let scale = LossScale::mean_over(n_targets);
    let began = Instant::now();
    engine.store().zero_grads()?;
    let mut sums = Vec::with_capacity(step.micro_batches.len());
    for (micro_idx, batch) in step.micro_batches.iter().enumerate() {
        let key = derive_key(update.dropout_key, micro_idx as u64);
        let micro = micro(batch, engine)?;
        sums.push(engine.forward_backward(&micro, scale, key).context("failed to compute the loss")?);
    }
    let sums = Tensor::stack(&sums, 0)?.to_vec1::<f32>()?;
    let suspects = suspects(step, &sums);
    let loss = sum(engine.group(), sums.iter().copied().map(f64::from).sum())? / n_targets.max(1.0);
    let compute = began.elapsed();
    let grad_norm = engine.store().grad_norm()?;
    let is_skipped = !(loss.is_finite() && grad_norm.is_finite());
    if !is_skipped {
        engine.store().step(&update.hyper(grad_norm))?;
    } else {
        let what = if loss.is_finite() { "gradient" } else { "loss" };
        let rows = locate(dataset, step, &suspects);
        refuse(NonFinite { step: update.number, what, rows }, update.on_nonfinite)?;
    }
    Ok(Outcome { loss, grad_norm, is_skipped, compute })
}

/// The rows of the micro-batches whose loss is not finite.
fn suspects(step: &Step, sums: &[f32]) -> Vec<usize> {
    let batches = step.micro_batches.iter().zip(sums).filter(|(_, sum)| !sum.is_finite());
    batches.flat_map(|(batch, _)| batch.samples.iter().copied()).collect()
}

fn refuse(found: NonFinite, on_nonfinite: OnNonfinite) -> Result<()> {
    match on_nonfinite {
        OnNonfinite::Stop => Err(found.into()),
        OnNonfinite::Skip => {
            tracing::warn!("skipped step {}: the {} is not finite. {}", found.step, found.what, found.rows);
            Ok(())
        }
    }
}

/// Names the rows of a step, or the suspects among them.
fn locate(dataset: &Dataset, step: &Step, suspects: &[usize]) -> String {
    const SHOWN: usize = 5;
    let all: Vec<usize> = step.micro_batches.iter().flat_map(|batch| batch.samples.iter().copied()).collect();
    let rows = if suspects.is_empty() { &all[..] } else { suspects };
    let mut places: Vec<String> = rows.iter().take(SHOWN).map(|&row| dataset.locate(row)).collect();
    if rows.len() > SHOWN {
        places.push(format!("and {} more", rows.len() - SHOWN));
    }
    format!("Its rows: {}", places.join(", "))
}

impl Update<'_> {
    fn hyper(&self, grad_norm: f64) -> AdamW {
        let clip = self.plan.gradient_clipping;
        AdamW {
            lr: self.lr,
            beta1: self.plan.beta1,
            beta2: self.plan.beta2,
            eps: self.plan.eps,
            weight_decay: self.plan.weight_decay,
            step: self.n_updates,
            grad_scale: clip.map_or(1.0, |max| clip_factor(max, grad_norm)),
        }
    }
}

/// The factor of torch's clip_grad_norm_: max / (norm + 1e-6), never above 1.
fn clip_factor(max: f64, norm: f64) -> f64 {
    (max / (norm + 1e-6)).min(1.0)
}

/// Puts a batch on the engine's device.
pub(super) fn micro(batch: &Batch, engine: &Engine) -> Result<Micro> {
    Ok(Micro {
        ids: Tensor::new(batch.ids.as_slice(), engine.device())?,
        targets: Tensor::new(batch.targets.as_slice(), &Device::Cpu)?,
        positions: batch.positions.clone(),
        seqs: Seqs::packed(batch.cu_seqlens.clone())?,
    })
}

#[cfg(test)]
mod tests {
    use super::clip_factor;

    #[test]
    fn clipping_scales_down_and_never_up() {
        assert_eq!(clip_factor(1.0, 0.5), 1.0);
        assert!((clip_factor(1.0, 4.0) - 0.25).abs() < 1e-6);
        assert_eq!(clip_factor(1.0, 0.0), 1.0);
    }
}
