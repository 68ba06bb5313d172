//! Rows of the KV cache pool: those of running sequences, and prefixes that are kept for later requests.

use std::collections::VecDeque;

use candlewick_model::LengthClass;
use candlewick_parallel::RowAllocator;

/// Allocator that keeps the rows of ended sequences until their space is needed.
pub(super) struct PrefixRows {
    allocator: RowAllocator,
    /// Kept sequences, the least recently used first.
    kept: VecDeque<CachedTokens>,
}

/// Key of cached prefixes: sequences with equal keys have equal keys and values for equal tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PrefixKey {
    /// Index of the model.
    pub(super) model: usize,
    pub(super) class: LengthClass,
}

/// Tokens whose keys and values are in the rows that begin at `start`.
struct CachedTokens {
    key: PrefixKey,
    start: usize,
    ids: Vec<u32>,
}

impl PrefixRows {
    /// Creates an allocator of `n_rows` free rows.
    pub(super) fn new(n_rows: usize) -> Self {
        Self { allocator: RowAllocator::new(n_rows), kept: VecDeque::new() }
    }

    /// Allocates rows and returns the first. Frees kept sequences if necessary. Returns `None` if running sequences
    /// leave too little space.
    pub(super) fn allocate(&mut self, len: usize) -> Option<usize> {
        loop {
            if let Some(start) = self.allocator.allocate(len) {
                return Some(start);
            }
            self.allocator.free(self.kept.pop_front()?.start);
        }
    }

    /// Extends the rows at `start` to `len` in place. Frees kept sequences that are in the way.
    pub(super) fn grow(&mut self, start: usize, len: usize) -> bool {
        while !self.allocator.grow(start, len) {
            let next = self.allocator.next_after(start);
            let Some(at) = self.kept.iter().position(|kept| Some(kept.start) == next) else { return false };
            let in_the_way = self.kept.remove(at).map(|kept| kept.start);
            in_the_way.into_iter().for_each(|start| self.allocator.free(start));
        }
        true
    }

    /// Keeps an ended sequence, of which `ids` are computed, instead of those that it continues.
    pub(super) fn keep(&mut self, key: PrefixKey, start: usize, ids: Vec<u32>) {
        self.kept.retain(|older| {
            let is_continued = older.key == key && ids.starts_with(&older.ids);
            if is_continued {
                self.allocator.free(older.start);
            }
            !is_continued
        });
        self.kept.push_back(CachedTokens { key, start, ids });
    }

    /// Frees the rows that were allocated at `start`.
    pub(super) fn free(&mut self, start: usize) {
        self.allocator.free(start);
    }

    /// Returns the kept sequence of this key with the longest common prefix with `ids`: its first row, and the prefix's length.
    pub(super) fn longest_prefix(&mut self, key: PrefixKey, ids: &[u32]) -> Option<(usize, usize)> {
        let of_key = (0..self.kept.len()).filter(|at| self.kept[*at].key == key);
        let (at, n) = of_key.map(|at| (at, n_common(&self.kept[at].ids, ids))).max_by_key(|(_, n)| *n)?;
        let used = self.kept.remove(at)?;
        let start = used.start;
        self.kept.push_back(used);
        Some((start, n))
    }
}

/// Returns the length of the common prefix.
pub(super) fn n_common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: PrefixKey = PrefixKey { model: 0, class: LengthClass::Short };
    const OTHER: PrefixKey = PrefixKey { model: 1, class: LengthClass::Short };
    const LONG: PrefixKey = PrefixKey { model: 0, class: LengthClass::Long };

    #[test]
    fn kept_prefixes_are_found_until_their_rows_are_needed() {
        let mut rows = PrefixRows::new(10);
        assert_eq!([rows.allocate(4), rows.allocate(4)], [Some(0), Some(4)]);
        assert_eq!(rows.longest_prefix(FIRST, &[1, 2]), None);
        rows.keep(FIRST, 0, vec![1, 2, 3]);
        rows.keep(FIRST, 4, vec![5, 6]);
        assert_eq!(rows.longest_prefix(FIRST, &[1, 2, 9]), Some((0, 2)));
        // The other sequence is now the least recently used.
        assert_eq!(rows.allocate(5), Some(4));
        assert_eq!(rows.longest_prefix(FIRST, &[5, 6]), Some((0, 0)));
        assert_eq!(rows.allocate(6), None);
    }

    #[test]
    fn prefixes_of_another_model_or_length_class_are_not_shared() {
        for other in [OTHER, LONG] {
            let mut rows = PrefixRows::new(8);
            assert_eq!([rows.allocate(4), rows.allocate(4)], [Some(0), Some(4)]);
            rows.keep(FIRST, 0, vec![1, 2]);
            assert_eq!(rows.longest_prefix(other, &[1, 2]), None);
            rows.keep(other, 4, vec![1, 2, 3]);
            assert_eq!(
                (rows.longest_prefix(FIRST, &[1, 2, 3]), rows.longest_prefix(other, &[1, 2, 3])),
                (Some((0, 2)), Some((4, 3)))
            );
        }
    }

    #[test]
    fn rows_grow_over_kept_sequences_only() {
        let mut rows = PrefixRows::new(12);
        assert_eq!([4, 4, 4].map(|len| rows.allocate(len)), [Some(0), Some(4), Some(8)]);
        rows.keep(FIRST, 4, vec![1]);
        assert!(!rows.grow(0, 9));
        assert!(rows.grow(0, 8));
        rows.keep(FIRST, 8, vec![2]);
        assert!(rows.grow(0, 12) && !rows.grow(0, 13));
    }

    #[test]
    fn a_continued_sequence_is_replaced() {
        let mut rows = PrefixRows::new(8);
        assert_eq!([rows.allocate(4), rows.allocate(4)], [Some(0), Some(4)]);
        rows.keep(FIRST, 0, vec![1, 2]);
        rows.keep(FIRST, 4, vec![1, 2, 3]);
        assert_eq!(rows.longest_prefix(FIRST, &[1, 2, 3]), Some((4, 3)));
        assert_eq!((rows.allocate(4), rows.longest_prefix(FIRST, &[1])), (Some(0), Some((4, 1))));
    }
}
