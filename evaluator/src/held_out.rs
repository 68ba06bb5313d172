//! Held-out loss: the mean over target tokens, however they fall into batches.

use anyhow::{Context, Result};
use candlewick_comm::sum;
use candlewick_parallel::{Engine, Micro};
use serde::Serialize;

/// The loss on data that was not trained on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct HeldOut {
    /// Mean negative log-likelihood of a target token, in nats.
    pub loss: f64,
    /// The number of target tokens.
    pub n_targets: usize,
}

impl HeldOut {
    /// e to the loss.
    pub fn perplexity(&self) -> f64 {
        self.loss.exp()
    }
}

/// Returns the loss over all micro-batches of all ranks, weighted by target tokens. Without any target it is NaN.
///
/// `batches` yields each micro-batch with its number of targets.
pub fn held_out_loss(engine: &Engine, batches: impl Iterator<Item = Result<(Micro, usize)>>) -> Result<HeldOut> {
    let (mut total, mut n_targets) = (0.0, 0);
    for batch in batches {
        let (micro, n) = batch?;
        if n > 0 {
            total += engine.loss(&micro).context("failed to compute the held-out loss")?;
            n_targets += n;
        }
    }
    let total = sum(engine.group(), total)?;
    let n_targets = sum(engine.group(), n_targets as f64)?;
    Ok(HeldOut { loss: total / n_targets, n_targets: n_targets as usize })
}
