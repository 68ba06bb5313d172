//! Next-token prediction.

use candle_core::Result;

use super::{MicroLoss, Objective, TokenLosses};

/// Cross-entropy of the next token: all tokens with a target have the same weight.
#[derive(Clone, Copy, Debug, Default)]
pub struct CausalLm;

impl Objective for CausalLm {
    fn loss(&self, _: &TokenLosses<'_>) -> Result<MicroLoss> {
        Ok(MicroLoss::SumOfTokens)
    }
}
