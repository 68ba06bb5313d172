//! Memory estimate of LoRA on the router, the shared expert's gate and the routed experts of a layer, beyond that of the
//! frozen layer.
//!
//! Dimensions: n rows, d hidden size, f intermediate size of an expert

use super::experts_cost::ExpertsCost;
use super::spec::{ExpertMatrixSpec, MoeSpec};
use crate::mlp::MlpSpec;

/// Sizes of these adapters of a layer, in elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertAdaptersCost {
    n_tokens: u64,
    /// Rows that the rank computes together.
    n_rows: u64,
    d: u64,
    f: u64,
    n_bytes: u64,
    /// Sum of the ranks of the experts' adapters.
    ranks: u64,
    /// Sum of the ranks of the adapters that read this rank's tokens: of the router and the shared expert's gate.
    token_ranks: u64,
    /// Output columns of the widest adapter of the gate and up projections; 0 without one.
    gate_up: u64,
    /// Output columns of the down projection's adapter; 0 without one.
    down: u64,
    /// True if the adapters have dropout, which copies their input.
    has_dropout: bool,
}

impl ExpertAdaptersCost {
    /// Returns the sizes for the adapters of these experts.
    pub(crate) fn of(moe: &MoeSpec, experts: &ExpertsCost) -> Self {
        let widest = |matrix: &ExpertMatrixSpec| {
            matrix.adapters.iter().map(|adapter| adapter.columns.len() as u64).max().unwrap_or(0)
        };
        let adapters = || moe.expert_matrices().into_iter().flat_map(|matrix| &matrix.adapters);
        let on_tokens = moe.shared_expert_gate().into_iter().chain([&moe.router_weight]);
        Self {
            n_tokens: experts.n_tokens,
            n_rows: experts.n_live_rows(),
            d: moe.down.out as u64,
            f: experts.width(),
            n_bytes: experts.n_bytes,
            has_dropout: adapters().any(|adapter| adapter.adapter.dropout > 0.0),
            ranks: adapters().map(|adapter| adapter.adapter.r as u64).sum(),
            token_ranks: on_tokens.filter_map(|linear| linear.adapter.as_ref()).map(|adapter| adapter.r as u64).sum(),
            gate_up: widest(&moe.gate_up).div_ceil(experts.n_shards()),
            down: widest(&moe.down),
        }
    }

    /// Returns the bytes of the outputs of the factors A, which backward reads.
    pub(crate) fn saved_bytes(&self) -> u64 {
        self.rows(self.ranks) + self.n_tokens * self.token_ranks * self.n_bytes
    }

    /// Returns the additional peak bytes of the forward: an adapter's output and its sum with the matrix's output. The sum of some
    /// of the columns exists next to that of all.
    ///
    /// The frozen layer's peak is after the gate and up projections, with f more columns.
    pub(crate) fn forward_bytes(&self) -> u64 {
        let [of_d, of_f] = self.dropped();
        let some_columns = if self.gate_up < 2 * self.f { self.gate_up } else { 0 };
        let gate_up = if self.gate_up > 0 { (self.gate_up + some_columns + 2 * self.f - self.f).max(of_d) } else { 0 };
        let down = if self.down > 0 { (self.down + self.d).max(of_f) } else { 0 };
        self.rows(gate_up.max(down))
    }

    /// Returns the additional peak bytes of the backward: the gradient of the input that is added to the matrix's.
    ///
    /// The frozen layer's peak is before the gate and up projections, with d more columns.
    pub(crate) fn backward_bytes(&self) -> u64 {
        let [of_d, of_f] = self.dropped();
        let gate_up = if self.gate_up > 0 { self.d + of_d } else { 0 };
        let down = if self.down > 0 { (self.f + of_f).saturating_sub(self.d) } else { 0 };
        self.rows(gate_up.max(down))
    }

    /// Returns the columns of a copy of the input of gate and up, and of down, with dropout; zero without.
    fn dropped(&self) -> [u64; 2] {
        if self.has_dropout { [self.d, self.f] } else { [0, 0] }
    }

    /// Returns the bytes of rows of `width` elements.
    fn rows(&self, width: u64) -> u64 {
        self.n_rows * width * self.n_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: ExpertAdaptersCost = ExpertAdaptersCost {
        n_tokens: 5,
        n_rows: 10,
        d: 8,
        f: 6,
        n_bytes: 2,
        ranks: 0,
        token_ranks: 0,
        gate_up: 0,
        down: 0,
        has_dropout: false,
    };

    fn bytes(cost: ExpertAdaptersCost) -> [u64; 3] {
        [cost.saved_bytes(), cost.forward_bytes(), cost.backward_bytes()]
    }

    #[test]
    fn adapters_add_their_activations_and_sums() {
        assert_eq!(bytes(NONE), [0; 3]);
        assert_eq!(bytes(ExpertAdaptersCost { token_ranks: 3, ..NONE }), [5 * 3 * 2, 0, 0]);
        let gate_up = ExpertAdaptersCost { ranks: 5, gate_up: 12, ..NONE };
        assert_eq!(bytes(gate_up), [10 * 5 * 2, 10 * (12 + 12 - 6) * 2, 10 * 8 * 2]);
        let up = ExpertAdaptersCost { ranks: 5, gate_up: 6, ..NONE };
        assert_eq!(bytes(up), [10 * 5 * 2, 10 * (6 + 6 + 12 - 6) * 2, 10 * 8 * 2]);
        let down = ExpertAdaptersCost { ranks: 5, down: 8, ..NONE };
        assert_eq!(bytes(down), [10 * 5 * 2, 10 * (8 + 8) * 2, 0]);
    }
}
