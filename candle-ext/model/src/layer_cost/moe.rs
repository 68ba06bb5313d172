//! Memory estimate of the router, the routed experts and their adapters.

use candlewick_ops::{DeviceKind, GroupedLinearCost, LinearInput, WeightStorage, expert_capacity, linear_f64_bytes};

use super::{LayerCost, Widths};
use crate::expert_adapters_cost::ExpertAdaptersCost;
use crate::experts::ExpertTile;
use crate::experts_cost::{ExpertExchange, ExpertsCost, TileOfExperts};
use crate::{ExpertMatrixSpec, ExpertWeighting, MlpSpec, MoeSpec, RouterDtype, TiledMlp};

impl LayerCost<'_> {
    /// Returns the peak bytes of the routed experts' backward with the saved activations; zero for a dense layer.
    ///
    /// On one rank the backward of a shared expert is first. Its saved activations are then free, and the gradient of the input
    /// exists. The permuted rows are recomputed from the norm's output, which is recomputed, too.
    pub(super) fn experts_backward(&self) -> u64 {
        let (Some(experts), Some(adapters)) = (self.experts(), self.expert_adapters()) else { return 0 };
        let norm_output = if self.experts == ExpertExchange::None { self.output_bytes() } else { 0 };
        let bytes = self.saved_bytes() + experts.backward_bytes(norm_output) + adapters.backward_bytes();
        if self.experts != ExpertExchange::None {
            // The backward of the shared expert's down projection is first, if not in tiles. The gradient of its input exists.
            let shared = self.layer.mlp.swiglu().filter(|_| self.tiled_mlp == TiledMlp::Off);
            return bytes + shared.map_or(0, |_| self.started_bytes());
        }
        let shared = self.layer.mlp.swiglu().map_or(0, |_| self.output_bytes());
        let is_shared_with_tiles = experts.tile.is_some_and(|tile| tile.shares_input);
        let of_shared = if is_shared_with_tiles { 0 } else { self.dense_saved() };
        let freed = of_shared + self.ungated_bytes();
        bytes - freed + shared
    }

    /// Returns the cost of the routed experts; `None` for a dense layer.
    pub(super) fn experts(&self) -> Option<ExpertsCost> {
        let MlpSpec::Moe(moe) = &self.layer.mlp else { return None };
        let (n_tokens, top_k) = (self.n_residual_tokens, moe.router.top_k);
        let capacity = |factor| expert_capacity(n_tokens as usize, top_k, moe.n_experts, factor);
        Some(ExpertsCost {
            n_tokens,
            n_rows: match self.padded_capacity_factor {
                Some(factor) => (moe.n_experts * capacity(factor)) as u64,
                None => n_tokens * top_k as u64,
            },
            n_experts: moe.n_experts as u64,
            d: self.layer.hidden_size as u64,
            f: moe.expert_size as u64,
            n_bytes: self.n_bytes(),
            fp8_weights: [&moe.gate_up, &moe.down].map(|matrix| match matrix.fp8 {
                true => (matrix.n_weights() / self.n_expert_ranks) as u64,
                false => 0,
            }),
            copied_bytes: if self.device == DeviceKind::Gpu { self.copied_by_experts(moe) } else { 0 },
            n_fp8_grads: if self.grad.is_some() { self.fp8_grad_copies } else { 1 },
            saves_fp8_input: moe.gate_up.fp8
                && self.grad.is_some()
                && self.tiled_mlp == TiledMlp::Off
                // The backward of weighted inputs reads the tokens.
                && moe.weighting == ExpertWeighting::Output,
            exchange: self.experts,
            tile: (self.tiled_mlp == TiledMlp::On).then(|| self.tile_of_experts(moe)),
        })
    }

    /// Returns the bytes of the f32 copies of rows and weights that the CPU's threads make for the experts' matmuls, and keep.
    pub fn kept_by_threads(&self) -> u64 {
        match &self.layer.mlp {
            MlpSpec::Moe(moe) if self.device == DeviceKind::Cpu => self.copied_by_experts(moe),
            _ => 0,
        }
    }

    /// Returns the bytes of the copies of rows and weights for the experts' matmuls.
    fn copied_by_experts(&self, moe: &MoeSpec) -> u64 {
        let of_matrix = |matrix: &ExpertMatrixSpec| {
            let cost = GroupedLinearCost {
                n_rows: self.n_residual_tokens * moe.router.top_k as u64,
                n_groups: (moe.n_experts / self.n_expert_ranks) as u64,
                n_in: matrix.input.len as u64,
                n_out: matrix.out as u64,
                dtype: self.dtype,
                device: self.device,
                input: LinearInput::Unused,
                grad: None,
                // In FP8 the values of codes are dense.
                storage: if matrix.fp8 { WeightStorage::Dense } else { matrix.storage },
            };
            cost.forward().scratch_bytes
        };
        moe.expert_matrices().map(of_matrix).max().unwrap_or(0)
    }

    /// Returns the sizes of a tile of the routed experts.
    fn tile_of_experts(&self, moe: &MoeSpec) -> TileOfExperts {
        let (n_own, top_k) = (self.n_residual_tokens as usize, moe.router.top_k);
        let tile = ExpertTile { hidden_size: self.layer.hidden_size, top_k };
        let (n_tokens, k) = match self.experts {
            ExpertExchange::None => (n_own, top_k),
            ExpertExchange::Rows { n_shards } => (n_own * top_k * n_shards as usize, 1),
            ExpertExchange::Tokens { n_ranks, .. } => (n_own * n_ranks as usize, top_k),
        };
        let n_tokens = tile.rows(n_tokens, k);
        let shares_input = self.layer.mlp.swiglu().is_some();
        TileOfExperts { n_tokens: n_tokens as u64, n_rows: (n_tokens * k) as u64, shares_input }
    }

    /// Returns the bytes of the gated activation of an MLP, or of its output in tiles.
    pub(super) fn started_bytes(&self) -> u64 {
        let Widths { d, f, .. } = self.widths();
        let width = if self.tiled_mlp == TiledMlp::On { d } else { f };
        self.n_tokens * width * self.n_bytes()
    }

    /// Returns the bytes of a shared expert's output before its gate; zero without a gate.
    pub(super) fn ungated_bytes(&self) -> u64 {
        self.layer.shared_expert_gate().map_or(0, |_| self.output_bytes())
    }

    /// Returns the peak bytes of a router's forward in f64: the copies, and the rounded logits.
    pub(super) fn router_forward(&self) -> u64 {
        self.router_copies() + self.router_logits()
    }

    /// Returns the peak bytes of a router's backward in f64, after that of the experts.
    pub(super) fn router_backward(&self) -> u64 {
        if self.router_copies() == 0 {
            return 0;
        }
        // The residual sum, and the gradients of the MLP's input by the experts and by the router.
        let rows = self.activation_bytes() + 2 * self.output_bytes();
        self.saved_until_attention() + rows + 2 * self.router_logits() + self.router_copies()
    }

    /// Returns the bytes of a router's selection that every activation checkpointing saves: weights, experts, two orders of the
    /// slots, and the experts that losses count, four bytes each.
    pub fn routing_bytes(&self) -> u64 {
        match &self.layer.mlp {
            MlpSpec::Moe(moe) => self.n_residual_tokens * moe.router.top_k as u64 * 5 * 4,
            MlpSpec::SwiGlu(_) => 0,
        }
    }

    /// Returns the bytes of a router's logits in f32; zero for a dense layer.
    fn router_logits(&self) -> u64 {
        self.experts().map_or(0, |experts| experts.logits_bytes())
    }

    /// Returns the bytes of the copies that a router in f64 makes; zero otherwise.
    fn router_copies(&self) -> u64 {
        match (&self.layer.mlp, self.router) {
            (MlpSpec::Moe(moe), RouterDtype::F64) => {
                linear_f64_bytes(self.n_residual_tokens, self.layer.hidden_size as u64, moe.n_experts as u64)
            }
            _ => 0,
        }
    }

    /// Returns the cost of the adapters of experts and router; `None` for a dense layer.
    pub(super) fn expert_adapters(&self) -> Option<ExpertAdaptersCost> {
        let MlpSpec::Moe(moe) = &self.layer.mlp else { return None };
        Some(ExpertAdaptersCost::of(moe, &self.experts()?))
    }
}
