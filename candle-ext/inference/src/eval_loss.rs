//! Evaluation loss: the mean over target tokens, independent of batching.

use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use candlewick_comm::{Collective, Reduce, sum};
use candlewick_ops::to_host;
use candlewick_parallel::{Engine, Micro};
use serde::Serialize;

/// Loss on evaluation data.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct EvalLoss {
    /// Mean negative log-likelihood per target token, in nats.
    pub loss: f64,
    /// Number of target tokens.
    pub n_targets: usize,
}

impl EvalLoss {
    /// Adds up the losses of sequences in their order. `own` has a loss for each sequence, 0 for those that other ranks
    /// computed, so the result does not depend on the division. Collective: all ranks must call it.
    pub(crate) fn of_sequences(own: Vec<f64>, n_targets: usize, ranks: &dyn Collective) -> Result<Self> {
        if own.is_empty() {
            return Ok(Self { loss: f64::NAN, n_targets });
        }
        let losses = ranks.all_reduce(&Tensor::new(own, &Device::Cpu)?, Reduce::Sum)?;
        let losses = to_host(&losses)?.to_vec1::<f64>()?;
        Ok(Self { loss: losses.iter().sum::<f64>() / n_targets as f64, n_targets })
    }

    /// Returns the perplexity, exp(loss).
    pub fn perplexity(&self) -> f64 {
        self.loss.exp()
    }
}

/// Running sum of evaluation losses on this rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct EvalLossSum {
    loss: f64,
    n_targets: usize,
}

impl EvalLossSum {
    /// Adds a micro-batch with `n_targets` targets, and returns the sum of its losses. Collective: all ranks must call
    /// it equally often.
    pub fn add(&mut self, engine: &Engine, micro: &Micro, n_targets: usize) -> Result<f64> {
        let loss = engine.loss(micro).context("failed to compute the held-out loss")?;
        self.loss += loss;
        self.n_targets += n_targets;
        Ok(loss)
    }

    /// Returns the loss over all micro-batches of all ranks, weighted by target tokens; NaN without targets.
    pub fn over_ranks(self, ranks: &dyn Collective) -> Result<EvalLoss> {
        let (loss, n_targets) = (sum(ranks, self.loss)?, sum(ranks, self.n_targets as f64)?);
        Ok(EvalLoss { loss: loss / n_targets, n_targets: n_targets as usize })
    }
}
