//! Sizes of the layout changes.

use candle_core::{Result, bail};

pub(super) const OP: &str = "rank_heads";

/// Sizes of a layout change: [tokens, groups, len] in one layout, [groups * copies, tokens, len] in the other.
#[derive(Clone, Copy, Debug)]
pub(super) struct RankHeads {
    pub(super) tokens: usize,
    /// Consecutive heads that one rank has, or that several ranks have copies of.
    pub(super) groups: usize,
    /// Ranks with the same heads.
    pub(super) copies: usize,
    /// Elements of a group's heads.
    pub(super) len: usize,
}

impl RankHeads {
    /// Returns the sizes for `tokens` of `h` heads of size `k`. An error if neither number divides the other.
    pub(super) fn new(tokens: usize, [h, k]: [usize; 2], n_ranks: usize) -> Result<Self> {
        if h > 0 && n_ranks > 0 && h.is_multiple_of(n_ranks) {
            return Ok(Self { tokens, groups: n_ranks, copies: 1, len: h / n_ranks * k });
        }
        if h > 0 && n_ranks > 0 && n_ranks.is_multiple_of(h) {
            return Ok(Self { tokens, groups: h, copies: n_ranks / h, len: k });
        }
        bail!("{OP}: {h} heads over {n_ranks} ranks: one must be a multiple of the other")
    }
}
