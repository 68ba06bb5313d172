//! Parquet files, read with the record API. Nested lists and structs become JSON lists and objects.
//!
//! Parquet is decoded one row group at a time. Decoded groups are cached as compact JSON (see `row_group_cache`), so
//! reading in order decodes each group once.

use std::path::{Path, PathBuf};

use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};

use super::mapped_file::open_regular;
use super::parquet_values::{object, unreadable};
use super::positioned_file::PositionedFile;
use super::row_group_cache::{CachedRowGroups, RowGroup};
use super::strict_json::parse_row;
use super::{Row, RowSource, SourceError};
use crate::catch_panic::catch_panic;

pub(crate) struct ParquetFile {
    path: PathBuf,
    reader: SerializedFileReader<PositionedFile>,
    /// Index of the first row after each row group.
    ends: Vec<usize>,
    groups: CachedRowGroups,
}

/// Problem of a Parquet file or row, and its remedy.
struct ParquetProblem {
    problem: String,
    fix: &'static str,
}

const DAMAGED: &str = "the file is damaged or of an unread type: write it again";

impl ParquetFile {
    pub(crate) fn open(path: &Path) -> Result<Self, SourceError> {
        let file = PositionedFile::new(open_regular(path)?).map_err(|error| SourceError::io(path, error))?;
        let reader = guarded(|| Ok(SerializedFileReader::new(file)?)).map_err(|fault| {
            let fix = "it may be cut short or not be Parquet at all: fetch or write it again";
            SourceError::invalid_data(path.display(), fault.problem, fix)
        })?;
        if let Some((column, name)) = unreadable(reader.metadata().file_metadata().schema()) {
            let problem = format!("column `{column}` is of the type {name}, which is not read");
            return Err(SourceError::invalid_data(
                path.display(),
                problem,
                "write the file without it, or with text in it",
            ));
        }
        let mut ends = Vec::new();
        let mut end = 0_usize;
        for group in reader.metadata().row_groups() {
            let n_rows = usize::try_from(group.num_rows()).ok();
            end = n_rows.and_then(|n_rows| end.checked_add(n_rows)).ok_or_else(|| {
                let problem = format!("a row group claims {} rows", group.num_rows());
                SourceError::invalid_data(path.display(), problem, "the file is damaged: write it again")
            })?;
            ends.push(end);
        }
        let n_announced = reader.metadata().file_metadata().num_rows();
        if usize::try_from(n_announced) != Ok(end) {
            let problem = format!("its row groups hold {end} rows, but its footer announces {n_announced}");
            return Err(SourceError::invalid_data(path.display(), problem, DAMAGED));
        }
        Ok(Self { path: path.to_owned(), reader, ends, groups: CachedRowGroups::new() })
    }

    fn decode(&self, group_idx: usize) -> Result<RowGroup, SourceError> {
        let first = self.first_row(group_idx);
        let n_rows = self.ends[group_idx] - first;
        let mut group = RowGroup::default();
        let read = guarded(|| self.read_into(&mut group, group_idx));
        let fault = match read {
            Err(fault) => fault,
            Ok(()) if group.ends.len() == n_rows => return Ok(group),
            Ok(()) => {
                let problem = format!("{} rows where the file promises {n_rows}", group.ends.len());
                ParquetProblem { problem, fix: DAMAGED }
            }
        };
        Err(SourceError::invalid_data(place(&self.path, first + group.ends.len()), fault.problem, fault.fix))
    }

    fn read_into(&self, group: &mut RowGroup, group_idx: usize) -> Result<(), ParquetProblem> {
        let reader = self.reader.get_row_group(group_idx)?;
        for record in reader.get_row_iter(None)? {
            let row = object(&record?).map_err(|bytes| ParquetProblem {
                problem: format!("column `{}` holds bytes that are not UTF-8 text", bytes.column),
                fix: "write the column as text, or the file without it",
            })?;
            serde_json::to_writer(&mut group.text, &row).expect("JSON is written into memory");
            group.ends.push(group.text.len());
        }
        Ok(())
    }

    fn first_row(&self, group_idx: usize) -> usize {
        if group_idx == 0 { 0 } else { self.ends[group_idx - 1] }
    }
}

impl RowSource for ParquetFile {
    fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    fn row(&self, row_idx: usize) -> Result<Row, SourceError> {
        let group_idx = self.ends.partition_point(|&end| end <= row_idx);
        let group = self.groups.get(group_idx, || self.decode(group_idx))?;
        let at = row_idx - self.first_row(group_idx);
        let start = if at == 0 { 0 } else { group.ends[at - 1] };
        parse_row(&group.text[start..group.ends[at]])
            .map_err(|fault| SourceError::invalid_data(self.locate(row_idx), fault.problem, fault.fix))
    }

    fn locate(&self, row_idx: usize) -> String {
        place(&self.path, row_idx)
    }

    fn adds_null_fields(&self, _row_idx: usize) -> bool {
        true
    }
}

fn place(path: &Path, row_idx: usize) -> String {
    format!("{} row {row_idx}", path.display())
}

impl From<ParquetError> for ParquetProblem {
    fn from(error: ParquetError) -> Self {
        Self { problem: error.to_string(), fix: DAMAGED }
    }
}

/// Converts panics of the record API to errors. Invalid schemas and pages cause them.
fn guarded<T>(read: impl FnOnce() -> Result<T, ParquetProblem>) -> Result<T, ParquetProblem> {
    let panicked = |_| Err(ParquetProblem { problem: "its schema or its pages are invalid".into(), fix: DAMAGED });
    catch_panic(read).unwrap_or_else(panicked)
}
