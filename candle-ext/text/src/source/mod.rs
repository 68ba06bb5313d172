//! Rows by index: local files of JSON, JSON lines, Parquet, CSV and plain text behind one trait.
//!
//! A [`Source`] hands out a row as a JSON object and says where it came from. It knows nothing of
//! chat formats (see [`crate::format`]) or of the Hub (see [`crate::hub`]).

mod bus_error;
mod cards;
mod compressed;
mod csv_file;
mod error;
mod files;
mod joined;
mod json_file;
mod json_lines;
mod kind;
mod local;
mod mapped;
mod one_file;
mod parquet_file;
mod parquet_groups;
mod parquet_values;
mod spec;
mod splits;
mod strict;
mod text_file;

pub use bus_error::report_shortened_files;
pub use cards::Card;
pub use error::SourceError;
pub use files::{SourceFiles, named};
pub use joined::{Joined, Sliced};
pub use kind::{Kind, ReadOptions, data_files};
pub use local::{FileSelector, LocalRequest, open_files, open_local};
pub use one_file::{FileNames, Unnamed, name_words};
pub use spec::{Bound, Slice, Spec, SplitPart};
pub use splits::{Selection, SplitQuery, choose};
pub use strict::parse_value;
pub use text_file::SampleBy;

pub(crate) use joined::WithFiles;
pub(crate) use local::{join, near_sibling, slice};
pub(crate) use splits::patterns_of;

/// One row: column names to values, in the file's order.
pub type Row = serde_json::Map<String, serde_json::Value>;

/// Rows that can be read in any order, from any thread.
pub trait Source: Send + Sync {
    /// Counts the rows.
    fn len(&self) -> usize;

    /// Reads row `row_idx`, which must be below [`Source::len`].
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
