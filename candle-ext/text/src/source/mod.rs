//! Rows by index: local files of JSON, JSON lines, Parquet, CSV and plain text behind one trait.
//!
//! A [`RowSource`] hands out a row as a JSON object and says where it came from. It knows nothing of
//! chat formats (see [`crate::format`]) or of the Hub (see [`crate::hub`]).

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
mod parquet_file;
mod parquet_values;
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
pub use source_files::{SourceFiles, named};
pub use spec::{DatasetSpec, RangeBound, RowRange, SplitSlice};
pub use splits::{SplitQuery, SplitSelection, select_split_files};
pub use strict_json::parse_value;
pub use task_file::{TaskFileNames, UnnamedFiles, name_words};
pub use text_file::SampleBy;

pub(crate) use combined::SourceWithFiles;
pub(crate) use local::{join, near_sibling, slice};
pub(crate) use splits::patterns_of;

/// One row: column names to values, in the file's order.
pub type Row = serde_json::Map<String, serde_json::Value>;

/// Rows that can be read in any order, from any thread.
pub trait RowSource: Send + Sync {
    /// Counts the rows.
    fn len(&self) -> usize;

    /// Reads row `row_idx`, which must be below [`RowSource::len`].
    fn row(&self, row_idx: usize) -> Result<Row, SourceError>;

    /// Says where row `row_idx` stands, for messages: `train.jsonl:17`.
    fn locate(&self, row_idx: usize) -> String;

    /// Returns the files that the rows are in, as far as they are known.
    fn files(&self) -> SourceFiles {
        SourceFiles::default()
    }

    /// Says whether there are no rows at all.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
