//! Which rows of a buffer are taken: runs of rows, handed out and given back.

use std::collections::BTreeMap;

/// The taken runs of a buffer of so many rows.
#[derive(Clone, Debug)]
pub struct Regions {
    n_rows: usize,
    /// The length of each by its first row.
    taken: BTreeMap<usize, usize>,
}

impl Regions {
    /// All rows are free.
    pub fn new(n_rows: usize) -> Self {
        Self { n_rows, taken: BTreeMap::new() }
    }

    /// Takes the first free run of `len` rows, at least one, and returns its first row; `None` if there is no such run.
    pub fn take(&mut self, len: usize) -> Option<usize> {
        let mut start = 0;
        for (&first, &taken) in &self.taken {
            if first - start >= len {
                break;
            }
            start = first + taken;
        }
        if start + len > self.n_rows {
            return None;
        }
        self.taken.insert(start, len);
        Some(start)
    }

    /// Frees the run that begins at `start`.
    pub fn give_back(&mut self, start: usize) {
        self.taken.remove(&start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_gap_that_is_long_enough_is_taken() {
        let mut regions = Regions::new(10);
        assert_eq!([3, 2, 4, 1, 1].map(|len| regions.take(len)), [Some(0), Some(3), Some(5), Some(9), None]);
        regions.give_back(3);
        assert_eq!([3, 1, 1, 1].map(|len| regions.take(len)), [None, Some(3), Some(4), None]);
        regions.give_back(0);
        regions.give_back(3);
        assert_eq!(regions.take(4), Some(0));
    }
}
