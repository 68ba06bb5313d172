//! Memory estimate of a decoder layer: activations saved for backward, and peak bytes of forward and backward.
//!
//! Dimensions: t tokens, d hidden size, s bytes of an element. Under sequence parallelism, o < t tokens are in the
//! residual stream, else o = t. q, kv and f are this rank's widths of queries, KV heads and the MLP.

mod moe;

use candle_core::DType;
use candlewick_ops::{
    AttentionCost, AttentionHeads, AttentionImpl, DeviceKind, GemmSize, LinearCost, LinearInput, TiledCost,
    dropout_backward_cost, rms_norm_cost, rope_cost, swiglu_cost, tile_rows,
};

use crate::experts_cost::{ExpertExchange, ExpertsCost, SharedExpertBytes};
use crate::{LayerSpec, LinearSpec, MixerSpec, QkNorm, RouterDtype, SelfAttentionSpec, TiledMlp};

/// Sizes of a decoder layer on one rank, from which activation memory is estimated.
#[derive(Clone, Copy, Debug)]
pub struct LayerCost<'a> {
    /// Specification of the unsharded layer.
    pub layer: &'a LayerSpec,
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

/// Elements of a token on this rank.
struct Widths {
    d: u64,
    q: u64,
    kv: u64,
    f: u64,
}

