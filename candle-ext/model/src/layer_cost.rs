//! Memory estimate of a decoder layer: activations saved for backward, and peak bytes of forward and backward.
//!
//! Mixer and MLP declare their own ([`MixerCost`], [`MlpCost`]). The layer adds norms, residual sums and the buffers of tensor
//! parallelism.

use candlewick_ops::{GemmSize, rms_norm_cost};

use crate::{LayerSizes, LayerSpec, MixerCost, MlpCost};

/// A decoder layer with its sizes on one rank, from which activation memory is estimated.
#[derive(Clone, Copy, Debug)]
pub struct LayerCost<'a> {
    /// Specification of the unsharded layer.
    pub layer: &'a LayerSpec,
    /// Sizes on this rank.
    pub sizes: LayerSizes,
}

impl LayerCost<'_> {
    /// Returns the sizes in evaluation, where experts have no capacity.
    pub fn in_evaluation(self) -> Self {
        Self { sizes: LayerSizes { padded_capacity_factor: None, ..self.sizes }, ..self }
    }

    /// Returns the bytes of the layer's input, which equal those of its output and of their gradients.
    pub fn activation_bytes(&self) -> u64 {
        self.sizes.activation_bytes()
    }

    /// Returns the bytes of `n_tokens` tokens that the mixer keeps between forwards, such as keys and values, at `n_bytes` bytes
    /// an element.
    pub fn state_bytes(&self, n_tokens: u64, n_bytes: u64) -> u64 {
        n_tokens * self.mixer().state_elements * n_bytes
    }

    /// Returns the bytes of activations saved for backward, including the output and excluding the input.
    ///
    /// Outputs of norms, gated activations and dropout are recomputed.
    pub fn saved_bytes(&self) -> u64 {
        self.saved_until_mlp() + self.mlp().saved + self.saved_by_norm_after()
    }

    /// Returns the bytes that selective activation checkpointing saves: attention's output and log-sum-exp.
    pub fn selective_bytes(&self) -> u64 {
        self.mixer().saved_by_selective
    }

    /// Returns the bytes that every activation checkpointing saves: a router's selection.
    pub fn always_saved_bytes(&self) -> u64 {
        self.mlp().saved_by_all
    }

    /// Returns the peak bytes of a forward without autograd, excluding the input.
    pub fn forward_bytes(&self) -> u64 {
        let mixer = self.mixer();
        let of_mixer = self.sizes.sublayer_bytes() + mixer.forward;
        (self.around_mlp() + self.mlp().forward).max(of_mixer) + mixer.until_forward_ends + self.changed_output_bytes()
    }

    /// Returns the peak bytes of a recorded forward of the MLP with the saved activations, excluding the input.
    pub fn recorded_forward_bytes(&self) -> u64 {
        let norm_after = self.saved_by_norm_after() + self.changed_output_bytes();
        self.around_mlp() + self.mlp().recorded_forward + self.mixer().saved + norm_after
    }

    /// Returns the peak bytes of a backward with its saved activations, excluding the output's gradient.
    pub fn backward_bytes(&self) -> u64 {
        let (mixer, mlp) = (self.mixer(), self.mlp());
        let of_mlp = self.saved_until_mlp() + mlp.backward;
        let end_of_mlp = self.activation_bytes() + mixer.saved + mlp.end_of_backward;
        let worst = of_mlp.max(end_of_mlp).max(mixer.backward);
        worst + self.sizes.sublayer_bytes() + self.changed_output_bytes()
    }

    /// Returns the bytes of the RoPE tables, which all layers share.
    pub fn rope_bytes(&self) -> u64 {
        self.mixer().rope
    }

    /// Returns the GEMM sizes of the MLP, forward and backward.
    pub fn mlp_matmuls(&self) -> [GemmSize; 3] {
        self.mlp().matmuls
    }

    /// Returns the bytes of the copies of rows and weights that the CPU's threads make for the experts' matmuls, and keep.
    pub fn kept_by_threads(&self) -> u64 {
        self.mlp().kept_by_threads
    }

    fn mixer(&self) -> MixerCost {
        self.layer.mixer.cost(&self.sizes)
    }

    fn mlp(&self) -> MlpCost {
        self.layer.mlp.cost(&self.sizes)
    }

    /// Returns the bytes around the MLP's forward: the mixer's output, the residual sum, the output, and the output of the norm.
    fn around_mlp(&self) -> u64 {
        let sizes = &self.sizes;
        let residual = self.activation_bytes() + 2 * sizes.output_bytes() + sizes.sublayer_bytes();
        residual + sizes.n_tokens * sizes.n_bytes() * sizes.hidden_size as u64
    }

    /// Returns the bytes saved up to the MLP: the layer's output, those of the mixer and the norm after it, and the residual sum.
    fn saved_until_mlp(&self) -> u64 {
        let sum = self.sizes.n_residual_tokens * self.sizes.hidden_size as u64;
        let sum = rms_norm_cost(sum, self.sizes.residual).saved_bytes;
        self.activation_bytes() + self.mixer().saved + sum + self.saved_by_norm_after()
    }

    /// Returns the bytes that the norm after one sublayer saves; zero without norms after sublayers.
    fn saved_by_norm_after(&self) -> u64 {
        let n = self.sizes.n_residual_tokens * self.sizes.hidden_size as u64;
        if self.layer.norms.is_after() { rms_norm_cost(n, self.sizes.dtype).saved_bytes } else { 0 }
    }

    /// Returns the bytes of a second copy of a sublayer's output, or of its gradient; zero if the layer adds the output as it is.
    fn changed_output_bytes(&self) -> u64 {
        let is_changed = self.layer.norms.is_after() || self.layer.residual_scale != 1.0;
        if is_changed { self.sizes.output_bytes() } else { 0 }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{Config, NormPlacement};

    /// Returns the bytes of saved activations, forward and backward of a layer with 10 tokens of 8 elements.
    fn bytes(norms: NormPlacement, residual_scale: f64) -> [u64; 3] {
        let config = serde_json::json!({
            "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 12,
            "num_attention_heads": 2, "vocab_size": 16,
        });
        let layer = LayerSpec { norms, residual_scale, ..Config::from_json(config).unwrap().layer(0) };
        let sizes = LayerSizes::of_ten_tokens();
        let cost = LayerCost { layer: &layer, sizes };
        [cost.saved_bytes(), cost.forward_bytes(), cost.backward_bytes()]
    }

    #[test]
    fn norms_after_sublayers_save_their_inputs_and_a_residual_scale_copies_outputs() {
        let [saved, forward, backward] = bytes(NormPlacement::Pre, 1.0);
        let output = 10 * 8 * 4;
        assert_eq!(bytes(NormPlacement::Pre, 0.5), [saved, forward + output, backward + output]);
        for norms in [NormPlacement::Post, NormPlacement::Sandwich] {
            let [more_saved, more_forward, more_backward] = bytes(norms, 1.0);
            assert_eq!([more_saved, more_forward], [saved + 2 * output, forward + output]);
            assert!((backward + output..=backward + 3 * output).contains(&more_backward), "{more_backward} {backward}");
        }
    }
}
