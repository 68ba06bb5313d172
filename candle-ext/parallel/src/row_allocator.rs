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

    /// Extends the allocation at `start` to `len` rows. Returns false if other rows are in the way.
    pub fn grow(&mut self, start: usize, len: usize) -> bool {
        let end = self.next_after(start).unwrap_or(self.n_rows);
        let fits = start + len <= end;
        if fits {
            self.allocated.insert(start, len);
        }
        fits
    }

    /// Returns the first row of the next allocation.
    pub fn next_after(&self, start: usize) -> Option<usize> {
        self.allocated.range(start + 1..).next().map(|(first, _)| *first)
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

    #[test]
    fn an_allocation_grows_up_to_the_next_one() {
        let mut allocator = RowAllocator::new(10);
        assert_eq!([2, 3, 2].map(|len| allocator.allocate(len)), [Some(0), Some(2), Some(5)]);
        assert_eq!((allocator.grow(0, 3), allocator.next_after(0)), (false, Some(2)));
        allocator.free(2);
        assert_eq!((allocator.grow(0, 5), allocator.grow(0, 6), allocator.allocate(2)), (true, false, Some(7)));
        assert_eq!((allocator.grow(7, 3), allocator.grow(7, 4), allocator.next_after(7)), (true, false, None));
    }
}
