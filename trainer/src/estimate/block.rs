//! A block: what its tape keeps, and what computing it forward or backward needs besides.
//!
//! t tokens, o of them outside of branches (a part where ranks share matrices), d model, q and kv the widths of the query and
//! key heads and f of the MLP as far as they are here, r rank of an adapter, u tokens of a tile of a tiled MLP

use candlewick_model::{LayerSpec, LinearSpec, MixerSpec, MlpSpec, SelfAttentionSpec};
use candlewick_ops::AttentionImpl;

use super::{Place, Setup};

/// Bytes of f32.
const F32: u64 = 4;
/// Elements of activations that a product on the CPU widens at once, and its bounds on their rows (`ops::linear`).
const WIDENED: u64 = 1 << 23;
const WIDENED_ROWS: (u64, u64) = (64, 4096);
/// Bytes of the weight's panel that it widens, at most (`ops::product`).
const PANEL: u64 = 4 << 20;

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

    fn n_heads(&self) -> u64 {
        (self.attention.n_heads / self.setup.ranks.tensor) as u64
    }

    /// What the ops of `model::block` save for backward, each tensor once, and the output. The input is not counted. What
    /// norms, gated products and dropout give is computed again.
    pub(super) fn tape(&self) -> u64 {
        self.until_attention() + self.after_attention()
    }

    /// The output, which stays to the end; rotated q and k, v and attention's output with the logarithm of each row's sum;
    /// q and k before their norms, if they have some.
    fn until_attention(&self) -> u64 {
        let Self { t, q, kv, s, .. } = *self;
        let norms = if self.attention.qk_norm { q + kv } else { 0 };
        let log_sum_exp = self.log_sum_exp();
        let adapters = self.of_adapters(t, self.layer.mixer.linears());
        self.activation() + t * s * (2 * q + 2 * kv + norms) + log_sum_exp + adapters + self.reference(7)
    }

    /// Attention's output and the logarithm of each row's sum.
    pub(super) fn attention_output(&self) -> u64 {
        self.t * self.s * self.q + self.log_sum_exp()
    }

    fn log_sum_exp(&self) -> u64 {
        self.t * self.n_heads() * F32
    }

    /// The sum after attention, gate and up. A tiled MLP saves its input, the norm of the sum, alone.
    fn after_attention(&self) -> u64 {
        match self.is_tiled() {
            true => self.activation() + self.t * self.s * self.d,
            false => self.activation() + self.mlp_of(self.t),
        }
    }

    /// Gate and up of some tokens, and what adapters save.
    fn mlp_of(&self, rows: u64) -> u64 {
        let adapters = self.of_adapters(rows, self.layer.mlp.linears());
        rows * self.s * 2 * self.f + adapters
    }

    fn is_tiled(&self) -> bool {
        self.setup.modes.tiled_mlp
    }

    /// The tokens of a tile (`model::block`): all, if the MLP is not tiled.
    fn tile(&self) -> u64 {
        if self.is_tiled() { self.t.div_ceil(self.t.div_ceil(self.d).max(1)) } else { self.t }
    }

    /// The input of matmuls, computed again for the gradient of their weights, or of an adapter's A that reads the same.
    fn again<'l>(&self, rows: u64, linears: impl IntoIterator<Item = &'l LinearSpec>, width: u64) -> u64 {
        let mut adapters = linears.into_iter().filter_map(|linear| linear.adapter.as_ref());
        let is_needed = self.setup.model.lora().is_none() || adapters.any(|adapter| adapter.dropout == 0.0);
        if is_needed { rows * self.s * width } else { 0 }
    }

    /// The outputs of adapters' A, which their B saves, rounded.
    fn of_adapters<'l>(&self, rows: u64, linears: impl Iterator<Item = &'l LinearSpec>) -> u64 {
        linears.filter_map(|linear| linear.adapter.as_ref()).map(|adapter| rows * self.s * adapter.r as u64).sum()
    }

    /// A forward that records nothing, at the last product of the MLP or in attention. Its input is not counted.
    pub(super) fn forward(&self) -> u64 {
        let Self { t, d, q, kv, f, s, .. } = *self;
        let u = self.tile();
        // A tile's output is copied into the whole's.
        let copied = if self.is_tiled() { u * s * d } else { 0 };
        let outside = 3 * self.activation() + self.exchanged();
        let mlp = outside + t * s * d + u * s * 3 * f + copied + self.widened(u, f, d);
        let attention = self.exchanged() + t * s * (d + 2 * q + 2 * kv) + self.attention_scratch(q, q + 2 * kv);
        // The sum of the pieces; keys and values as they travel: this rank's, those at hand and those that come.
        let ring = self.in_ring(t * (F32 * q + 3 * s * 2 * kv));
        mlp.max(attention + ring) + self.reference(3)
    }

    /// Backward and the tape that it uses up: the most of its stages. The gradient that comes in is not counted.
    pub(super) fn backward(&self) -> u64 {
        let Self { t, d, q, kv, s, .. } = *self;
        let rest = self.until_attention() + self.after_attention();
        let mlp = match self.is_tiled() {
            false => rest + self.mlp_backward(t) - self.mlp_of(t),
            // The gradient of the MLP's input; and a tile's own tape, output and gradient of its input.
            true => {
                let u = self.tile();
                rest + t * s * d + u * s * 2 * d + self.mlp_backward(u)
            }
        };
        // The gradients of the sum, of attention's output, of q, k and v; each query head sums dk and dv of its own.
        let gradients = t * s * (d + 2 * q + 2 * kv) + self.reference(10);
        let attention = self.until_attention() + gradients + self.attention_scratch(3 * q, 3 * q + 2 * kv);
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
        let down = self.again(rows, [&mlp.down], f) + elements(f) + self.product(rows, f, d);
        let swiglu = elements(3 * f);
        let gate = elements(d) + self.again(rows, &mlp.gate_up, d) + self.product(rows, d, f);
        self.mlp_of(rows) + down.max(swiglu).max(gate)
    }

    /// The scratch of a product's backward: activations widened, and a gradient in bf16 summed in f32 (`ops::weight`).
    fn product(&self, rows: u64, n_in: u64, n_out: u64) -> u64 {
        let is_rounded =
            self.setup.place == Place::Cpu && self.setup.masters.n_bytes() < F32 && self.setup.model.lora().is_none();
        self.widened(rows, n_in, n_out) + if is_rounded { n_in * n_out * F32 } else { 0 }
    }

    /// A product on the CPU widens what it reads and rounds what it writes, in blocks of tokens (`ops::linear`).
    fn widened(&self, rows: u64, n_in: u64, n_out: u64) -> u64 {
        if self.setup.place == Place::Gpu || self.s == F32 {
            return 0;
        }
        let rows = (WIDENED / n_in.max(n_out).max(1)).clamp(WIDENED_ROWS.0, WIDENED_ROWS.1).min(rows);
        rows * (n_in + n_out) * F32 + PANEL.min(n_in * n_out * F32)
    }

    /// Attention on the CPU computes in f32: what it writes, head by head, and what it reads if that is in 16 bits. On a
    /// GPU cuDNN sums dq in f32, and our kernels nothing.
    fn attention_scratch(&self, written: u64, read: u64) -> u64 {
        match self.setup.place {
            Place::Cpu if self.s == F32 => self.t * written * F32,
            Place::Cpu => self.t * (written + read) * F32,
            Place::Gpu => self.t * self.q * F32,
        }
    }

    /// What attention needs besides where keys and values go around (`parallel::sequence`).
    fn in_ring(&self, bytes: u64) -> u64 {
        if self.setup.ranks.context > 1 { bytes } else { 0 }
    }

    /// The reference implementation holds so many matrices of scores, for the longest sequence that a row may be, and its
    /// inputs and outputs in several layouts.
    fn reference(&self, n_matrices: u64) -> u64 {
        let heads = self.n_heads();
        match self.setup.attention {
            AttentionImpl::Reference => {
                self.t * F32 * (n_matrices * heads * self.setup.row_tokens + 4 * self.q + 5 * self.kv)
            }
            _ => 0,
        }
    }
}
