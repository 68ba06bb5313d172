//! Routed experts of a mixture-of-experts layer.
//!
//! Dimensions: t tokens, d hidden size, e experts, n rows sorted by expert, f intermediate size of an expert

use candle_core::{Result, Tensor};
use candlewick_ops::{self as ops, ExpertAssignment, GroupedCall, GroupedGemmImpl, Routing, TokensPerCall};

use crate::expert_linear::ExpertLinear;

/// Matrices of the routed experts of this rank.
#[derive(Clone, Debug)]
pub struct Experts {
    /// Gate and up projections [e * 2f, d].
    gate_up: ExpertLinear,
    /// Down projections [e * d, f].
    down: ExpertLinear,
}

/// Arguments of one layer's routed experts.
#[derive(Clone, Copy)]
pub struct ExpertCall<'a> {
    /// Normalized hidden states [t, d].
    pub x: &'a Tensor,
    /// Selected experts and weights of each token.
    pub routing: &'a Routing,
    /// Experts of this rank.
    pub experts: &'a Experts,
    /// Implementation of their matmuls on a GPU.
    pub implementation: GroupedGemmImpl,
    /// Padding of the experts; `None` for the rows of tokens alone.
    pub padding: Option<ExpertPadding>,
}

/// Padding of experts to their capacity, equal on all ranks: sizes of an exchange of tokens that are known without data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertPadding {
    /// The most tokens of a rank.
    pub most_tokens: usize,
    /// Rows of each expert from the tokens of one rank: the capacity for `most_tokens` tokens.
    pub rows_per_expert: usize,
}

impl ExpertCall<'_> {
    /// Computes [t, d] -> [t, d] with all experts on this rank.
    pub fn compute(&self) -> Result<Tensor> {
        let assignment = &self.routing.assignment;
        let assignment = &self.padded(assignment, 1)?.unwrap_or_else(|| assignment.clone());
        let weights_n = ops::permute_weights(&self.routing.weights, assignment)?;
        let tokens = TokensPerCall::of(self.x.dim(0)?);
        let rows_nd = ops::permute(self.x, assignment)?;
        ops::unpermute(&self.compute_rows(rows_nd, &weights_n, &assignment.offsets, tokens)?, assignment)
    }

    /// Computes [n, d] -> [n, d]. `rows_nd` are sorted by expert, `offsets` u32 [e + 1] are the first rows of the experts,
    /// and `weights_n` f32 [n] multiply the outputs.
    pub fn compute_rows(
        &self,
        rows_nd: Tensor,
        weights_n: &Tensor,
        offsets: &Tensor,
        tokens: TokensPerCall,
    ) -> Result<Tensor> {
        let call = GroupedCall { tokens, implementation: self.implementation };
        self.experts.forward(rows_nd, weights_n, offsets, call)
    }

    /// Pads an assignment of the tokens of `n_ranks` ranks; `None` if the experts are not padded.
    pub fn padded(&self, assignment: &ExpertAssignment, n_ranks: usize) -> Result<Option<ExpertAssignment>> {
        self.padding.map(|padding| assignment.padded_to(padding.rows_per_expert * n_ranks)).transpose()
    }
}

impl Experts {
    pub(crate) fn new(gate_up: ExpertLinear, down: ExpertLinear) -> Self {
        Self { gate_up, down }
    }

    fn forward(&self, rows_nd: Tensor, weights_n: &Tensor, offsets: &Tensor, call: GroupedCall) -> Result<Tensor> {
        let gate_up_n2f = self.gate_up.forward(&rows_nd, offsets, call)?;
        drop(rows_nd);
        let gated_nf = ops::weighted_swiglu(&gate_up_n2f, weights_n)?;
        self.down.forward(&gated_nf, offsets, call)
    }
}
