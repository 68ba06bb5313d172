//! Inputs and results that both kernels of `linear_cross_entropy` share.

/// Reduction of token losses, as in torch's `cross_entropy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Mean over the tokens that are not ignored; 0 if there are none.
    Mean,
    /// Sum over all tokens.
    Sum,
    /// One loss per token; 0 for ignored tokens.
    None,
}

/// Log-probabilities of given tokens, computed without a gradient.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenScores {
    /// log softmax(x w^T)[target] of each target.
    pub logprobs: Vec<f32>,
    /// True for a target that greedy decoding would choose: the first token with the largest logit.
    pub is_greedy: Vec<bool>,
}

impl FromIterator<(f32, bool)> for TokenScores {
    fn from_iter<I: IntoIterator<Item = (f32, bool)>>(scores: I) -> Self {
        let (logprobs, is_greedy) = scores.into_iter().unzip();
        Self { logprobs, is_greedy }
    }
}

/// Sizes t, v and d.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) t: usize,
    pub(super) v: usize,
    pub(super) d: usize,
}

/// Label smoothing of Szegedy et al., 2016 (<https://arxiv.org/abs/1512.00567>, section 7), as in torch's
/// `cross_entropy`: the target distribution is (1 - factor) onehot + factor / n_vocab.
#[derive(Clone, Copy)]
pub(super) struct LabelSmoothing {
    /// Probability that is spread over the vocabulary; 0 for none.
    pub(super) factor: f32,
    /// Classes of the whole vocabulary.
    pub(super) n_vocab: usize,
}

impl LabelSmoothing {
    pub(super) const OFF: Self = Self { factor: 0.0, n_vocab: 1 };

    pub(super) fn is_off(self) -> bool {
        self.factor == 0.0
    }

    /// Returns the probability of every class.
    pub(super) fn per_class(self) -> f32 {
        self.factor / self.n_vocab.max(1) as f32
    }
}

/// A token that is not ignored: its row, and its target as a row of w or [`super::vocab_shard::NOT_IN_SHARD`].
#[derive(Clone, Copy)]
pub(super) struct Target {
    pub(super) row: usize,
    pub(super) class: usize,
}
