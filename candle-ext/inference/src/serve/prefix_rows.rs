//! Rows of the KV cache pool: those of running sequences, and prefixes that are kept for later requests.

use std::collections::VecDeque;

use candlewick_parallel::RowAllocator;

/// Allocator that keeps the rows of ended sequences until their space is needed.
pub(super) struct PrefixRows {
    allocator: RowAllocator,
    /// Kept sequences, the least recently used first.
    kept: VecDeque<CachedTokens>,
}

/// Tokens whose keys and values are in the rows that begin at `start`.
struct CachedTokens {
    /// Index of the model that has computed them.
    model: usize,
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

    /// Keeps an ended sequence, of which `ids` are computed by a model, instead of those that it continues.
    pub(super) fn keep(&mut self, model: usize, start: usize, ids: Vec<u32>) {
        self.kept.retain(|older| {
            let is_continued = older.model == model && ids.starts_with(&older.ids);
            if is_continued {
                self.allocator.free(older.start);
            }
            !is_continued
        });
        self.kept.push_back(CachedTokens { model, start, ids });
    }

    /// Frees the rows that were allocated at `start`.
    pub(super) fn free(&mut self, start: usize) {
        self.allocator.free(start);
    }

    /// Returns the model's kept sequence with the longest common prefix with `ids`: its first row, and the prefix's length.
    pub(super) fn longest_prefix(&mut self, model: usize, ids: &[u32]) -> Option<(usize, usize)> {
        let of_model = (0..self.kept.len()).filter(|at| self.kept[*at].model == model);
        let (at, n) = of_model.map(|at| (at, n_common(&self.kept[at].ids, ids))).max_by_key(|(_, n)| *n)?;
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

    #[test]
    fn kept_prefixes_are_found_until_their_rows_are_needed() {
        let mut rows = PrefixRows::new(10);
        assert_eq!([rows.allocate(4), rows.allocate(4)], [Some(0), Some(4)]);
        assert_eq!(rows.longest_prefix(0, &[1, 2]), None);
        rows.keep(0, 0, vec![1, 2, 3]);
        rows.keep(0, 4, vec![5, 6]);
        assert_eq!(rows.longest_prefix(0, &[1, 2, 9]), Some((0, 2)));
        // The other sequence is now the least recently used.
        assert_eq!(rows.allocate(5), Some(4));
        assert_eq!(rows.longest_prefix(0, &[5, 6]), Some((0, 0)));
        assert_eq!(rows.allocate(6), None);
    }

    #[test]
    fn prefixes_of_another_model_are_not_shared() {
        let mut rows = PrefixRows::new(8);
        assert_eq!([rows.allocate(4), rows.allocate(4)], [Some(0), Some(4)]);
        rows.keep(0, 0, vec![1, 2]);
        assert_eq!(rows.longest_prefix(1, &[1, 2]), None);
        rows.keep(1, 4, vec![1, 2, 3]);
        assert_eq!(
            (rows.longest_prefix(0, &[1, 2, 3]), rows.longest_prefix(1, &[1, 2, 3])),
            (Some((0, 2)), Some((4, 3)))
        );
    }

    #[test]
    fn rows_grow_over_kept_sequences_only() {
        let mut rows = PrefixRows::new(12);
        assert_eq!([4, 4, 4].map(|len| rows.allocate(len)), [Some(0), Some(4), Some(8)]);
        rows.keep(0, 4, vec![1]);
        assert!(!rows.grow(0, 9));
        assert!(rows.grow(0, 8));
        rows.keep(0, 8, vec![2]);
        assert!(rows.grow(0, 12) && !rows.grow(0, 13));
    }

    #[test]
    fn a_continued_sequence_is_replaced() {
        let mut rows = PrefixRows::new(8);
        assert_eq!([rows.allocate(4), rows.allocate(4)], [Some(0), Some(4)]);
        rows.keep(0, 0, vec![1, 2]);
        rows.keep(0, 4, vec![1, 2, 3]);
        assert_eq!(rows.longest_prefix(0, &[1, 2, 3]), Some((4, 3)));
        assert_eq!((rows.allocate(4), rows.longest_prefix(0, &[1])), (Some(0), Some((4, 1))));
    }
}
