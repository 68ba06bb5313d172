//! Allocation of contiguous rows of a buffer.

use std::collections::BTreeMap;

/// A first-fit allocator of contiguous rows.
#[derive(Clone, Debug)]
pub struct RowAllocator {
    n_rows: usize,
    /// Length of each allocation by its first row.
    allocated: BTreeMap<usize, usize>,
}

impl RowAllocator {
    /// Creates an allocator of `n_rows` free rows.
    pub fn new(n_rows: usize) -> Self {
        Self { n_rows, allocated: BTreeMap::new() }
    }

    /// Allocates `len` contiguous rows (at least one) and returns the first; `None` if they do not fit.
    pub fn allocate(&mut self, len: usize) -> Option<usize> {
        let mut start = 0;
        for (&first, &allocated) in &self.allocated {
            if first - start >= len {
                break;
            }
            start = first + allocated;
        }
        if start + len > self.n_rows {
            return None;
        }
        self.allocated.insert(start, len);
        Some(start)
    }

    /// Frees the rows that were allocated at `start`.
    pub fn free(&mut self, start: usize) {
        self.allocated.remove(&start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_gap_that_is_long_enough_is_taken() {
        let mut allocator = RowAllocator::new(10);
        assert_eq!([3, 2, 4, 1, 1].map(|len| allocator.allocate(len)), [Some(0), Some(3), Some(5), Some(9), None]);
        allocator.free(3);
        assert_eq!([3, 1, 1, 1].map(|len| allocator.allocate(len)), [None, Some(3), Some(4), None]);
        allocator.free(0);
        allocator.free(3);
        assert_eq!(allocator.allocate(4), Some(0));
    }
}
