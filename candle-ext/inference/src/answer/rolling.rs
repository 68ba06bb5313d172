//! What of a request a model is shown at once: cut to its context, or a long text in windows.

use super::encode::EncodedPair;

/// Tokens of which the last ones are scored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScoredSequence {
    /// At most the model's context and one more: the last is scored and never seen.
    pub ids: Vec<u32>,
    /// How many of them are scored.
    pub n_targets: usize,
    /// How many tokens were cut off in front.
    pub n_cut: usize,
}

impl ScoredSequence {
    /// Cuts a pair to a context of `max_length` tokens. The continuation must fit into it.
    pub fn new(pair: EncodedPair, max_length: usize) -> Self {
        let EncodedPair { context, continuation } = pair;
        assert!(continuation.len() <= max_length, "the caller has checked the continuation");
        let n_targets = continuation.len();
        let mut ids = context;
        ids.extend(continuation);
        let n_cut = ids.len().saturating_sub(max_length + 1);
        ids.drain(..n_cut);
        Self { ids, n_targets, n_cut }
    }

    /// The tokens that the model sees.
    pub fn seen(&self) -> &[u32] {
        &self.ids[..self.ids.len() - 1]
    }

    /// The row of the model after which the first target comes.
    pub fn first_row(&self) -> usize {
        self.ids.len() - 1 - self.n_targets
    }

    /// The targets.
    pub fn targets(&self) -> &[u32] {
        &self.ids[self.ids.len() - self.n_targets..]
    }
}

/// Cuts a text into windows in each of which `max_length` tokens are seen, and of which every token is scored once. Each
/// window sees as much as fits of what is before: the first nothing but `prefix`, the middle ones a single token, and the
/// last one all that it has room for.
pub fn rolling_windows(ids: &[u32], prefix: u32, max_length: usize) -> Vec<ScoredSequence> {
    let n_first = ids.len().min(max_length);
    let mut windows = Vec::new();
    if n_first > 0 {
        windows.push(ScoredSequence { ids: [&[prefix], &ids[..n_first]].concat(), n_targets: n_first, n_cut: 0 });
    }
    let mut done = n_first;
    while done < ids.len() {
        let n_targets = (ids.len() - done).min(max_length);
        done += n_targets;
        windows.push(ScoredSequence { ids: ids[done - max_length - 1..done].to_vec(), n_targets, n_cut: 0 });
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
    fn what_does_not_fit_is_cut_off_in_front() {
        let pair = |n: u32| EncodedPair { context: (0..n).collect(), continuation: vec![90, 91] };
        let scored = ScoredSequence::new(pair(3), 4);
        assert_eq!(
            (scored.seen(), scored.targets(), scored.first_row(), scored.n_cut),
            (&[0, 1, 2, 90][..], &[90, 91][..], 2, 0)
        );
        let scored = ScoredSequence::new(pair(6), 4);
        assert_eq!(
            (scored.seen(), scored.targets(), scored.first_row(), scored.n_cut),
            (&[3, 4, 5, 90][..], &[90, 91][..], 2, 3)
        );
        // The first target may be all that the model sees.
        let scored = ScoredSequence::new(pair(6), 2);
        assert_eq!((scored.seen(), scored.first_row(), scored.n_cut), (&[5, 90][..], 0, 5));
    }
}
