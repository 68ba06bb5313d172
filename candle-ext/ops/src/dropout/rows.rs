//! Which part of a whole is at hand.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, bail};

/// Ranges of rows of a whole, in the order in which they lie here. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowRanges(Arc<[Range<usize>]>);

/// Elements of each row of a whole: one of equal parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColumnShard {
    /// Which part.
    pub index: usize,
    /// Of how many.
    pub n_shards: usize,
}

/// Elements that lie in a row here, and in lines in the whole.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct DropoutSpan {
    /// Which elements.
    pub(super) local: Range<usize>,
    /// Where the first one is in the whole.
    pub(super) global_start: usize,
    /// The elements of a line.
    pub(super) width: usize,
    /// From the beginning of a line to that of the next, in the whole.
    pub(super) stride: usize,
}

impl ColumnShard {
    /// All elements of each row.
    pub const ALL: Self = Self { index: 0, n_shards: 1 };
}

impl DropoutSpan {
    /// Elements without a gap in the whole.
    pub(super) fn flat(local: Range<usize>, global_start: usize) -> Self {
        let width = local.len();
        Self { local, global_start, width, stride: width }
    }

    /// Rows of `width` elements here, of which the first is row `place` of the whole.
    pub(super) fn of_rows(local: Range<usize>, global_start: usize, width: usize, columns: ColumnShard) -> Self {
        let stride = width * columns.n_shards;
        let (elements, global_start) =
            (local.start * width..local.end * width, global_start * stride + columns.index * width);
        match columns.n_shards {
            1 => Self::flat(elements, global_start),
            _ => Self { local: elements, global_start, width, stride },
        }
    }

    /// Where the run's i-th element is in the whole, and how many of its line lie from there on.
    pub(super) fn global_position(&self, i: usize) -> (usize, usize) {
        let (line, at) = (i / self.width, i % self.width);
        (self.global_start + line * self.stride + at, self.width - at)
    }
}

impl RowRanges {
    /// The rows of a whole that is here, however many they are.
    pub fn all() -> Self {
        Self(std::iter::once(0..usize::MAX).collect())
    }

    /// These rows, range after range.
    pub fn new(ranges: Vec<Range<usize>>) -> Self {
        Self(ranges.into())
    }

    /// The ranges.
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.0
    }

    /// The same rows without the first n.
    pub fn skip(&self, n: usize) -> Self {
        let mut skipped = n;
        let rest = self.0.iter().filter_map(|range| {
            let start = range.start + skipped.min(range.len());
            skipped -= start - range.start;
            (start < range.end).then_some(start..range.end)
        });
        Self(rest.collect())
    }

    /// Where the first n rows lie here and in the whole.
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
            bail!("dropout: {n} rows, of which {local} have a place")
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
    fn what_is_left_after_some_rows_begins_where_they_end() {
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
    fn runs_cover_the_rows_at_hand_or_are_refused() {
        let rows = RowRanges::new(vec![3..5, 10..14]);
        assert_eq!(rows.runs(4).unwrap(), [(0..2, 3), (2..4, 10)]);
        assert_eq!(rows.runs(1).unwrap(), [(0..1, 3)]);
        assert_eq!(RowRanges::all().runs(9).unwrap(), [(0..9, 0)]);
        assert!(rows.runs(7).unwrap_err().to_string().starts_with("dropout: 7 rows, of which 6 have a place"));
    }
}