impl LayerCost<'_> {
    /// Returns the sizes in evaluation, where experts have no capacity.
    pub fn in_evaluation(self) -> Self {
        Self { padded_capacity_factor: None, ..self }
    }

    /// Returns the bytes of the layer's input, which equal those of its output and of their gradients.
    pub fn activation_bytes(&self) -> u64 {
        self.n_residual_tokens * self.widths().d * self.residual.size_in_bytes() as u64
    }

    /// Returns the bytes of a sublayer's output in the compute dtype, for the tokens of the residual stream.
    fn output_bytes(&self) -> u64 {
        self.n_residual_tokens * self.widths().d * self.n_bytes()
    }

    /// Returns the bytes of the copy of the output's gradient in the compute dtype; zero if the residual stream has that dtype.
    ///
    /// The first op of the MLP's backward reads it. Of the later peaks, only those of tiles and of a shared expert have it.
    fn rounded_grad_bytes(&self) -> u64 {
        if self.residual == self.dtype { 0 } else { self.output_bytes() }
    }

    /// Returns the bytes of keys and values of `n_tokens` tokens, at `n_bytes` bytes an element.
    pub fn kv_bytes(&self, n_tokens: u64, n_bytes: u64) -> u64 {
        n_tokens * 2 * self.widths().kv * n_bytes
    }

    /// Returns the bytes of activations saved for backward, including the output and excluding the input.
    ///
    /// Outputs of norms, gated activations and dropout are recomputed.
    pub fn saved_bytes(&self) -> u64 {
        self.saved_until_attention() + self.saved_after_attention()
    }

    /// Returns the bytes of attention's output and log-sum-exp, which selective activation checkpointing saves.
    pub fn attention_output_bytes(&self) -> u64 {
        self.attention_cost().replay_bytes()
    }

    /// Returns the peak bytes of a forward without autograd, excluding the input.
    pub fn forward_bytes(&self) -> u64 {
        let (Widths { d, q, kv, .. }, t, s) = (self.widths(), self.n_tokens, self.n_bytes());
        let qkv = self.sublayer_bytes() + t * s * (d + 2 * q + 2 * kv);
        let attention = qkv + self.attention_cost().forward().scratch_bytes + self.exchange.forward_bytes;
        self.mlp_forward(ExpertsCost::forward_bytes_with).max(attention)
            + self.attention_cost().reference_forward_bytes()
    }

    /// Returns the peak bytes of a recorded forward of the MLP with the saved activations, excluding the input. Beyond those,
    /// the outputs of the norm, of the experts and of their permutation exist until the forward ends.
    pub fn recorded_forward_bytes(&self) -> u64 {
        // Both terms have an output of the residual stream: attention's projection.
        self.mlp_forward(ExpertsCost::recorded_forward_bytes_with) + self.saved_until_attention()
            - self.activation_bytes()
    }

    /// Returns the peak bytes of the MLP's forward, with the residual stream and `of_experts`.
    fn mlp_forward(&self, of_experts: fn(&ExpertsCost, SharedExpertBytes) -> u64) -> u64 {
        let (Widths { d, f, .. }, t, s) = (self.widths(), self.n_tokens, self.n_bytes());
        let (u, tile) = self.tiled().map_or((t, 0), |tiled| (tiled.tile_rows, tiled.forward().scratch_bytes));
        let down = self
            .layer
            .mlp
            .swiglu()
            .map_or(0, |mlp| self.linear(u, [f, d], (&mlp.down, LinearInput::Unused)).forward().scratch_bytes);
        // Attention's projection, the residual sum, and the output.
        let residual = self.activation_bytes() + 2 * self.output_bytes() + self.sublayer_bytes();
        let dense = u * s * 3 * f + tile + down;
        let shared = self.layer.mlp.swiglu().map(|_| SharedExpertBytes {
            peak: dense,
            output: t * s * d,
            ungated: self.ungated_bytes(),
            started: self.started_bytes(),
        });
        let adapters = self.expert_adapters().map_or(0, |adapters| adapters.forward_bytes());
        let routed = self.experts().map_or(0, |experts| of_experts(&experts, shared.unwrap_or_default()) + adapters);
        residual + t * s * d + dense.max(routed).max(self.router_forward())
    }

    /// Returns the peak bytes of a backward with its saved activations, excluding the output's gradient.
    pub fn backward_bytes(&self) -> u64 {
        let (Widths { d, q, kv, .. }, t, s) = (self.widths(), self.n_tokens, self.n_bytes());
        let mlp = match self.tiled() {
            None => (self.saved_bytes() + self.dense_backward()).max(self.experts_backward()),
            // The gradient of the MLP's input, and a tile's tape, output and input gradient.
            Some(tiled) => {
                let dense = t * s * d + tiled.backward().scratch_bytes + self.mlp_backward(tiled.tile_rows, 0);
                let dense = if self.layer.mlp.swiglu().is_some() { dense } else { 0 };
                (self.saved_bytes() + dense).max(self.experts_backward()) + self.rounded_grad_bytes()
            }
        };
        // The gradients of the sum, of attention's output, of q, k and v.
        let grads = t * s * (d + 2 * q + 2 * kv) + self.activation_bytes() - self.output_bytes();
        let scratch = self.attention_cost().backward().scratch_bytes + self.exchange.backward_bytes;
        let attention = self.saved_until_attention() + grads + scratch + self.recomputed_values();
        let worst = mlp.max(self.router_backward()).max(attention).max(self.projections_backward());
        worst + self.sublayer_bytes()
    }

    /// Returns the bytes of the values that attention's backward copies from the joined rows of q, k and v. Norms of heads save
    /// these rows, so the values are not saved apart.
    fn recomputed_values(&self) -> u64 {
        match self.attention_spec().qk_norm {
            QkNorm::PerHead => self.n_tokens * self.widths().kv * self.n_bytes(),
            QkNorm::None | QkNorm::AllHeads => 0,
        }
    }

    /// Returns the peak bytes of the backward of the projections to q, k and v, after that of attention: the layer's output,
    /// the gradient of the sum, the recomputed norm, the gradients of q and k, those of their inputs, and the sum of these.
    fn projections_backward(&self) -> u64 {
        let Widths { d, q, kv, .. } = self.widths();
        2 * self.activation_bytes() - self.output_bytes() + self.n_tokens * self.n_bytes() * (5 * d + q + kv)
    }

    /// Returns the bytes of the RoPE tables, which all layers share.
    pub fn rope_bytes(&self) -> u64 {
        rope_cost(self.n_tokens, self.attention_spec().rotary_dim as u64).saved_bytes
    }

    /// Returns the GEMM sizes of the MLP, forward and backward. Experts pack their groups one at a time.
    pub fn mlp_matmuls(&self) -> [GemmSize; 3] {
        let (Widths { d, f, .. }, t) = (self.widths(), self.n_tokens);
        [(t, f, d), (t, d, f), (d, f, t)].map(|(m, n, k)| GemmSize { m, n, k })
    }

    fn attention_spec(&self) -> &SelfAttentionSpec {
        let MixerSpec::Attention(attention) = &self.layer.mixer;
        attention
    }

    fn widths(&self) -> Widths {
        let on_rank = |linear: &LinearSpec| (linear.out.len / self.n_slices) as u64;
        let [q, kv, _] = self.attention_spec().qkv.each_ref().map(on_rank);
        let f = self.layer.mlp.swiglu().map_or(0, |mlp| on_rank(&mlp.gate_up[0]));
        Widths { d: self.layer.hidden_size as u64, q, kv, f }
    }

    fn n_bytes(&self) -> u64 {
        self.dtype.size_in_bytes() as u64
    }

    /// Returns the bytes of a gathered sublayer input or output; zero without tensor parallelism.
    fn sublayer_bytes(&self) -> u64 {
        if self.n_slices > 1 { self.n_tokens * self.widths().d * self.n_bytes() } else { 0 }
    }

    fn attention_cost(&self) -> AttentionCost {
        let attention = self.attention_spec();
        let (n_query, n_kv) = (attention.n_heads / self.n_slices, attention.n_kv_heads / self.n_slices);
        AttentionCost {
            n_tokens: self.n_tokens,
            longest: self.longest,
            heads: AttentionHeads { n_query, n_kv, dim: attention.head_dim },
            dtype: self.dtype,
            implementation: self.attention,
            device: self.device,
        }
    }

    fn linear(&self, n_tokens: u64, [n_in, n_out]: [u64; 2], (spec, input): (&LinearSpec, LinearInput)) -> LinearCost {
        let (dtype, device, grad, storage) = (self.dtype, self.device, self.grad, spec.storage);
        let fp8 = spec.fp8.then_some(self.fp8_grad_copies);
        LinearCost { n_tokens, n_in, n_out, dtype, device, input, grad, storage, fp8 }
    }

    /// Returns the cost of a tiled MLP; `None` if tiling is off.
    fn tiled(&self) -> Option<TiledCost> {
        let (d, t) = (self.layer.hidden_size, self.n_tokens);
        let tile_rows = tile_rows(t as usize, d) as u64;
        let cost = TiledCost { n_rows: t, tile_rows, width: d as u64, dtype: self.dtype };
        (self.tiled_mlp == TiledMlp::On).then_some(cost)
    }

    /// Returns the bytes saved up to attention: output, q, k, v, attention's output, and q and k before their norms.
    fn saved_until_attention(&self) -> u64 {
        let (Widths { q, kv, .. }, t) = (self.widths(), self.n_tokens);
        let normed = if self.attention_spec().qk_norm == QkNorm::None { 0 } else { t * (q + kv) };
        let norms = rms_norm_cost(normed, self.dtype).saved_bytes;
        let adapters = self.adapters_saved(t, self.layer.mixer.linears());
        self.activation_bytes() + norms + self.attention_cost().forward().saved_bytes + adapters
    }

    /// Returns the bytes saved after attention: the residual sum, gate and up. A tiled MLP saves its input alone.
    fn saved_after_attention(&self) -> u64 {
        let sum = rms_norm_cost(self.n_residual_tokens * self.widths().d, self.residual).saved_bytes;
        let routed = self.experts().map_or(0, |experts| experts.saved_bytes());
        let routed = routed + self.expert_adapters().map_or(0, |adapters| adapters.saved_bytes());
        sum + routed + self.ungated_bytes() + self.dense_saved()
    }

    /// Returns the bytes that the dense MLP or the shared expert saves; zero without one.
    fn dense_saved(&self) -> u64 {
        match self.tiled() {
            Some(tiled) if self.layer.mlp.swiglu().is_some() => tiled.forward().saved_bytes,
            Some(_) => 0,
            None => self.mlp_saved(self.n_tokens),
        }
    }

    /// Returns the bytes that the MLP saves for `rows` tokens: gate, up and LoRA activations.
    fn mlp_saved(&self, rows: u64) -> u64 {
        let adapters = self.adapters_saved(rows, self.layer.mlp.linears());
        swiglu_cost(rows * self.widths().f, self.dtype).saved_bytes + adapters
    }

    /// Returns the bytes of the outputs of LoRA's A, which B's backward reads.
    fn adapters_saved<'l>(&self, rows: u64, linears: impl Iterator<Item = &'l LinearSpec>) -> u64 {
        let adapters = linears.filter_map(|linear| linear.adapter.as_ref());
        adapters.map(|adapter| rows * self.n_bytes() * adapter.r as u64).sum()
    }

    /// Returns the scratch bytes of the backward of linear layers that read one input.
    ///
    /// The input is recomputed if a weight or a LoRA factor needs it. LoRA dropout allocates a masked copy.
    fn linears_backward(&self, rows: u64, sizes: [u64; 2], linears: &[LinearSpec]) -> u64 {
        let adapters = || linears.iter().filter_map(|linear| linear.adapter.as_ref());
        let is_read = self.grad.is_some() || adapters().next().is_some();
        let input = if is_read { LinearInput::Recomputed } else { LinearInput::Unused };
        let dropped = if adapters().any(|adapter| adapter.dropout > 0.0) { rows * sizes[0] } else { 0 };
        let dropout = dropout_backward_cost(dropped, self.dtype).scratch_bytes;
        self.linear(rows, sizes, (&linears[0], input)).backward().scratch_bytes + dropout
    }

    /// Returns the peak bytes of the backward of a dense MLP or a shared expert without tiles, beyond the saved activations.
    fn dense_backward(&self) -> u64 {
        let (t, rounded) = (self.n_tokens, self.rounded_grad_bytes());
        match self.experts() {
            None => self.mlp_backward(t, rounded) - self.mlp_saved(t),
            // The gate has a gradient of its input, and gradients of rows arrive meanwhile. The experts read the output's
            // gradient later.
            Some(experts) => {
                let meanwhile = self.ungated_bytes() + experts.returned_bytes() + rounded;
                self.mlp_backward(t, 0) - self.mlp_saved(t) + meanwhile
            }
        }
    }

    /// Returns the peak bytes of the MLP's backward for `rows` tokens, with its saved activations, and with `output_grad` bytes
    /// that the down projection's backward frees.
    fn mlp_backward(&self, rows: u64, output_grad: u64) -> u64 {
        let Widths { d, f, .. } = self.widths();
        let Some(mlp) = self.layer.mlp.swiglu() else { return 0 };
        let elements = |n: u64| rows * self.n_bytes() * n;
        let down = self.linears_backward(rows, [f, d], std::slice::from_ref(&mlp.down)) + elements(f) + output_grad;
        // The gradient of the down projection's weight follows that of its input, whose memory the gated activation takes.
        let weight = self.linear(rows, [f, d], (&mlp.down, LinearInput::Unused)).backward().scratch_bytes;
        // In FP8 the codes of the last input exist until another is quantized.
        let gated = elements(3 * f) + if mlp.down.fp8 { rows * f } else { weight + output_grad };
        let gate_up = elements(d) + self.linears_backward(rows, [d, f], &mlp.gate_up);
        self.mlp_saved(rows) + down.max(gated).max(gate_up)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{AdapterSpec, Config, MlpSpec};

    #[track_caller]
    fn check_linear(dropout: f64, want: u64) {
        let config = serde_json::json!({
            "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 12,
            "num_attention_heads": 2, "vocab_size": 16,
        });
        let layer = Config::from_json(config).unwrap().layer(0);
        let cost = LayerCost {
            layer: &layer,
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
        };
        let MlpSpec::SwiGlu(mlp) = &layer.mlp else { panic!("Llama's layers are dense") };
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
