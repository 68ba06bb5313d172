//! Routed experts of a mixture-of-experts layer.
//!
//! Dimensions: t tokens, d hidden size, e experts, n rows sorted by expert, f intermediate size of an expert

use candle_core::{Result, Tensor};
use candlewick_ops::{
    self as ops, ColumnShard, ExpertAssignment, GroupedCall, GroupedGemmImpl, Routing, TokensPerCall,
};

use super::expert_linear::ExpertLinear;
use crate::{ExpertDropout, ExpertWeighting, TiledMlp};

/// Matrices of the routed experts of this rank.
#[derive(Clone, Debug)]
pub struct Experts {
    /// Gate and up projections [e * 2f, d].
    pub(crate) gate_up: ExpertLinear,
    /// Down projections [e * d, f].
    pub(crate) down: ExpertLinear,
    pub(crate) weighting: ExpertWeighting,
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
    /// Tiling over the tokens.
    pub tiled_mlp: TiledMlp,
    /// Keys of the dropout masks of each token's experts, i64 [t, k]; `None` without dropout.
    pub dropout_keys: Option<&'a Tensor>,
}

/// Tokens whose experts a rank computes.
#[derive(Clone, Copy)]
pub struct ExpertTokens<'a> {
    /// Tokens [t, d].
    pub x: &'a Tensor,
    /// Weight of each slot, f32 [t, k].
    pub weights: &'a Tensor,
    /// Experts of this rank that compute each token.
    pub assignment: &'a ExpertAssignment,
    /// Number of tokens of a call of a grouped matmul.
    pub tokens: TokensPerCall,
    /// Dropout masks of the adapters of experts; `None` without dropout.
    pub dropout: Option<ExpertDropout<'a>>,
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
        self.compute_tokens(ExpertTokens {
            x: self.x,
            weights: &self.routing.weights,
            assignment,
            tokens: TokensPerCall::of(self.x.dim(0)?),
            dropout: self.dropout_keys.map(|keys| ExpertDropout { keys, columns: ColumnShard::ALL }),
        })
    }

    /// Computes [t, d] -> [t, d]: for each token, the sum of the outputs of its experts on this rank, times their weights.
    ///
    /// In tiles, backward computes the rows of each tile again. Padding is left out, because it only adds zeros.
    pub fn compute_tokens(&self, tokens: ExpertTokens) -> Result<Tensor> {
        let n_tokens = tokens.x.dim(0)?;
        if self.tiled_mlp == TiledMlp::Off || n_tokens == 0 {
            return self.experts.forward(tokens, self.implementation);
        }
        let ExpertTokens { x, weights, assignment, tokens, dropout } = tokens;
        let tile = ExpertTile { hidden_size: x.dim(1)?, top_k: self.routing.assignment.top_k() };
        let (experts, implementation, assignment) = (self.experts.clone(), self.implementation, assignment.clone());
        let dropout = dropout.map(|dropout| (dropout.keys.clone(), dropout.columns));
        ops::tiled_with_weights(x, weights, tile.rows(n_tokens, assignment.top_k()), move |[x, weights], first| {
            let n_tokens = x.dim(0)?;
            let of_tile = assignment.experts.narrow(0, first, n_tokens)?;
            let assignment = &ExpertAssignment::new(&of_tile, assignment.n_experts())?;
            let keys = dropout.as_ref().map(|(keys, _)| keys.narrow(0, first, n_tokens)).transpose()?;
            let dropout =
                keys.iter().zip(&dropout).map(|(keys, (_, columns))| ExpertDropout { keys, columns: *columns }).next();
            experts.forward(ExpertTokens { x, weights, assignment, tokens, dropout }, implementation)
        })
    }

    /// Pads an assignment of the tokens of `n_ranks` ranks; `None` if the experts are not padded.
    pub fn padded(&self, assignment: &ExpertAssignment, n_ranks: usize) -> Result<Option<ExpertAssignment>> {
        self.padding.map(|padding| assignment.padded_to(padding.rows_per_expert * n_ranks)).transpose()
    }
}

impl Experts {
    /// Returns true if an adapter of these experts has dropout.
    pub(crate) fn have_dropout(&self) -> bool {
        self.gate_up.has_dropout() || self.down.has_dropout()
    }

    /// Computes [t, d] -> [t, d].
    fn forward(&self, tokens: ExpertTokens, implementation: GroupedGemmImpl) -> Result<Tensor> {
        let ExpertTokens { x, weights, assignment, tokens, dropout } = tokens;
        let call = GroupedCall { tokens, implementation };
        let keys_n = dropout.map(|dropout| ops::permute_dropout_keys(dropout.keys, assignment)).transpose()?;
        let dropout = keys_n.as_ref().zip(dropout).map(|(keys, dropout)| ExpertDropout { keys, ..dropout });
        let of_gate_up = dropout.map(|dropout| ExpertDropout { columns: ColumnShard::ALL, ..dropout });
        let (offsets, weights_n) = (&assignment.offsets, ops::permute_weights(weights, assignment)?);
        let rows_nd = ops::permute(x, assignment)?;
        let (rows_nd, weights_n) = match self.weighting {
            ExpertWeighting::Output => (rows_nd, weights_n),
            ExpertWeighting::Input => {
                let scaled_nd = ops::scale_rows(&rows_nd, &weights_n)?;
                drop(rows_nd);
                (scaled_nd, weights_n.ones_like()?)
            }
        };
        let gate_up_n2f = self.gate_up.forward(&rows_nd, offsets, call, of_gate_up)?;
        drop(rows_nd);
        let gated_nf = ops::weighted_swiglu(&gate_up_n2f, &weights_n)?;
        ops::unpermute(&self.down.forward(&gated_nf, offsets, call, dropout)?, assignment)
    }
}

/// Sizes that decide the tokens of a tile of experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertTile {
    pub(crate) hidden_size: usize,
    /// Selected experts of a token, over all ranks.
    pub(crate) top_k: usize,
}

impl ExpertTile {
    /// Returns the tokens of a tile of `n_tokens` tokens with `k` experts each on this rank: a tile has about as many rows as
    /// `hidden_size` tokens have experts.
    pub(crate) fn rows(self, n_tokens: usize, k: usize) -> usize {
        ops::tile_rows(n_tokens, self.hidden_size * self.top_k / k.max(1))
    }
}
