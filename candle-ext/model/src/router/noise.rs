//! Noise of routers: jitter of the input, and forced loads.

use candle_core::{Result, Tensor};
use candlewick_ops::{InputJitter, biased_logits, derive_key, input_jitter, random_logits};

use super::{ForcedExpertLoad, RouterContext};

/// Seed of the numbers of [`ForcedExpertLoad::Biased`], which all ranks and steps share.
const BIASED_LOAD: u64 = 0x6d6f_6500;

impl RouterContext<'_> {
    /// Applies the jitter to a router's input [t, d]. The factors do not depend on the mesh.
    pub(crate) fn jittered(&self, x_td: &Tensor, layer_idx: usize) -> Result<Tensor> {
        match self.rows.and_then(|rows| rows.tokens.as_ref()) {
            Some(tokens) => {
                let spec = InputJitter { eps: self.settings.input_jitter_eps, key: self.layer_key(layer_idx) };
                input_jitter(x_td, spec, tokens)
            }
            None => Ok(x_td.clone()),
        }
    }

    /// Returns the logits [t, e] of a benchmark with a forced load, and the model's otherwise.
    pub(crate) fn forced(&self, logits_te: &Tensor, layer_idx: usize) -> Result<Tensor> {
        match (self.settings.forced_load, self.rows) {
            (ForcedExpertLoad::Random, Some(rows)) => {
                random_logits(logits_te, derive_key(self.layer_key(layer_idx), rows.first_token))
            }
            (ForcedExpertLoad::Biased { std }, Some(_)) => {
                biased_logits(logits_te, std, derive_key(BIASED_LOAD, layer_idx as u64))
            }
            _ => Ok(logits_te.clone()),
        }
    }

    fn layer_key(&self, layer_idx: usize) -> u64 {
        derive_key(self.noise_key, layer_idx as u64)
    }
}
