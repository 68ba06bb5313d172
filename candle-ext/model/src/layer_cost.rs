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
        self.saved_until_mlp() + self.mlp().saved
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
        (self.around_mlp() + self.mlp().forward).max(of_mixer) + mixer.until_forward_ends
    }

    /// Returns the peak bytes of a recorded forward of the MLP with the saved activations, excluding the input.
    pub fn recorded_forward_bytes(&self) -> u64 {
        self.around_mlp() + self.mlp().recorded_forward + self.mixer().saved
    }

    /// Returns the peak bytes of a backward with its saved activations, excluding the output's gradient.
    pub fn backward_bytes(&self) -> u64 {
        let (mixer, mlp) = (self.mixer(), self.mlp());
        let of_mlp = self.saved_until_mlp() + mlp.backward;
        let end_of_mlp = self.activation_bytes() + mixer.saved + mlp.end_of_backward;
        of_mlp.max(end_of_mlp).max(mixer.backward) + self.sizes.sublayer_bytes()
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

    /// Returns the bytes saved up to the MLP: the layer's output, those of the mixer, and the residual sum.
    fn saved_until_mlp(&self) -> u64 {
        let sum = self.sizes.n_residual_tokens * self.sizes.hidden_size as u64;
        self.activation_bytes() + self.mixer().saved + rms_norm_cost(sum, self.sizes.residual).saved_bytes
    }
}
