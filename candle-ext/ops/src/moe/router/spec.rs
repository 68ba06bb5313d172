//! Settings of a router.

use candle_core::{Result, Tensor, bail};

/// Most experts per token on CUDA, one per lane of a warp.
pub const MAX_CUDA_TOP_K: usize = 32;

/// Function from a token's logits to scores, one per expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoreFunction {
    /// Softmax over the experts.
    Softmax,
    /// Sigmoid of each logit, as in DeepSeek-V3.
    Sigmoid,
    /// Square root of the softplus of each logit.
    SqrtSoftplus,
}

/// Order of the score function and the choice of experts. It matters for softmax only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopKOrder {
    /// Scores over all experts, then top-k: Megatron-LM's pre-softmax.
    ScoreFirst,
    /// Top-k of the logits, then scores over the k chosen experts.
    TopKFirst,
}

/// Group-limited choice: experts come from the groups with the highest scores.
///
/// Groups are equal, contiguous ranges of experts. The score of a group is the sum of its highest selection scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupLimit {
    /// Number of groups of all experts.
    pub n_groups: usize,
    /// Number of groups that experts are chosen from.
    pub n_selected: usize,
    /// Number of scores summed per group: 2 in DeepSeek-V3, 1 in DeepSeek-V2, k / `n_selected` in Megatron-LM.
    pub n_scores_per_group: usize,
}

/// Settings of [`route`](crate::route).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterSpec {
    /// Number of experts per token, k.
    pub top_k: usize,
    /// Score function.
    pub score: ScoreFunction,
    /// Order of scores and choice.
    pub order: TopKOrder,
    /// Divide the k weights by their sum.
    pub normalize: bool,
    /// Restriction to groups of experts, if any.
    pub groups: Option<GroupLimit>,
    /// Factor on the weights.
    pub scaling: f64,
}

impl RouterSpec {
    /// Fails unless the settings fit to `n_experts` experts.
    pub(super) fn check(&self, n_experts: usize) -> Result<()> {
        let k = self.top_k;
        if k == 0 || k > n_experts {
            bail!("route: top_k must be 1 to {n_experts}, the number of experts, got {k}")
        }
        let Some(GroupLimit { n_groups, n_selected, n_scores_per_group }) = self.groups else { return Ok(()) };
        if n_groups == 0 || !n_experts.is_multiple_of(n_groups) {
            bail!("route: {n_experts} experts cannot be divided by {n_groups} groups")
        }
        let size = n_experts / n_groups;
        if n_selected > n_groups || n_selected * size < k {
            bail!("route: {n_selected} of {n_groups} groups of {size} experts cannot give {k} experts")
        }
        if n_scores_per_group == 0 || n_scores_per_group > size {
            bail!("route: n_scores_per_group must be 1 to {size}, the experts per group, got {n_scores_per_group}")
        }
        Ok(())
    }
}

/// Choice of the experts of a token.
#[derive(Clone, Copy, Debug)]
pub enum ExpertChoice<'a> {
    /// The highest scores of the logits, as in [`route`](crate::route).
    ByScore {
        /// Bias that is added to the scores, f32 [e].
        bias: Option<&'a Tensor>,
    },
    /// The highest numbers, f32 [t, e], as in [`route_by`](crate::route_by).
    BySelection(&'a Tensor),
    /// These experts, u32 [t, k], as in [`route_to`](crate::route_to).
    Given(&'a Tensor),
}

/// Tensor, besides the logits, that the choice of experts depends on.
#[derive(Clone, Copy)]
pub(super) enum Selection<'a> {
    /// Bias [e] that is added to the scores.
    Bias(&'a Tensor),
    /// Selection scores [t, e] themselves.
    Given(&'a Tensor),
}
