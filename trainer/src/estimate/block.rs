//! A block: what its tape keeps, and what computing it forward or backward needs besides.
//!
//! t tokens, o of them outside of branches (a part where ranks share matrices), d model, q and kv the widths of the query and
//! key heads and f of the MLP as far as they are here, r rank of an adapter, u tokens of a tile of a tiled MLP

use candlewick_model::{LayerSpec, LinearSpec, MixerSpec, MlpSpec, SelfAttentionSpec};
use candlewick_ops::{
    AttentionCost, AttentionHeads, LinearCost, LinearInput, TiledCost, rms_norm_cost, swiglu_cost, tile_rows,
};

use super::Setup;
use crate::plan::dtype;

/// Bytes of f32.
const F32: u64 = 4;

/// A block of a setup.
pub(super) struct Block<'a> {
    setup: &'a Setup,
    layer: &'a LayerSpec,
    attention: &'a SelfAttentionSpec,
    t: u64,
    o: u64,
    d: u64,
    q: u64,
    kv: u64,
    f: u64,
    /// Bytes of an activation's element.
    s: u64,
}

impl<'a> Block<'a> {
    pub(super) fn new(setup: &'a Setup, block_idx: usize) -> Self {
        let layer = setup.model.units()[block_idx + 1].layer().expect("blocks lie between embedding and head");
        let (MixerSpec::Attention(attention), MlpSpec::SwiGlu(mlp)) = (&layer.mixer, &layer.mlp);
        let on_rank = |linear: &LinearSpec| (linear.out.len / setup.ranks.tensor) as u64;
        Self {
            setup,
            layer,
            attention,
            t: setup.tokens(),
            o: setup.tokens_outside(),
            d: layer.hidden_size as u64,
            q: on_rank(&attention.qkv[0]),
            kv: on_rank(&attention.qkv[1]),
            f: on_rank(&mlp.gate_up[0]),
            s: setup.compute.n_bytes(),
        }
    }

    /// The block's input or output, or their gradients.
    pub(super) fn activation(&self) -> u64 {
        self.o * self.d * self.s
    }

    /// Keys and values of so many tokens, in a format of so many bytes.
    pub(super) fn keys_and_values(&self, n_tokens: u64, n_bytes: u64) -> u64 {
        n_tokens * 2 * self.kv * n_bytes
    }

    /// What a branch reads or gives, of all tokens, where that is not what is outside already.
    fn exchanged(&self) -> u64 {
        if self.setup.ranks.tensor > 1 { self.t * self.d * self.s } else { 0 }
    }

    fn attention(&self) -> AttentionCost {
        let (attention, tensor) = (self.attention, self.setup.ranks.tensor);
        let (n_query, n_kv) = (attention.n_heads / tensor, attention.n_kv_heads / tensor);
        AttentionCost {
            n_tokens: self.t,
            longest: self.setup.row_tokens,
            heads: AttentionHeads { n_query, n_kv, dim: attention.head_dim },
            dtype: dtype(self.setup.compute),
            implementation: self.setup.attention,
            device: self.setup.device(),
        }
    }

    fn linear(&self, n_tokens: u64, [n_in, n_out]: [u64; 2], (spec, input): (&LinearSpec, LinearInput)) -> LinearCost {
        let (dtype, device, grad) = (dtype(self.setup.compute), self.setup.device(), self.setup.base_grad());
        LinearCost { n_tokens, n_in, n_out, dtype, device, input, grad, storage: spec.storage }
    }

    /// Returns the sizes of a tiled MLP; `None` if it is computed at once.
    fn tiled(&self) -> Option<TiledCost> {
        let cost = TiledCost {
            n_rows: self.t,
            tile_rows: tile_rows(self.t as usize, self.d as usize) as u64,
            width: self.d,
            dtype: dtype(self.setup.compute),
        };
        self.setup.modes.tiled_mlp.then_some(cost)
    }

    /// What the ops of `model::block` save for backward, each tensor once, and the output. The input is not counted. What
    /// norms, gated products and dropout give is computed again.
    pub(super) fn tape(&self) -> u64 {
        self.until_attention() + self.after_attention()
    }

    /// The output, which stays to the end; rotated q and k, v and attention's output with the logarithm of each row's sum;
    /// q and k before their norms, if they have some.
    fn until_attention(&self) -> u64 {
        let normed = if self.attention.qk_norm { self.t * (self.q + self.kv) } else { 0 };
        let norms = rms_norm_cost(normed, dtype(self.setup.compute)).saved_bytes;
        let adapters = self.of_adapters(self.t, self.layer.mixer.linears());
        self.activation() + norms + self.attention().forward().saved_bytes + adapters
    }

    /// Returns the bytes of attention's output and log-sum-exp.
    pub(super) fn attention_output(&self) -> u64 {
        self.attention().replay_bytes()
    }

