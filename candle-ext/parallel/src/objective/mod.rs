//! Training objectives: the loss of a micro-batch as a function of the losses of its tokens, and auxiliary losses.

mod causal;

use std::cell::OnceCell;

use candle_core::{Result, Tensor};

use crate::engine::Micro;

pub use causal::CausalLm;

/// The loss that a step minimises.
pub trait Objective: Send + Sync {
    /// Returns the loss of a micro-batch.
    ///
    /// An objective that reads no token losses costs one pass over the output layer. One that reads them costs two.
    fn loss(&self, tokens: &TokenLosses<'_>) -> Result<MicroLoss>;
}

/// The loss of a micro-batch before normalisation.
#[derive(Clone, Debug)]
pub enum MicroLoss {
    /// The sum of the token losses.
    SumOfTokens,
    /// A function of the token losses.
    Weighted {
        /// The loss, an f32 scalar on the engine's device.
        loss: Tensor,
        /// Derivatives of the loss by the loss of each token, f32 [t] on the engine's device.
        weights: Tensor,
    },
}

/// The token losses of one micro-batch, computed when an objective reads them.
pub struct TokenLosses<'a> {
    micro: &'a Micro,
    compute: &'a dyn Fn() -> Result<Tensor>,
    losses: OnceCell<Tensor>,
}

impl<'a> TokenLosses<'a> {
    pub(crate) fn new(micro: &'a Micro, compute: &'a dyn Fn() -> Result<Tensor>) -> Self {
        Self { micro, compute, losses: OnceCell::new() }
    }

    /// Returns the whole micro-batch, also where ranks share its tokens. Padding is a sequence without targets.
    pub fn micro(&self) -> &Micro {
        self.micro
    }

    /// Returns -log p of each target under the current weights, f32 [t], and 0 where there is no target.
    ///
    /// All ranks that share the micro-batch must call it alike.
    pub fn losses(&self) -> Result<Tensor> {
        if let Some(losses) = self.losses.get() {
            return Ok(losses.clone());
        }
        let losses = (self.compute)()?;
        Ok(self.losses.get_or_init(|| losses).clone())
    }
}

/// The share of an auxiliary loss, which layers compute, in the gradient.
#[derive(Clone, Debug, PartialEq)]
pub struct AuxiliaryLoss {
    /// The name that layers give it and that metrics show.
    pub name: String,
    /// The factor on its mean.
    pub coefficient: f64,
    /// The number that its sum over layers, micro-batches and ranks is divided by, such as the tokens of the step.
    pub normalizer: f64,
}

impl AuxiliaryLoss {
    /// Returns the mean of a sum of this loss.
    pub(crate) fn mean(&self, sum: f64) -> f64 {
        sum / self.normalizer.max(1.0)
    }
}
