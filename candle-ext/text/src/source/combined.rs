//! Row sources built from other sources: concatenation, slice, and a source with its file names.

use std::ops::Range;

use super::{Row, RowSource, SourceError, SourceFiles};

/// Concatenation of several row sources.
pub struct ConcatSource {
    parts: Vec<Box<dyn RowSource>>,
    ends: Vec<usize>,
}

impl ConcatSource {
    /// Concatenates `parts`.
    pub fn new(parts: Vec<Box<dyn RowSource>>) -> Self {
        let ends = parts
            .iter()
            .scan(0, |end, part| {
                *end += part.len();
                Some(*end)
            })
            .collect();
        Self { parts, ends }
    }

    fn find(&self, row_idx: usize) -> (&dyn RowSource, usize) {
        let part_idx = self.ends.partition_point(|&end| end <= row_idx);
        let start = if part_idx == 0 { 0 } else { self.ends[part_idx - 1] };
        (self.parts[part_idx].as_ref(), row_idx - start)
    }
}

impl RowSource for ConcatSource {
    fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }
    fn row(&self, row_idx: usize) -> Result<Row, SourceError> {
        let (part, row_idx) = self.find(row_idx);
        part.row(row_idx)
    }
    fn locate(&self, row_idx: usize) -> String {
        let (part, row_idx) = self.find(row_idx);
        part.locate(row_idx)
    }
    fn adds_null_fields(&self, row_idx: usize) -> bool {
        let (part, row_idx) = self.find(row_idx);
        part.adds_null_fields(row_idx)
    }
    fn files(&self) -> SourceFiles {
        self.parts.iter().map(|part| part.files()).reduce(SourceFiles::join).unwrap_or_default()
    }
}

/// Range of rows of another source.
pub struct SliceSource {
    inner: Box<dyn RowSource>,
    range: Range<usize>,
}

impl SliceSource {
    /// Restricts `inner` to `range`, which must be within it.
    pub fn new(inner: Box<dyn RowSource>, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= inner.len(), "the slice was resolved");
        Self { inner, range }
    }
}

impl RowSource for SliceSource {
    fn len(&self) -> usize {
        self.range.len()
    }
    fn row(&self, row_idx: usize) -> Result<Row, SourceError> {
        self.inner.row(self.range.start + row_idx)
    }
    fn locate(&self, row_idx: usize) -> String {
        self.inner.locate(self.range.start + row_idx)
    }
    fn adds_null_fields(&self, row_idx: usize) -> bool {
        self.inner.adds_null_fields(self.range.start + row_idx)
    }
    fn files(&self) -> SourceFiles {
        self.inner.files()
    }
}

/// Row source together with the names of its files.
pub(crate) struct SourceWithFiles {
    pub(crate) inner: Box<dyn RowSource>,
    pub(crate) files: SourceFiles,
}

impl RowSource for SourceWithFiles {
    fn len(&self) -> usize {
        self.inner.len()
    }
    fn row(&self, row_idx: usize) -> Result<Row, SourceError> {
        self.inner.row(row_idx)
    }
    fn locate(&self, row_idx: usize) -> String {
        self.inner.locate(row_idx)
    }
    fn adds_null_fields(&self, row_idx: usize) -> bool {
        self.inner.adds_null_fields(row_idx)
    }
    fn files(&self) -> SourceFiles {
        self.files.clone()
    }
}
