//! Truncation of requests to the context length, and rolling windows over long texts.

use super::encode::EncodedPair;

/// A token sequence whose last tokens are scored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScoredSequence {
    /// Tokens; at most one more than the context length, because the last is a target only.
    pub ids: Vec<u32>,
    /// Number of scored tokens at the end.
    pub n_targets: usize,
    /// Number of tokens truncated from the left.
    pub n_truncated: usize,
}

impl ScoredSequence {
    /// Truncates a pair from the left to a context of `max_length` tokens. The continuation must fit.
    pub fn new(pair: EncodedPair, max_length: usize) -> Self {
        let EncodedPair { context, continuation } = pair;
        assert!(continuation.len() <= max_length, "the caller has checked the continuation");
        let n_targets = continuation.len();
        let mut ids = context;
        ids.extend(continuation);
        let n_truncated = ids.len().saturating_sub(max_length + 1);
        ids.drain(..n_truncated);
        Self { ids, n_targets, n_truncated }
    }

    /// Returns the input tokens: all but the last.
    pub fn seen(&self) -> &[u32] {
        &self.ids[..self.ids.len() - 1]
    }

    /// Returns the row of the input that predicts the first target.
    pub fn first_row(&self) -> usize {
        self.ids.len() - 1 - self.n_targets
    }

    /// Returns the scored tokens.
    pub fn targets(&self) -> &[u32] {
        &self.ids[self.ids.len() - self.n_targets..]
    }
}

/// Splits a text into windows of `max_length` input tokens, so that every token is scored once.
///
/// The first window's context is `prefix`, that of later ones a single token. The last window is filled up with
/// preceding tokens.
pub fn rolling_windows(ids: &[u32], prefix: u32, max_length: usize) -> Vec<ScoredSequence> {
    let n_first = ids.len().min(max_length);
    let mut windows = Vec::new();
    if n_first > 0 {
        windows.push(ScoredSequence { ids: [&[prefix], &ids[..n_first]].concat(), n_targets: n_first, n_truncated: 0 });
    }
    let mut done = n_first;
    while done < ids.len() {
        let n_targets = (ids.len() - done).min(max_length);
        done += n_targets;
        windows.push(ScoredSequence { ids: ids[done - max_length - 1..done].to_vec(), n_targets, n_truncated: 0 });
    }
    windows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(n: u32, max_length: usize, want: &[(&[u32], usize)]) {
        let ids: Vec<u32> = (1..=n).collect();
        let got = rolling_windows(&ids, 0, max_length);
        let got: Vec<(&[u32], usize)> = got.iter().map(|window| (&window.ids[..], window.n_targets)).collect();
        assert_eq!(got, want);
    }

    #[test]
    fn every_token_is_scored_once_and_the_last_window_is_full() {
        check(0, 3, &[]);
        check(2, 3, &[(&[0, 1, 2], 2)]);
        check(3, 3, &[(&[0, 1, 2, 3], 3)]);
        check(4, 3, &[(&[0, 1, 2, 3], 3), (&[1, 2, 3, 4], 1)]);
        check(7, 3, &[(&[0, 1, 2, 3], 3), (&[3, 4, 5, 6], 3), (&[4, 5, 6, 7], 1)]);
        check(3, 1, &[(&[0, 1], 1), (&[1, 2], 1), (&[2, 3], 1)]);
    }

    #[test]
    fn tokens_beyond_the_context_are_truncated_on_the_left() {
        let pair = |n: u32| EncodedPair { context: (0..n).collect(), continuation: vec![90, 91] };
        let scored = ScoredSequence::new(pair(3), 4);
        assert_eq!(
            (scored.seen(), scored.targets(), scored.first_row(), scored.n_truncated),
            (&[0, 1, 2, 90][..], &[90, 91][..], 2, 0)
        );
        let scored = ScoredSequence::new(pair(6), 4);
        assert_eq!(
            (scored.seen(), scored.targets(), scored.first_row(), scored.n_truncated),
            (&[3, 4, 5, 90][..], &[90, 91][..], 2, 3)
        );
        // The first target may be all that the model sees.
        let scored = ScoredSequence::new(pair(6), 2);
        assert_eq!((scored.seen(), scored.first_row(), scored.n_truncated), (&[5, 90][..], 0, 5));
    }
}
