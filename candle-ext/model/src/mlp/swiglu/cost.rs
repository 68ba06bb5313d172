//! Memory of a SwiGLU MLP: of a dense layer, or of a shared expert.
//!
//! Dimensions: t tokens, d hidden size, f this rank's intermediate size, s bytes of an element

use candlewick_ops::{GemmSize, LinearInput, swiglu_cost};

use super::spec::SwiGluSpec;
use crate::layer_sizes::LayerSizes;
use crate::mlp::MlpSpec;

/// An MLP and the sizes of its layer on one rank.
pub(crate) struct SwiGluCost<'a> {
    pub(crate) spec: &'a SwiGluSpec,
    pub(crate) sizes: &'a LayerSizes,
}

impl SwiGluCost<'_> {
    /// Returns the bytes saved for backward. A tiled MLP saves its input alone.
    pub(crate) fn saved(&self) -> u64 {
        match self.sizes.tiled() {
            Some(tiled) => tiled.forward().saved_bytes,
            None => self.saved_of_rows(self.sizes.n_tokens),
        }
    }

    /// Returns the peak bytes of the forward.
    pub(crate) fn forward(&self) -> u64 {
        let tiled = self.sizes.tiled();
        let (rows, tile) =
            tiled.map_or((self.sizes.n_tokens, 0), |tiled| (tiled.tile_rows, tiled.forward().scratch_bytes));
        let down = self.sizes.linear(rows, [self.f(), self.d()], (&self.spec.down, LinearInput::Unused));
        rows * self.sizes.n_bytes() * 3 * self.f() + tile + down.forward().scratch_bytes
    }

    /// Returns the peak bytes of the backward beyond the saved activations, with `output_grad` bytes that the down
    /// projection's backward frees.
    pub(crate) fn backward(&self, output_grad: u64) -> u64 {
        match self.sizes.tiled() {
            None => {
                let t = self.sizes.n_tokens;
                self.backward_of_rows(t, output_grad) - self.saved_of_rows(t)
            }
            // The gradient of the MLP's input, and a tile's tape, output and input gradient.
            Some(tiled) => {
                let input_grad = self.sizes.n_tokens * self.sizes.n_bytes() * self.d();
                input_grad + tiled.backward().scratch_bytes + self.backward_of_rows(tiled.tile_rows, 0) + output_grad
            }
        }
    }

    /// Returns the bytes of the gated activation, or of the output in tiles.
    pub(crate) fn started(&self) -> u64 {
        let width = if self.sizes.tiled().is_some() { self.d() } else { self.f() };
        self.sizes.n_tokens * width * self.sizes.n_bytes()
    }

    /// Returns the GEMM sizes, forward and backward.
    pub(crate) fn matmuls(&self) -> [GemmSize; 3] {
        let (t, d, f) = (self.sizes.n_tokens, self.d(), self.f());
        [(t, f, d), (t, d, f), (d, f, t)].map(|(m, n, k)| GemmSize { m, n, k })
    }

    fn d(&self) -> u64 {
        self.sizes.hidden_size as u64
    }

    fn f(&self) -> u64 {
        (self.spec.gate_up[0].out.len / self.sizes.n_slices) as u64
    }

    /// Returns the bytes saved for `rows` tokens: gate, up and LoRA activations.
    fn saved_of_rows(&self, rows: u64) -> u64 {
        let adapters = self.sizes.adapters_saved(rows, self.spec.linears());
        swiglu_cost(rows * self.f(), self.sizes.dtype).saved_bytes + adapters
    }

    /// Returns the peak bytes of the backward for `rows` tokens, with its saved activations.
    fn backward_of_rows(&self, rows: u64, output_grad: u64) -> u64 {
        let (d, f, sizes) = (self.d(), self.f(), self.sizes);
        let SwiGluSpec { gate_up, down } = self.spec;
        let elements = |n: u64| rows * sizes.n_bytes() * n;
        let of_down = sizes.linears_backward(rows, [f, d], std::slice::from_ref(down)) + elements(f) + output_grad;
        // The gradient of the down projection's weight follows that of its input, whose memory the gated activation takes.
        let weight = sizes.linear(rows, [f, d], (down, LinearInput::Unused)).backward().scratch_bytes;
        // In FP8 the codes of the last input exist until another is quantized.
        let gated = elements(3 * f) + if down.fp8 { rows * f } else { weight + output_grad };
        let of_gate_up = elements(d) + sizes.linears_backward(rows, [d, f], gate_up);
        self.saved_of_rows(rows) + of_down.max(gated).max(of_gate_up)
    }
}
