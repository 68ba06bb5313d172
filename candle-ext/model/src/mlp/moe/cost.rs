//! Memory of a mixture of experts: router, routed experts, shared expert, and their adapters.

use candlewick_ops::{
    DeviceKind, GemmSize, GroupedLinearCost, LinearInput, WeightStorage, expert_capacity, linear_f64_bytes,
};

use super::adapters_cost::ExpertAdaptersCost;
use super::experts::ExpertTile;
use super::experts_cost::{ExpertExchange, ExpertsCost, SharedExpertBytes, TileOfExperts};
use super::spec::{ExpertMatrixSpec, MoeSpec};
use crate::layer_sizes::LayerSizes;
use crate::mlp::swiglu::SwiGluCost;
use crate::mlp::{MlpCost, MlpSpec};
use crate::{ExpertWeighting, RouterDtype, TiledMlp};

/// Returns the memory of the sublayer on one rank.
pub(super) fn cost(spec: &MoeSpec, sizes: &LayerSizes) -> MlpCost {
    let shared = spec.shared_expert.as_ref().map(|shared| SwiGluCost { spec: &shared.mlp, sizes });
    let cost = MoeCost { spec, sizes, experts: experts(spec, sizes), shared };
    MlpCost {
        saved: cost.saved(),
        saved_by_all: cost.selection(),
        forward: cost.forward(ExpertsCost::forward_bytes_with),
        recorded_forward: cost.forward(ExpertsCost::recorded_forward_bytes_with),
        backward: cost.backward(),
        end_of_backward: cost.router_backward(),
        kept_by_threads: if sizes.device == DeviceKind::Cpu { copied_by_experts(spec, sizes) } else { 0 },
        matmuls: cost.matmuls(),
    }
}

/// A mixture of experts and the sizes of its layer on one rank.
struct MoeCost<'a> {
    spec: &'a MoeSpec,
    sizes: &'a LayerSizes,
    experts: ExpertsCost,
    shared: Option<SwiGluCost<'a>>,
}

impl MoeCost<'_> {
    fn saved(&self) -> u64 {
        self.experts.saved_bytes() + self.adapters().saved_bytes() + self.ungated() + self.shared_saved()
    }

    /// Returns the bytes that the shared expert's MLP saves; zero without one.
    fn shared_saved(&self) -> u64 {
        self.shared.as_ref().map_or(0, SwiGluCost::saved)
    }

    /// Returns the peak bytes of the forward with `of_experts`.
    fn forward(&self, of_experts: fn(&ExpertsCost, SharedExpertBytes) -> u64) -> u64 {
        let tile = self.sizes.tiled().map_or(0, |tiled| tiled.forward().scratch_bytes);
        let shared = self.shared.as_ref().map(|shared| SharedExpertBytes {
            peak: shared.forward(),
            output: self.sizes.n_tokens * self.sizes.n_bytes() * self.sizes.hidden_size as u64,
            ungated: self.ungated(),
            started: shared.started(),
        });
        let dense = shared.as_ref().map_or(tile, |shared| shared.peak);
        let routed = of_experts(&self.experts, shared.unwrap_or_default()) + self.adapters().forward_bytes();
        dense.max(routed).max(self.router_copies() + self.experts.logits_bytes())
    }

    /// Returns the peak bytes of the backward with the saved activations.
    fn backward(&self) -> u64 {
        let (saved, rounded) = (self.saved(), self.sizes.rounded_grad_bytes());
        let shared = self.shared.as_ref().map_or(0, |shared| shared.backward(0));
        if self.sizes.tiled_mlp == TiledMlp::On {
            return (saved + shared).max(self.experts_backward()) + rounded;
        }
        // The gate has a gradient of its input, and gradients of rows arrive meanwhile. The experts read the output's gradient
        // later.
        let meanwhile = self.ungated() + self.experts.returned_bytes() + rounded;
        (saved + shared + meanwhile).max(self.experts_backward())
    }

    /// Returns the peak bytes of the routed experts' backward with the saved activations.
    ///
    /// On one rank the backward of a shared expert is first. Its saved activations are then free, and the gradient of the input
    /// exists. The permuted rows are recomputed from the norm's output, which is recomputed, too.
    fn experts_backward(&self) -> u64 {
        let norm_output = if self.sizes.experts == ExpertExchange::None { self.sizes.output_bytes() } else { 0 };
        let bytes = self.saved() + self.experts.backward_bytes(norm_output) + self.adapters().backward_bytes();
        if self.sizes.experts != ExpertExchange::None {
            // The backward of the shared expert's down projection is first, if not in tiles. The gradient of its input exists.
            let shared = self.shared.as_ref().filter(|_| self.sizes.tiled_mlp == TiledMlp::Off);
            return bytes + shared.map_or(0, SwiGluCost::started);
        }
        let shared = self.shared.as_ref().map_or(0, |_| self.sizes.output_bytes());
        let is_shared_with_tiles = self.experts.tile.is_some_and(|tile| tile.shares_input);
        let of_shared = if is_shared_with_tiles { 0 } else { self.shared_saved() };
        let freed = of_shared + self.ungated();
        bytes - freed + shared
    }

    /// Returns the bytes of the shared expert's output before its gate; zero without a gate.
    fn ungated(&self) -> u64 {
        self.spec.shared_expert_gate().map_or(0, |_| self.sizes.output_bytes())
    }

    /// Returns the peak bytes of a router's backward in f64, after that of the experts; zero in another dtype.
    fn router_backward(&self) -> u64 {
        if self.router_copies() == 0 {
            return 0;
        }
        // The residual sum, and the gradients of the MLP's input by the experts and by the router.
        let rows = self.sizes.activation_bytes() + 2 * self.sizes.output_bytes();
        rows + 2 * self.experts.logits_bytes() + self.router_copies()
    }

    /// Returns the bytes of a router's selection: weights, experts, two orders of the slots, and the experts that losses count,
    /// four bytes each.
    fn selection(&self) -> u64 {
        self.sizes.n_residual_tokens * self.spec.router.top_k as u64 * 5 * 4
    }

    /// Returns the bytes of the copies that a router in f64 makes; zero otherwise.
    fn router_copies(&self) -> u64 {
        let (n_tokens, n_experts) = (self.sizes.n_residual_tokens, self.spec.n_experts as u64);
        match self.sizes.router {
            RouterDtype::F64 => linear_f64_bytes(n_tokens, self.sizes.hidden_size as u64, n_experts),
            RouterDtype::F32 => 0,
        }
    }

    fn adapters(&self) -> ExpertAdaptersCost {
        ExpertAdaptersCost::of(self.spec, &self.experts)
    }

    /// Returns the GEMM sizes of the shared expert. Experts pack their groups one at a time.
    fn matmuls(&self) -> [GemmSize; 3] {
        let (t, d) = (self.sizes.n_tokens, self.sizes.hidden_size as u64);
        let none = [(t, 0, d), (t, d, 0), (d, 0, t)].map(|(m, n, k)| GemmSize { m, n, k });
        self.shared.as_ref().map_or(none, SwiGluCost::matmuls)
    }
}

