//! Statistics of a router, from the pass that chooses the experts.
//!
//! t tokens, e experts, k experts per token

use candle_core::{DType, Result, Tensor, bail};

use super::spec::ScoreFunction;

/// Tokens and experts that statistics of a router count.
#[derive(Clone, Copy, Debug)]
pub struct RouterStatisticsSpec<'a> {
    /// 1 for each token that counts and 0 for another, u32 [t]; `None` if all count.
    pub token_mask: Option<&'a Tensor>,
    /// Experts that are counted.
    pub experts: CountedExperts,
}

/// Experts that router losses count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CountedExperts {
    /// The experts that the router chooses.
    Chosen,
    /// The experts with the highest scores, without bias, groups or a given selection: a second choice.
    TopScores,
}

/// Sums over the tokens that count. They have the same bits for any number of threads.
#[derive(Clone, Debug)]
pub struct RouterStatistics {
    pub(in crate::moe) score: ScoreFunction,
    /// [`Columns`] in f64.
    pub(in crate::moe) sums: Tensor,
    /// [`Columns`] rounded to f32.
    rounded: Tensor,
    columns: Columns,
    counted_experts: Tensor,
}

/// Output of the router's kernels.
pub(super) struct Chosen {
    /// f32 [t, k].
    pub(super) weights: Tensor,
    /// u32 [t, k].
    pub(super) experts: Tensor,
    pub(super) statistics: Option<RouterStatistics>,
}

/// Layout of the sums: normalized scores [e], squared log-sum-exps, tokens of each chosen expert [e], tokens, logits, squared
/// logits, 0, and tokens of each best expert [e] if these are others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Columns {
    n_experts: usize,
    best: CountedExperts,
}

impl Columns {
    pub(super) fn new(n_experts: usize, best: CountedExperts) -> Self {
        Self { n_experts, best }
    }

    /// Returns the number of columns.
    pub(super) fn len(self) -> usize {
        let n_best = if self.best == CountedExperts::TopScores { self.n_experts } else { 0 };
        2 * self.n_experts + 5 + n_best
    }

    /// Returns the column of the squared log-sum-exps.
    pub(super) fn lse_squares(self) -> usize {
        self.n_experts
    }

    /// Returns the first column of the chosen experts.
    pub(super) fn chosen(self) -> usize {
        self.n_experts + 1
    }

    /// Returns the column of the number of tokens. Those of the logits and of their squares follow.
    pub(super) fn tokens(self) -> usize {
        2 * self.n_experts + 1
    }

    /// Returns the first column of the best experts.
    pub(super) fn best(self) -> usize {
        match self.best {
            CountedExperts::Chosen => self.chosen(),
            CountedExperts::TopScores => self.tokens() + 4,
        }
    }
}

impl RouterStatistics {
    pub(super) fn new(
        score: ScoreFunction,
        columns: Columns,
        [sums, rounded]: [Tensor; 2],
        counted_experts: Tensor,
    ) -> Self {
        Self { score, sums, rounded, columns, counted_experts }
    }

    /// Returns f32 [e + 4]: the tokens of each chosen expert, then the number of tokens, the sum of their logits, the sum of the
    /// logits' squares, and 0.
    pub fn totals(&self) -> Result<Tensor> {
        self.rounded.narrow(0, self.columns.chosen(), self.columns.n_experts + 4)
    }

    /// Returns the experts that router losses count, u32 [t, k], of all tokens.
    pub fn counted_experts(&self) -> &Tensor {
        &self.counted_experts
    }

    /// Returns the tokens of each of the best experts, f32 [e].
    pub fn tokens_per_expert(&self) -> Result<Tensor> {
        self.rounded.narrow(0, self.columns.best(), self.columns.n_experts)
    }

    /// Returns the sum of the normalized scores, f32 [e]: the softmax, or sigmoid-like scores divided by their sum.
    pub(in crate::moe) fn score_sums(&self) -> Result<Tensor> {
        self.rounded.narrow(0, 0, self.columns.n_experts)
    }

    /// Returns the sum of the squared log-sum-exps, an f32 scalar.
    pub(in crate::moe) fn lse_squares(&self) -> Result<Tensor> {
        self.rounded.narrow(0, self.columns.lse_squares(), 1)?.reshape(())
    }

    /// Fails unless the logits have the experts of these statistics.
    pub(in crate::moe) fn check(&self, op: &str, n_experts: usize) -> Result<()> {
        match self.columns.n_experts {
            own if own == n_experts => Ok(()),
            own => bail!("{op}: the statistics are of {own} experts, the logits of {n_experts}"),
        }
    }
}

/// Fails unless the token mask is u32 [t].
pub(super) fn check_token_mask(op: &str, counted: Option<RouterStatisticsSpec<'_>>, n_tokens: usize) -> Result<()> {
    match counted.and_then(|counted| counted.token_mask) {
        Some(x) if x.dtype() != DType::U32 || x.dims() != [n_tokens] => {
            bail!("{op}: want a u32 token mask [{n_tokens}], got {:?} {:?}", x.dtype(), x.dims())
        }
        _ => Ok(()),
    }
}
