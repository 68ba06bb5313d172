//! Units over which a loss is a mean.

use crate::batch::Micro;

/// Unit over which the loss of a step is a mean, whatever micro-batch or rank has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossNormalizer {
    /// Tokens with a target.
    TargetTokens,
    /// Sequences with a target.
    Sequences,
    /// Pairs of sequences of which at least one has a target. A micro-batch has pairs first, each as two consecutive sequences;
    /// padding follows.
    Pairs,
}

impl LossNormalizer {
    /// Counts the units of a micro-batch from its targets and the boundaries of its sequences.
    pub fn count(self, targets: &[i64], cu_seqlens: &[usize]) -> usize {
        let is_target = |target: &&i64| **target != Micro::IGNORED;
        let sequences: Vec<bool> =
            cu_seqlens.windows(2).map(|ends| targets[ends[0]..ends[1]].iter().any(|it| is_target(&it))).collect();
        match self {
            Self::TargetTokens => targets.iter().filter(is_target).count(),
            Self::Sequences => sequences.iter().filter(|has_target| **has_target).count(),
            Self::Pairs => sequences.chunks(2).filter(|pair| pair.contains(&true)).count(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_and_sequences_without_targets_do_not_count_but_half_pairs_do() {
        const NONE: i64 = Micro::IGNORED;
        let (targets, ends) = ([1, NONE, 2, 3, NONE, NONE, 4, NONE], [0, 2, 4, 4, 6, 7, 8]);
        for (normalizer, want) in
            [(LossNormalizer::TargetTokens, 4), (LossNormalizer::Sequences, 3), (LossNormalizer::Pairs, 2)]
        {
            assert_eq!(normalizer.count(&targets, &ends), want, "{normalizer:?}");
        }
    }
}
