//! Held-out loss: the mean over target tokens, however they fall into batches.

use anyhow::{Context, Result};
use candlewick_comm::{Collective, sum};
use candlewick_parallel::{Engine, Micro};
use serde::Serialize;

/// The loss on data that was not trained on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct EvalLoss {
    /// Mean negative log-likelihood of a target token, in nats.
    pub loss: f64,
    /// The number of target tokens.
    pub n_targets: usize,
}

impl EvalLoss {
    /// e to the loss.
    pub fn perplexity(&self) -> f64 {
        self.loss.exp()
    }
}

/// What this rank has added up so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct EvalLossSum {
    loss: f64,
    n_targets: usize,
}

impl EvalLossSum {
    /// Adds a micro-batch with `n_targets` targets, and returns the sum of its losses. All ranks call it as often.
    pub fn add(&mut self, engine: &Engine, micro: &Micro, n_targets: usize) -> Result<f64> {
        let loss = engine.loss(micro).context("failed to compute the held-out loss")?;
        self.loss += loss;
        self.n_targets += n_targets;
        Ok(loss)
    }

    /// Returns the loss over all micro-batches of all ranks, weighted by target tokens. Without any target it is NaN.
    pub fn over_ranks(self, ranks: &dyn Collective) -> Result<EvalLoss> {
        let (loss, n_targets) = (sum(ranks, self.loss)?, sum(ranks, self.n_targets as f64)?);
        Ok(EvalLoss { loss: loss / n_targets, n_targets: n_targets as usize })
    }
}
