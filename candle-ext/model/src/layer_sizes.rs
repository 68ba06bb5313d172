//! Sizes of a decoder layer on one rank, from which the sublayers compute their memory.

use candle_core::DType;
use candlewick_ops::{AttentionImpl, DeviceKind, LinearCost, LinearInput, TiledCost, dropout_backward_cost, tile_rows};

use crate::{ExpertExchange, LinearSpec, RouterDtype, TiledMlp};

/// Sizes of a decoder layer on one rank.
#[derive(Clone, Copy, Debug)]
pub struct LayerSizes {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Tensor parallel size.
    pub n_slices: usize,
    /// Tokens of a micro-batch (t).
    pub n_tokens: u64,
    /// Tokens of the residual stream on this rank (o): t, or t / tensor parallel size under sequence parallelism.
    pub n_residual_tokens: u64,
    /// Length of the longest packed sequence, in tokens.
    pub longest: u64,
    /// Dtype of forward and backward.
    pub dtype: DType,
    /// Dtype of the residual stream: `dtype`, or f32.
    pub residual: DType,
    /// Dtype of the base weights' gradients; `None` if the base weights are frozen.
    pub grad: Option<DType>,
    /// Device that computes.
    pub device: DeviceKind,
    /// Attention implementation.
    pub attention: AttentionImpl,
    /// Tiling of the MLP.
    pub tiled_mlp: TiledMlp,
    /// Buffers of context parallel attention.
    pub exchange: AttentionExchange,
    /// Exchange of tokens between the ranks of the experts.
    pub experts: ExpertExchange,
    /// Number of ranks that split the weights of the experts.
    pub n_expert_ranks: usize,
    /// Factor of the capacity to which experts are padded; `None` for a balanced load without padding.
    pub padded_capacity_factor: Option<f64>,
    /// Dtype of the router's matmuls.
    pub router: RouterDtype,
    /// FP8 copies of the gradient of an output: 2 if the gradients of weight and input read other blocks, else 1.
    pub fp8_grad_copies: u64,
}

/// Buffers that attention allocates to exchange keys and values under context parallelism.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttentionExchange {
    /// Peak bytes in forward.
    pub forward_bytes: u64,
    /// Peak bytes in backward.
    pub backward_bytes: u64,
}

impl LayerSizes {
    /// Returns the bytes of the layer's input, which equal those of its output and of their gradients.
    pub fn activation_bytes(&self) -> u64 {
        self.n_residual_tokens * self.hidden_size as u64 * self.residual.size_in_bytes() as u64
    }

    /// Returns the bytes of a sublayer's output in the compute dtype, for the tokens of the residual stream.
    pub fn output_bytes(&self) -> u64 {
        self.n_residual_tokens * self.hidden_size as u64 * self.n_bytes()
    }

    /// Returns the bytes of the copy of the output's gradient in the compute dtype; zero if the residual stream has that dtype.
    ///
    /// The first op of the MLP's backward reads it. Of the later peaks, only those of tiles and of a shared expert have it.
    pub fn rounded_grad_bytes(&self) -> u64 {
        if self.residual == self.dtype { 0 } else { self.output_bytes() }
    }

    /// Returns the bytes of an element in the compute dtype.
    pub fn n_bytes(&self) -> u64 {
        self.dtype.size_in_bytes() as u64
    }

    /// Returns the bytes of a gathered sublayer input or output; zero without tensor parallelism.
    pub fn sublayer_bytes(&self) -> u64 {
        if self.n_slices > 1 { self.n_tokens * self.hidden_size as u64 * self.n_bytes() } else { 0 }
    }

    /// Returns the cost of a linear layer with these features on this rank.
    pub fn linear(
        &self,
        n_tokens: u64,
        [n_in, n_out]: [u64; 2],
        (spec, input): (&LinearSpec, LinearInput),
    ) -> LinearCost {
        let (dtype, device, grad, storage) = (self.dtype, self.device, self.grad, spec.storage);
        let fp8 = spec.fp8.then_some(self.fp8_grad_copies);
        LinearCost { n_tokens, n_in, n_out, dtype, device, input, grad, storage, fp8 }
    }

    /// Returns the cost of a tiled MLP; `None` if tiling is off.
    pub fn tiled(&self) -> Option<TiledCost> {
        let (d, t) = (self.hidden_size, self.n_tokens);
        let tile_rows = tile_rows(t as usize, d) as u64;
        let cost = TiledCost { n_rows: t, tile_rows, width: d as u64, dtype: self.dtype };
        (self.tiled_mlp == TiledMlp::On).then_some(cost)
    }

    /// Returns the bytes of the outputs of LoRA's A, which B's backward reads.
    pub fn adapters_saved(&self, rows: u64, linears: Vec<&LinearSpec>) -> u64 {
        let adapters = linears.into_iter().filter_map(|linear| linear.adapter.as_ref());
        adapters.map(|adapter| rows * self.n_bytes() * adapter.r as u64).sum()
    }

    /// Returns the scratch bytes of the backward of linear layers that read one input.
    ///
    /// The input is recomputed if a weight or a LoRA factor needs it. LoRA dropout allocates a masked copy.
    pub fn linears_backward(&self, rows: u64, sizes: [u64; 2], linears: &[LinearSpec]) -> u64 {
        let adapters = || linears.iter().filter_map(|linear| linear.adapter.as_ref());
        let is_read = self.grad.is_some() || adapters().next().is_some();
        let input = if is_read { LinearInput::Recomputed } else { LinearInput::Unused };
        let dropped = if adapters().any(|adapter| adapter.dropout > 0.0) { rows * sizes[0] } else { 0 };
        let dropout = dropout_backward_cost(dropped, self.dtype).scratch_bytes;
        self.linear(rows, sizes, (&linears[0], input)).backward().scratch_bytes + dropout
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{AdapterSpec, Config};

    impl LayerSizes {
        /// Returns the sizes of a layer with 10 tokens of 8 elements, on one rank.
        pub(crate) fn of_ten_tokens() -> Self {
            Self {
                hidden_size: 8,
                n_slices: 1,
                n_tokens: 10,
                n_residual_tokens: 10,
                longest: 10,
                dtype: DType::F32,
                residual: DType::F32,
                grad: None,
                device: DeviceKind::Cpu,
                attention: AttentionImpl::Auto,
                tiled_mlp: TiledMlp::Off,
                exchange: AttentionExchange::default(),
                experts: ExpertExchange::None,
                n_expert_ranks: 1,
                padded_capacity_factor: None,
                router: RouterDtype::F32,
                fp8_grad_copies: 1,
            }
        }
    }

    #[track_caller]
    fn check_linear(dropout: f64, want: u64) {
        let config = serde_json::json!({
            "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 12,
            "num_attention_heads": 2, "vocab_size": 16,
        });
        let mlp = Config::from_json(config).unwrap().dense_mlp(0);
        let cost = LayerSizes::of_ten_tokens();
        let adapter = AdapterSpec { module: mlp.down.module.clone(), r: 2, scaling: 1.0, dropout };
        let down = LinearSpec { adapter: Some(adapter), ..mlp.down.clone() };
        assert_eq!(cost.linears_backward(10, [12, 8], &[down]), want);
        assert_eq!(cost.linears_backward(10, [12, 8], std::slice::from_ref(&mlp.down)), 0);
    }

    #[test]
    fn an_adapter_recomputes_its_input_and_dropout_a_masked_copy() {
        check_linear(0.0, 10 * 12 * 4);
        check_linear(0.1, 2 * 10 * 12 * 4);
    }
}
