//! The inputs and results that both kernels of `linear_cross_entropy` share.

/// The reduction of token losses to one loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Their sum over the number of tokens that are not ignored; 0 if there is none.
    Mean,
    /// Their sum.
    Sum,
    /// One loss a token, 0 where it is ignored.
    None,
}

/// The scores of known tokens, without a gradient.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenScores {
    /// log softmax(x w^T)[target] of each target.
    pub logprobs: Vec<f32>,
    /// True for a target that is the first token with the largest logit.
    pub is_greedy: Vec<bool>,
}

impl FromIterator<(f32, bool)> for TokenScores {
    fn from_iter<I: IntoIterator<Item = (f32, bool)>>(scores: I) -> Self {
        let (logprobs, is_greedy) = scores.into_iter().unzip();
        Self { logprobs, is_greedy }
    }
}

/// The sizes in the legend.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) t: usize,
    pub(super) v: usize,
    pub(super) d: usize,
}

/// A token that counts: its row and what it should predict, a row of w or [`super::vocab_shard::NOT_IN_SHARD`].
#[derive(Clone, Copy)]
pub(super) struct Target {
    pub(super) row: usize,
    pub(super) class: usize,
}
