//! Which rows of a buffer are allocated: runs of rows, handed out and given back.

use std::collections::BTreeMap;

/// The allocated runs of a buffer of so many rows.
#[derive(Clone, Debug)]
pub struct RowAllocator {
    n_rows: usize,
    /// The length of each by its first row.
    allocated: BTreeMap<usize, usize>,
}

impl RowAllocator {
    /// All rows are free.
    pub fn new(n_rows: usize) -> Self {
        Self { n_rows, allocated: BTreeMap::new() }
    }

    /// Takes the first free run of `len` rows, at least one, and returns its first row; `None` if there is no such run.
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

    /// Frees the run that begins at `start`.
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
