//! Sample packing: several samples in a row.

use std::collections::BTreeSet;

use super::dataset::SampleSlice;
use super::plan::PackingStrategy;

/// The number of samples that are packed together. Packing a whole data set at once would combine the same lengths in
/// every epoch. A window of this size wastes less than one row each.
pub(crate) const WINDOW: usize = 8192;

/// The packing of whole sequences into rows of at most `max_length` tokens.
#[derive(Clone, Copy)]
pub(crate) struct FitPacker {
    pub(crate) strategy: PackingStrategy,
    pub(crate) max_length: usize,
    /// The number of sequences that are packed together.
    pub(crate) window: usize,
}

impl FitPacker {
    /// Packs each window of `order`. Each row lists its sequences in the order of `order`.
    pub(crate) fn pack(self, order: &[u32], length: impl Fn(u32) -> usize) -> impl Iterator<Item = Vec<u32>> {
        order.chunks(self.window).flat_map(move |window| {
            let lengths: Vec<usize> = window.iter().map(|&sequence| length(sequence)).collect();
            let bins = best_fit(self.placement_order(&lengths), &lengths, self.max_length);
            bins.into_iter().map(|bin| bin.into_iter().map(|item| window[item]).collect())
        })
    }

    /// Returns the order in which the sequences of a window are placed. Each goes into the fullest row in which it fits.
    ///
    /// Longest first wastes the fewest tokens, but then sequences of equal length share rows, so steps are far from random
    /// samples of the data. `best_fit` therefore keeps the order of the window. Only sequences longer than half a row come
    /// first: no two of them can share a row.
    fn placement_order(self, lengths: &[usize]) -> Vec<usize> {
        let is_sorted = |n_tokens: usize| match self.strategy {
            PackingStrategy::BestFit => 2 * n_tokens > self.max_length,
            PackingStrategy::Bfd => true,
        };
        let mut placement: Vec<usize> = (0..lengths.len()).collect();
        placement.sort_by_key(|&i| std::cmp::Reverse(Some(lengths[i]).filter(|&n_tokens| is_sorted(n_tokens))));
        placement
    }
}

/// Puts each item into the fullest bin in which it fits, in the order of `placement`.
fn best_fit(placement: Vec<usize>, lengths: &[usize], max_length: usize) -> Vec<Vec<usize>> {
    let mut bins: Vec<Vec<usize>> = Vec::new();
    // The free tokens and the index of each bin that is not full.
    let mut open: BTreeSet<(usize, usize)> = BTreeSet::new();
    for item in placement {
        let needed = lengths[item];
        let best = open.range((needed, 0)..).next().copied();
        let (free, bin) = best.unwrap_or((max_length, bins.len()));
        open.remove(&(free, bin));
        if bin == bins.len() {
            bins.push(Vec::new());
        }
        bins[bin].push(item);
        if free > needed {
            open.insert((free - needed, bin));
        }
    }
    bins.iter_mut().for_each(|bin| bin.sort_unstable());
    bins.sort_unstable_by_key(|bin| bin[0]);
    bins
}

/// Packs samples into rows of exactly `max_length` tokens and a shorter last row. Slices of `max_length` tokens get rows
/// of their own. Shorter slices fill rows one after another and are cut at the end of a row. Returns the slices and the
/// end of each row among them.
pub(crate) fn exact(samples: impl Iterator<Item = SampleSlice>, max_length: usize) -> (Vec<SampleSlice>, Vec<usize>) {
    let (mut slices, mut ends) = (Vec::new(), Vec::new());
    let mut rest: Vec<SampleSlice> = Vec::new();
    let mut free = max_length;
    for sample in samples {
        for slice in sample.chunks(max_length) {
            if slice.len as usize == max_length {
                slices.push(slice);
                ends.push(slices.len());
                continue;
            }
            let (head, tail) = split_at(slice, free);
            free -= head.len as usize;
            rest.push(head);
            if free == 0 {
                slices.append(&mut rest);
                ends.push(slices.len());
                rest.extend(Some(tail).filter(|tail| tail.len > 0));
                free = max_length - tail.len as usize;
            }
        }
    }
    if !rest.is_empty() {
        slices.append(&mut rest);
        ends.push(slices.len());
    }
    (slices, ends)
}

