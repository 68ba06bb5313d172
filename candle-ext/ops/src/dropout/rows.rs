//! Position of a shard's rows and columns in the whole tensor.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, bail};

/// Row ranges of the whole tensor that a rank holds, in local order. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowRanges(Arc<[Range<usize>]>);

/// Shard of a tensor's columns, one of equal shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColumnShard {
    /// Index of the shard, from 0.
    pub index: usize,
    /// Number of shards.
    pub n_shards: usize,
}

/// Consecutive local elements, which form strided lines in the whole tensor.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct DropoutSpan {
    /// Local elements.
    pub(super) local: Range<usize>,
    /// Index of the first element in the whole tensor.
    pub(super) global_start: usize,
    /// Elements of one line: a row of the local shard, contiguous in the whole tensor too.
    pub(super) width: usize,
    /// Distance between the starts of two lines in the whole tensor, in elements.
    pub(super) stride: usize,
}

impl ColumnShard {
    /// All columns.
    pub const ALL: Self = Self { index: 0, n_shards: 1 };
}

impl DropoutSpan {
    /// Creates a span that is contiguous in the whole tensor.
    pub(super) fn flat(local: Range<usize>, global_start: usize) -> Self {
        let width = local.len();
        Self { local, global_start, width, stride: width }
    }

    /// Creates the span of local rows of `width` elements, the first of which is row `global_start` of the whole
    /// tensor.
    pub(super) fn of_rows(local: Range<usize>, global_start: usize, width: usize, columns: ColumnShard) -> Self {
        let stride = width * columns.n_shards;
        let (elements, global_start) =
            (local.start * width..local.end * width, global_start * stride + columns.index * width);
        match columns.n_shards {
            1 => Self::flat(elements, global_start),
            _ => Self { local: elements, global_start, width, stride },
        }
    }

    /// Returns the index of element i in the whole tensor, and the elements that remain in its line.
    pub(super) fn global_position(&self, i: usize) -> (usize, usize) {
        let (line, at) = (i / self.width, i % self.width);
        (self.global_start + line * self.stride + at, self.width - at)
    }
}

impl RowRanges {
    /// Selects these rows of a value per row.
    pub fn select<T: Copy>(&self, values: &[T]) -> Vec<T> {
        let of_range = |range: &Range<usize>| &values[range.start..range.end.min(values.len())];
        self.0.iter().flat_map(of_range).copied().collect()
    }

    /// Returns the positions of the first n rows in the whole tensor.
    pub fn positions(&self, n: usize) -> Result<Vec<usize>> {
        let runs = self.runs(n)?.into_iter();
        Ok(runs.flat_map(|(local, global_start)| global_start..global_start + local.len()).collect())
    }

    /// Returns the range of all rows.
    pub fn all() -> Self {
        Self(std::iter::once(0..usize::MAX).collect())
    }

    /// Creates row ranges from a list, in local order.
    pub fn new(ranges: Vec<Range<usize>>) -> Self {
        Self(ranges.into())
    }

    /// Returns the ranges.
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.0
    }

    /// Returns the ranges without the first n rows.
    pub fn skip(&self, n: usize) -> Self {
        let mut skipped = n;
        let rest = self.0.iter().filter_map(|range| {
            let start = range.start + skipped.min(range.len());
            skipped -= start - range.start;
            (start < range.end).then_some(start..range.end)
        });
        Self(rest.collect())
    }

    /// Returns the local and global start of each run within the first n rows.
    pub(super) fn runs(&self, n: usize) -> Result<Vec<(Range<usize>, usize)>> {
        let (mut runs, mut local) = (Vec::new(), 0);
        for range in self.0.iter() {
            let len = range.len().min(n - local);
            if len > 0 {
                runs.push((local..local + len, range.start));
            }
            local += len;
        }
        if local < n {
            bail!("dropout: {n} rows, but the row ranges cover {local}")
        }
        Ok(runs)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
#[allow(clippy::single_range_in_vec_init, reason = "a list of one range is meant")]
mod tests {
    use super::*;

    #[test]
    fn the_remaining_ranges_begin_after_the_consumed_rows() {
        let rows = RowRanges::new(vec![3..5, 9..9, 10..14]);
        let after = |n: usize| rows.skip(n).ranges().to_vec();
        assert_eq!(after(0), [3..5, 10..14]);
        assert_eq!(after(1), [4..5, 10..14]);
        assert_eq!(after(2), [10..14]);
        assert_eq!(after(5), [13..14]);
        assert!(after(6).is_empty() && after(7).is_empty());
        assert_eq!(RowRanges::all().skip(7).ranges(), [7..usize::MAX]);
    }

    #[test]
    fn an_element_of_a_part_has_a_place_in_the_whole() {
        let run = DropoutSpan::of_rows(2..4, 7, 3, ColumnShard { index: 1, n_shards: 4 });
        assert_eq!(run, DropoutSpan { local: 6..12, global_start: 7 * 12 + 3, width: 3, stride: 12 });
        assert_eq!([0, 2, 3, 5].map(|i| run.global_position(i)), [(87, 3), (89, 1), (99, 3), (101, 1)]);
        assert_eq!(DropoutSpan::of_rows(2..4, 7, 3, ColumnShard::ALL), DropoutSpan::flat(6..12, 21));
    }

    #[test]
    fn row_ranges_cover_the_available_rows_or_are_refused() {
        let rows = RowRanges::new(vec![3..5, 10..14]);
        assert_eq!(rows.runs(4).unwrap(), [(0..2, 3), (2..4, 10)]);
        assert_eq!(rows.runs(1).unwrap(), [(0..1, 3)]);
        assert_eq!(RowRanges::all().runs(9).unwrap(), [(0..9, 0)]);
        assert!(rows.runs(7).unwrap_err().to_string().starts_with("dropout: 7 rows, but the row ranges cover 6"));
    }
}
