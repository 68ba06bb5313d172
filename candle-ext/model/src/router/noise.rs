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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::{RouterRows, RouterSettings};

    /// Position of a router's noise: layer, micro-batch and first token of the rank.
    #[derive(Clone, Copy)]
    struct NoisePosition {
        layer_idx: usize,
        noise_key: u64,
        first_token: u64,
    }

    const FIRST: NoisePosition = NoisePosition { layer_idx: 1, noise_key: 5, first_token: 0 };
    const OTHER_LAYER: NoisePosition = NoisePosition { layer_idx: 2, ..FIRST };
    const OTHER_MICRO_BATCH: NoisePosition = NoisePosition { noise_key: 6, ..FIRST };
    const OTHER_RANK: NoisePosition = NoisePosition { first_token: 4, ..FIRST };

    /// Returns the noise of four tokens with eight experts, where input and logits are 1.
    fn noise(settings: &RouterSettings, at: NoisePosition) -> Vec<f32> {
        let ones = Tensor::ones((4, 8), DType::F32, &Device::Cpu).unwrap();
        let tokens = Some(Tensor::arange(0u32, 4, &Device::Cpu).unwrap());
        let NoisePosition { layer_idx, noise_key, first_token } = at;
        let rows = RouterRows { valid: None, token_mask: None, sequences: None, tokens, first_token, n_sequences: 1 };
        let context = RouterContext { settings, rows: Some(&rows), noise_key, ..RouterContext::default() };
        let noise = match settings.forced_load {
            ForcedExpertLoad::None => context.jittered(&ones, layer_idx),
            _ => context.forced(&ones, layer_idx),
        };
        noise.unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn layers_and_micro_batches_draw_other_factors_of_the_jitter() {
        let settings = RouterSettings { input_jitter_eps: 0.25, ..RouterSettings::default() };
        assert_ne!(noise(&settings, FIRST), noise(&settings, OTHER_LAYER));
        assert_ne!(noise(&settings, FIRST), noise(&settings, OTHER_MICRO_BATCH));
        // A factor depends on the token, which a rank knows.
        assert_eq!(noise(&settings, FIRST), noise(&settings, OTHER_RANK));
    }

    #[test]
    fn layers_micro_batches_and_ranks_draw_other_random_logits() {
        let settings = RouterSettings { forced_load: ForcedExpertLoad::Random, ..RouterSettings::default() };
        for other in [OTHER_LAYER, OTHER_MICRO_BATCH, OTHER_RANK] {
            assert_ne!(noise(&settings, FIRST), noise(&settings, other));
        }
        assert_eq!(noise(&settings, FIRST), noise(&settings, FIRST));
    }

    #[test]
    fn a_skewed_load_differs_by_layer_alone() {
        let forced_load = ForcedExpertLoad::Biased { std: 2.0 };
        let settings = RouterSettings { forced_load, ..RouterSettings::default() };
        assert_ne!(noise(&settings, FIRST), noise(&settings, OTHER_LAYER));
        for other in [OTHER_MICRO_BATCH, OTHER_RANK] {
            assert_eq!(noise(&settings, FIRST), noise(&settings, other));
        }
    }
}
