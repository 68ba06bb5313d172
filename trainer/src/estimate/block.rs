//! A block: what its tape keeps, and what computing it forward or backward needs besides.
//!
//! t tokens, d model, q and kv the widths of all query and key heads, f MLP width, r rank of an adapter

use candlewick_model::Adapter;
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
    adapters: &'a [Adapter],
    t: u64,
    d: u64,
    q: u64,
    kv: u64,
    f: u64,
    /// Bytes of an activation's element.
    s: u64,
}

impl<'a> Block<'a> {
    pub(super) fn new(setup: &'a Setup, block_idx: usize) -> Self {
        let config = setup.model.config();
        let head_dim = config.head_dim();
        Self {
            setup,
            adapters: &setup.model.units()[block_idx + 1].adapters,
            t: setup.tokens(),
            d: config.hidden_size() as u64,
            q: (config.n_heads() * head_dim) as u64,
            kv: (config.n_kv_heads() * head_dim) as u64,
            f: config.intermediate_size() as u64,
            s: setup.compute.n_bytes(),
        }
    }

    /// The block's input or output, or their gradients.
    pub(super) fn activation(&self) -> u64 {
        self.t * self.d * self.s
    }

    /// candle's graph holds the output of every op of `model::block` until the tape is dropped: the copy of the input,
    /// both norms, both projections back and both sums (7 d); q, rotated q and attention's output (3 q); k, rotated k and v
    /// (3 kv); gate, up and their product (3 f). Norms of q and k and adapters add theirs.
    pub(super) fn tape(&self) -> u64 {
        let Self { t, d, q, kv, f, s, .. } = *self;
        let norms = if self.setup.model.config().qk_norm() { q + kv } else { 0 };
        let log_sum_exp = t * self.setup.model.config().n_heads() as u64 * F32;
        let adapters: u64 = self.adapters.iter().map(|adapter| self.adapter(adapter)).sum();
        t * s * (7 * d + 3 * q + 3 * kv + 3 * f + norms) + log_sum_exp + adapters + self.scores(7)
    }

    /// What an adapter adds to a tape (`model::weights`): its input after dropout, x A^T in f32 before and after the
    /// scaling and rounded, (x A^T) B^T and the sum with the base's output.
    fn adapter(&self, adapter: &Adapter) -> u64 {
        let (n_in, n_out) = self.sides(&adapter.module);
        let dropped = if adapter.dropout > 0.0 { n_in } else { 0 };
        let rounded = if self.s == F32 { 0 } else { self.s };
        let r = adapter.r as u64;
        self.t * (self.s * (dropped + 2 * n_out) + r * (2 * F32 + rounded))
    }

    /// Inputs and outputs of a linear layer.
    fn sides(&self, module: &str) -> (u64, u64) {
        let Self { d, q, kv, f, .. } = *self;
        match module.rsplit('.').next() {
            Some("q_proj") => (d, q),
            Some("k_proj" | "v_proj") => (d, kv),
            Some("o_proj") => (q, d),
            Some("down_proj") => (f, d),
            _ => (d, f),
        }
    }

    /// A forward that records nothing, at the last product of the MLP or in attention. Its input is not counted.
    pub(super) fn forward(&self) -> u64 {
        let Self { t, d, q, kv, f, s, .. } = *self;
        let mlp = t * s * (4 * d + 3 * f) + self.widened(f, d);
        let attention = t * s * (d + 2 * q + 2 * kv) + self.by_head(2 * q + 2 * kv);
        mlp.max(attention) + self.scores(2)
    }

    /// A backward, beyond the tape and the gradient that comes in: the most of its stages. candle adds a gradient to zeros
    /// and so holds it three times while it does.
    pub(super) fn backward(&self) -> u64 {
        let Self { t, d, q, kv, f, s, .. } = *self;
        let elements = |n: u64| t * s * n;
        let down = elements(2 * d) + (elements(f) + self.product(f, d)).max(elements(3 * f));
        let swiglu = elements(d + 5 * f);
        let gate = elements(d + 2 * f) + (elements(d) + self.product(d, f)).max(elements(3 * d));
        let attention = elements(d + 2 * q + 2 * kv) + self.by_head(4 * q + 4 * kv) + self.scores(4);
        [down, swiglu, gate, attention].into_iter().max().unwrap_or(0)
    }

    /// The scratch of a product's backward: activations widened, and a gradient in bf16 summed in f32 (`ops::weight`).
    fn product(&self, n_in: u64, n_out: u64) -> u64 {
        let is_rounded = self.setup.place == Place::Cpu && self.setup.masters.n_bytes() < F32 && self.adapters.is_empty();
        self.widened(n_in, n_out) + if is_rounded { n_in * n_out * F32 } else { 0 }
    }

    /// A product on the CPU widens what it reads and rounds what it writes, in blocks of tokens (`ops::linear`).
    fn widened(&self, n_in: u64, n_out: u64) -> u64 {
        if self.setup.place == Place::Gpu || self.s == F32 {
            return 0;
        }
        let rows = (WIDENED / n_in.max(n_out).max(1)).clamp(WIDENED_ROWS.0, WIDENED_ROWS.1).min(self.t);
        rows * (n_in + n_out) * F32 + PANEL.min(n_in * n_out * F32)
    }

    /// Attention on the CPU computes in f32, one head after the other (`ops::attention::layout`); on a GPU cuDNN sums dq
    /// in f32, and our kernels nothing.
    fn by_head(&self, width: u64) -> u64 {
        match self.setup.place {
            Place::Cpu => self.t * width * F32,
            Place::Gpu => self.t * self.q * F32,
        }
    }

    /// The reference implementation holds so many matrices of scores, for the longest sequence that a row may be.
    fn scores(&self, n_matrices: u64) -> u64 {
        let heads = self.setup.model.config().n_heads() as u64;
        match self.setup.attention {
            AttentionImpl::Reference => n_matrices * heads * self.t * self.setup.row_tokens * F32,
            _ => 0,
        }
    }
}