fn split_at(slice: SampleSlice, n_tokens: usize) -> (SampleSlice, SampleSlice) {
    let len = slice.len.min(n_tokens as u32);
    let tail = SampleSlice { start: slice.start + len, len: slice.len - len, ..slice };
    (SampleSlice { len, ..slice }, tail)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STRATEGIES: [PackingStrategy; 2] = [PackingStrategy::BestFit, PackingStrategy::Bfd];

    fn packed(strategy: PackingStrategy, lengths: &[usize], max_length: usize, window: usize) -> Vec<Vec<u32>> {
        let order: Vec<u32> = (0..lengths.len() as u32).collect();
        FitPacker { strategy, max_length, window }.pack(&order, |i| lengths[i as usize]).collect()
    }

    fn cut(lengths: &[u32], max_length: usize) -> (Vec<SampleSlice>, Vec<usize>) {
        let whole = |(i, &len): (usize, &u32)| SampleSlice { sample: i as u32, start: 0, len };
        exact(lengths.iter().enumerate().map(whole), max_length)
    }

    #[test]
    fn sequences_go_into_the_fullest_row_that_fits() {
        for strategy in STRATEGIES {
            assert_eq!(packed(strategy, &[6, 5, 5, 4], 10, 8), [vec![0, 3], vec![1, 2]]);
            assert_eq!(packed(strategy, &[3, 10, 7], 10, 8), [vec![0, 2], vec![1]]);
            assert_eq!(packed(strategy, &[], 10, 8), Vec::<Vec<u32>>::new());
        }
    }

    #[test]
    fn best_fit_does_not_put_sequences_of_equal_length_into_the_same_rows() {
        let lengths: Vec<usize> = (0..4000).map(|i| if i % 40 == 0 { 43 } else { 20 + i * 7919 % 13 }).collect();
        let most_longest = |strategy| {
            let rows = packed(strategy, &lengths, 512, WINDOW);
            rows.iter().map(|row| row.iter().filter(|&&i| lengths[i as usize] == 43).count()).max()
        };
        assert_eq!(STRATEGIES.map(most_longest), [Some(1), Some(11)]);
    }

    #[test]
    fn best_fit_places_sequences_longer_than_half_a_row_first() {
        // In the order of the data, 5 and 4 would share a row, and 6 would be alone.
        let rows = packed(PackingStrategy::BestFit, &[5, 4, 1, 6, 9], 10, 8);
        assert_eq!(rows, [vec![0], vec![1, 3], vec![2, 4]]);
    }

    #[test]
    fn windows_do_not_share_rows() {
        for strategy in STRATEGIES {
            assert_eq!(packed(strategy, &[1, 9, 1, 9], 10, 1), [[0], [1], [2], [3]]);
            assert_eq!(packed(strategy, &[1, 9, 1, 9], 10, 2), [[0, 1], [2, 3]]);
        }
    }

    #[test]
    fn long_samples_are_sliced_and_their_remainders_share_rows() {
        let (slices, ends) = cut(&[9, 2, 3], 4);
        let shown: Vec<_> = slices.iter().map(|p| (p.sample, p.start, p.len)).collect();
        // Rows: two slices of the first sample; its remainder, the second and the start of the third; the remainder.
        assert_eq!(shown, [(0, 0, 4), (0, 4, 4), (0, 8, 1), (1, 0, 2), (2, 0, 1), (2, 1, 2)]);
        assert_eq!(ends, [1, 2, 5, 6]);
    }

    #[test]
    fn a_window_of_short_samples_fills_its_rows() {
        let lengths: Vec<usize> = (0..WINDOW).map(|i| 20 + i * 7919 % 700).collect();
        for (strategy, want) in STRATEGIES.into_iter().zip([0.99, 0.995]) {
            let n_rows = packed(strategy, &lengths, 2048, WINDOW).len();
            let full = lengths.iter().sum::<usize>() as f64 / (n_rows * 2048) as f64;
            assert!(full > want, "{strategy:?}: {full}");
        }
    }

    proptest! {
        #[test]
        fn packing_keeps_every_sequence_once_within_max_length(
            lengths in prop::collection::vec(1..=32usize, 0..200), window in 1..64usize,
            strategy in prop::sample::select(&STRATEGIES[..]),
        ) {
            let rows = packed(strategy, &lengths, 32, window);
            for row in &rows {
                prop_assert!(!row.is_empty());
                prop_assert!(row.iter().map(|&i| lengths[i as usize]).sum::<usize>() <= 32);
            }
            let mut all = rows.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..lengths.len() as u32).collect::<Vec<_>>());
        }

        #[test]
        fn exact_packing_keeps_every_token_once_and_fills_every_row_but_the_last(
            lengths in prop::collection::vec(0..100u32, 0..60), max_length in 1..40usize,
        ) {
            let (slices, ends) = cut(&lengths, max_length);
            let mut start = 0;
            for (row, &end) in ends.iter().enumerate() {
                let n_tokens: u32 = slices[start..end].iter().map(|p| p.len).sum();
                prop_assert!(n_tokens as usize <= max_length);
                prop_assert!(row + 1 == ends.len() || n_tokens as usize == max_length);
                start = end;
            }
            prop_assert_eq!(start, slices.len());
            let mut tokens: Vec<(u32, u32)> = slices.iter()
                .flat_map(|p| (p.start..p.start + p.len).map(|t| (p.sample, t)))
                .collect();
            tokens.sort_unstable();
            let all = lengths.iter().enumerate().flat_map(|(i, &n)| (0..n).map(move |t| (i as u32, t)));
            prop_assert_eq!(tokens, all.collect::<Vec<_>>());
        }
    }
}
