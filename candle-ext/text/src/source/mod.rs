//! Data set rows by index, from JSON, JSON Lines, Parquet, CSV and text files.
//!
//! A [`RowSource`] returns a row as a JSON object, and the row's file and line. [`crate::format`] interprets the
//! columns; [`crate::hub`] downloads the files.

mod bus_error;
mod combined;
mod csv_file;
mod dataset_card;
mod decompress;
mod error;
mod file_format;
mod json_file;
mod json_lines;
mod local;
mod mapped_file;
mod null_fields;
mod parquet_file;
mod parquet_values;
mod positioned_file;
mod row_group_cache;
mod source_files;
mod spec;
mod splits;
mod strict_json;
mod task_file;
mod text_file;

pub use bus_error::report_shortened_files;
pub use combined::{ConcatSource, SliceSource};
pub use dataset_card::DatasetCard;
pub use error::SourceError;
pub use file_format::{FileFormat, ReadOptions, data_files};
pub use local::{FileSelector, LocalRequest, open_files, open_local};
pub use null_fields::{NullFieldRemoval, WithoutNullFields};
pub use source_files::{SourceFiles, named};
pub use spec::{DatasetSpec, RangeBound, RowRange, SplitSlice};
pub use splits::{SplitQuery, SplitSelection, select_split_files};
pub use strict_json::parse_value;
pub use task_file::{TaskFileNames, UnnamedFiles, name_words};
pub use text_file::SampleBy;

pub(crate) use combined::SourceWithFiles;
pub(crate) use local::{join, near_sibling, slice};
pub(crate) use splits::patterns_of;

/// One row: a JSON object from column names to values, in the file's order.
pub type Row = serde_json::Map<String, serde_json::Value>;

/// Rows with random access, from any thread.
pub trait RowSource: Send + Sync {
    /// Returns the number of rows.
    fn len(&self) -> usize;

    /// Reads row `row_idx`, which must be less than [`RowSource::len`].
    fn row(&self, row_idx: usize) -> Result<Row, SourceError>;

    /// Returns the location of row `row_idx` for messages, such as `train.jsonl:17`.
    fn locate(&self, row_idx: usize) -> String;

    /// Returns the files of the rows, as far as they are known.
    fn files(&self) -> SourceFiles {
        SourceFiles::default()
    }

    /// Returns true if the file format of row `row_idx` adds null fields to structs.
    fn adds_null_fields(&self, _row_idx: usize) -> bool {
        false
    }

    /// Returns the location of the first row read from which null fields were removed.
    fn first_row_with_removed_nulls(&self) -> Option<String> {
        None
    }

    /// Returns true if there are no rows.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