    /// The sum after attention, gate and up. A tiled MLP saves its input, the norm of the sum, alone.
    fn after_attention(&self) -> u64 {
        let sum = rms_norm_cost(self.o * self.d, dtype(self.setup.compute)).saved_bytes;
        sum + self.tiled().map_or_else(|| self.mlp_of(self.t), |tiled| tiled.forward().saved_bytes)
    }

    /// Gate and up of some tokens, and what adapters save.
    fn mlp_of(&self, rows: u64) -> u64 {
        let adapters = self.of_adapters(rows, self.layer.mlp.linears());
        swiglu_cost(rows * self.f, dtype(self.setup.compute)).saved_bytes + adapters
    }

    /// Returns the form of the input of linear layers: recomputed for their gradients, or for an adapter's A that reads it.
    fn input(&self, linears: &[LinearSpec]) -> LinearInput {
        let mut adapters = linears.iter().filter_map(|linear| linear.adapter.as_ref());
        let is_needed = self.setup.model.lora().is_none() || adapters.any(|adapter| adapter.dropout == 0.0);
        if is_needed { LinearInput::Recomputed } else { LinearInput::Unused }
    }

    /// Returns the bytes of the outputs of adapters' A, rounded, which their B saves.
    fn of_adapters<'l>(&self, rows: u64, linears: impl Iterator<Item = &'l LinearSpec>) -> u64 {
        linears.filter_map(|linear| linear.adapter.as_ref()).map(|adapter| rows * self.s * adapter.r as u64).sum()
    }

    /// A forward that records nothing, at the last product of the MLP or in attention. Its input is not counted.
    pub(super) fn forward(&self) -> u64 {
        let Self { t, d, q, kv, f, s, .. } = *self;
        let (u, tile) = self.tiled().map_or((t, 0), |tiled| (tiled.tile_rows, tiled.forward().scratch_bytes));
        let MlpSpec::SwiGlu(mlp) = &self.layer.mlp;
        let down = self.linear(u, [f, d], (&mlp.down, LinearInput::Unused)).forward().scratch_bytes;
        let outside = 3 * self.activation() + self.exchanged();
        let mlp = outside + t * s * d + u * s * 3 * f + tile + down;
        let attention = self.exchanged() + t * s * (d + 2 * q + 2 * kv) + self.attention().forward().scratch_bytes;
        // The sum of the pieces; keys and values as they travel: this rank's, those at hand and those that come.
        let ring = self.in_ring(t * (F32 * q + 3 * s * 2 * kv));
        mlp.max(attention + ring) + self.attention().reference_forward_bytes()
    }

    /// Backward and the tape that it uses up: the most of its stages. The gradient that comes in is not counted.
    pub(super) fn backward(&self) -> u64 {
        let Self { t, d, q, kv, s, .. } = *self;
        let rest = self.until_attention() + self.after_attention();
        let mlp = match self.tiled() {
            None => rest + self.mlp_backward(t) - self.mlp_of(t),
            // The gradient of the MLP's input; and a tile's own tape, output and gradient of its input.
            Some(tiled) => rest + t * s * d + tiled.backward().scratch_bytes + self.mlp_backward(tiled.tile_rows),
        };
        // The gradients of the sum, of attention's output, of q, k and v.
        let gradients = t * s * (d + 2 * q + 2 * kv);
        let attention = self.until_attention() + gradients + self.attention().backward().scratch_bytes;
        // dq; dk and dv: this rank's, those being computed, on their way and arrived; two ranks' keys and values.
        let ring = self.in_ring(t * (F32 * q + 4 * F32 * 2 * kv + 2 * s * 2 * kv));
        mlp.max(attention + ring) + self.exchanged()
    }

    /// The MLP's backward and tape on some tokens: at the last product; then the gradients of gate and up come, and become
    /// one of d.
    fn mlp_backward(&self, rows: u64) -> u64 {
        let Self { d, f, s, .. } = *self;
        let MlpSpec::SwiGlu(mlp) = &self.layer.mlp;
        let elements = |n: u64| rows * s * n;
        let scratch = |sizes, linears: &[LinearSpec]| {
            self.linear(rows, sizes, (&linears[0], self.input(linears))).backward().scratch_bytes
        };
        let down = scratch([f, d], std::slice::from_ref(&mlp.down)) + elements(f);
        let swiglu = elements(3 * f);
        let gate = elements(d) + scratch([d, f], &mlp.gate_up);
        self.mlp_of(rows) + down.max(swiglu).max(gate)
    }

    /// What attention needs besides where keys and values go around (`parallel::sequence`).
    fn in_ring(&self, bytes: u64) -> u64 {
        if self.setup.ranks.context > 1 { bytes } else { 0 }
    }
}
