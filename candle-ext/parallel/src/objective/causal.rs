//! Next-token prediction.

use candle_core::Result;

use super::{MicroLoss, Objective, TokenLosses};

/// Causal language modeling: cross-entropy of the next token, with equal weight for each target token.
#[derive(Clone, Copy, Debug, Default)]
pub struct CausalLm;

impl Objective for CausalLm {
    fn loss(&self, _: &TokenLosses<'_>) -> Result<MicroLoss> {
        Ok(MicroLoss::SumOfTokens)
    }
}