/// Returns the cost of the routed experts.
fn experts(moe: &MoeSpec, sizes: &LayerSizes) -> ExpertsCost {
    let (n_tokens, top_k) = (sizes.n_residual_tokens, moe.router.top_k);
    let capacity = |factor| expert_capacity(n_tokens as usize, top_k, moe.n_experts, factor);
    ExpertsCost {
        n_tokens,
        n_rows: match sizes.padded_capacity_factor {
            Some(factor) => (moe.n_experts * capacity(factor)) as u64,
            None => n_tokens * top_k as u64,
        },
        n_experts: moe.n_experts as u64,
        d: sizes.hidden_size as u64,
        f: moe.expert_size as u64,
        n_bytes: sizes.n_bytes(),
        fp8_weights: [&moe.gate_up, &moe.down].map(|matrix| match matrix.fp8 {
            true => (matrix.n_weights() / sizes.n_expert_ranks) as u64,
            false => 0,
        }),
        copied_bytes: if sizes.device == DeviceKind::Gpu { copied_by_experts(moe, sizes) } else { 0 },
        n_fp8_grads: if sizes.grad.is_some() { sizes.fp8_grad_copies } else { 1 },
        saves_fp8_input: moe.gate_up.fp8
            && sizes.grad.is_some()
            && sizes.tiled_mlp == TiledMlp::Off
            // The backward of weighted inputs reads the tokens.
            && moe.weighting == ExpertWeighting::Output,
        exchange: sizes.experts,
        tile: (sizes.tiled_mlp == TiledMlp::On).then(|| tile_of_experts(moe, sizes)),
    }
}

/// Returns the bytes of the copies of rows and weights for the experts' matmuls.
fn copied_by_experts(moe: &MoeSpec, sizes: &LayerSizes) -> u64 {
    let of_matrix = |matrix: &ExpertMatrixSpec| {
        let cost = GroupedLinearCost {
            n_rows: sizes.n_residual_tokens * moe.router.top_k as u64,
            n_groups: (moe.n_experts / sizes.n_expert_ranks) as u64,
            n_in: matrix.input.len as u64,
            n_out: matrix.out as u64,
            dtype: sizes.dtype,
            device: sizes.device,
            input: LinearInput::Unused,
            grad: None,
            // In FP8 the values of codes are dense.
            storage: if matrix.fp8 { WeightStorage::Dense } else { matrix.storage },
        };
        cost.forward().scratch_bytes
    };
    moe.expert_matrices().into_iter().map(of_matrix).max().unwrap_or(0)
}

/// Returns the sizes of a tile of the routed experts.
fn tile_of_experts(moe: &MoeSpec, sizes: &LayerSizes) -> TileOfExperts {
    let (n_own, top_k) = (sizes.n_residual_tokens as usize, moe.router.top_k);
    let tile = ExpertTile { hidden_size: sizes.hidden_size, top_k };
    let (n_tokens, k) = match sizes.experts {
        ExpertExchange::None => (n_own, top_k),
        ExpertExchange::Rows { n_shards } => (n_own * top_k * n_shards as usize, 1),
        ExpertExchange::Tokens { n_ranks, .. } => (n_own * n_ranks as usize, top_k),
    };
    let n_tokens = tile.rows(n_tokens, k);
    let shares_input = moe.shared_expert.is_some();
    TileOfExperts { n_tokens: n_tokens as u64, n_rows: (n_tokens * k) as u64, shares_input }
}
