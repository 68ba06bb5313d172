//! Training objectives: the loss of a micro-batch as a function of its token losses, and auxiliary losses.

mod causal;

use std::cell::OnceCell;

use candle_core::{Result, Tensor};

use crate::batch::Micro;

pub use causal::CausalLm;

/// Loss function of a training step.
pub trait Objective: Send + Sync {
    /// Returns the loss of a micro-batch.
    ///
    /// Objectives that read no token losses need one pass over the output layer, others two.
    fn loss(&self, tokens: &TokenLosses<'_>) -> Result<MicroLoss>;
}

/// Loss of a micro-batch before normalization.
#[derive(Clone, Debug)]
pub enum MicroLoss {
    /// Sum of the token losses.
    SumOfTokens,
    /// A differentiable function of the token losses.
    Weighted {
        /// Loss, an f32 scalar on the engine's device.
        loss: Tensor,
        /// Derivatives of the loss with respect to each token loss, f32 [t] on the engine's device.
        weights: Tensor,
    },
}

/// Token losses of one micro-batch, computed on first use.
pub struct TokenLosses<'a> {
    micro: &'a Micro,
    compute: &'a dyn Fn() -> Result<Tensor>,
    losses: OnceCell<Tensor>,
}

impl<'a> TokenLosses<'a> {
    pub(crate) fn new(micro: &'a Micro, compute: &'a dyn Fn() -> Result<Tensor>) -> Self {
        Self { micro, compute, losses: OnceCell::new() }
    }

    /// Returns the whole micro-batch, even if context parallel ranks split it. Padding is a sequence without targets.
    pub fn micro(&self) -> &Micro {
        self.micro
    }

    /// Returns the cross-entropy of each target under the current weights, f32 [t]: -log p, or with label smoothing that
    /// loss. It is 0 where there is no target.
    ///
    /// Collective: all ranks that split the micro-batch must call it.
    pub fn losses(&self) -> Result<Tensor> {
        if let Some(losses) = self.losses.get() {
            return Ok(losses.clone());
        }
        let losses = (self.compute)()?;
        Ok(self.losses.get_or_init(|| losses).clone())
    }
}

/// An auxiliary loss that layers compute, such as a load-balancing loss.
#[derive(Clone, Debug, PartialEq)]
pub struct AuxiliaryLoss {
    /// Name of the loss in layers and metrics.
    pub name: String,
    /// Coefficient of its mean.
    pub coefficient: f64,
    /// Divisor of its sum over layers, micro-batches and ranks, such as the step's tokens.
    pub normalizer: f64,
}

impl AuxiliaryLoss {
    /// Returns the mean of a sum of this loss.
    pub(crate) fn mean(&self, sum: f64) -> f64 {
        sum / self.normalizer.max(1.0)
    }
}
