//! Parquet through the record API: nested lists and structs come out as JSON lists and objects.
//!
//! Parquet can only be read a row group at a time, so decoded groups are kept, as compact JSON,
//! up to a fixed number of bytes a file; reading in order decodes each group once.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use parquet::file::reader::{FileReader, SerializedFileReader};

use super::strict::parse_row;
use super::{Row, Source, SourceError};

/// Decoded rows kept in memory for one file.
const MAX_KEPT_BYTES: usize = 1 << 30;

pub(crate) struct ParquetFile {
    path: PathBuf,
    reader: SerializedFileReader<File>,
    /// The row after the last of each group.
    ends: Vec<usize>,
    /// The most recently used group stands last.
    kept: Mutex<Vec<(usize, Arc<Group>)>>,
}

/// Rows as JSON text, one after another.
struct Group {
    text: Vec<u8>,
    ends: Vec<usize>,
}

impl ParquetFile {
    pub(crate) fn open(path: &Path) -> Result<Self, SourceError> {
        let file = File::open(path).map_err(|e| SourceError::io(path, e))?;
        let reader = guarded(|| SerializedFileReader::new(file)).map_err(|problem| {
            let fix = "it may be cut short or not be Parquet at all: fetch or write it again";
            SourceError::bad(path.display(), problem, fix)
        })?;
        let mut ends = Vec::new();
        let mut end = 0_usize;
        for group in reader.metadata().row_groups() {
            let n_rows = usize::try_from(group.num_rows()).ok();
            end = n_rows.and_then(|n_rows| end.checked_add(n_rows)).ok_or_else(|| {
                let problem = format!("a row group claims {} rows", group.num_rows());
                SourceError::bad(path.display(), problem, "the file is damaged: write it again")
            })?;
            ends.push(end);
        }
        Ok(Self { path: path.to_owned(), reader, ends, kept: Mutex::new(Vec::new()) })
    }

    fn group(&self, group_idx: usize) -> Result<Arc<Group>, SourceError> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = kept.iter().position(|(idx, _)| *idx == group_idx) {
            let entry = kept.remove(at);
            let group = entry.1.clone();
            kept.push(entry);
            return Ok(group);
        }
        let group = Arc::new(self.decode(group_idx)?);
        kept.push((group_idx, group.clone()));
        let mut n_bytes: usize = kept.iter().map(|(_, group)| group.text.len()).sum();
        while n_bytes > MAX_KEPT_BYTES && kept.len() > 1 {
            n_bytes -= kept.remove(0).1.text.len();
        }
        Ok(group)
    }

    fn decode(&self, group_idx: usize) -> Result<Group, SourceError> {
        let first = self.first_row(group_idx);
        let mut group = Group { text: Vec::new(), ends: Vec::new() };
        let read = guarded(|| -> Result<(), parquet::errors::ParquetError> {
            let reader = self.reader.get_row_group(group_idx)?;
            for row in reader.get_row_iter(None)? {
                let json = row?.to_json_value();
                serde_json::to_writer(&mut group.text, &json)
                    .map_err(|e| parquet::errors::ParquetError::External(Box::new(e)))?;
                group.ends.push(group.text.len());
            }
            Ok(())
        });
        let n_rows = self.ends[group_idx] - first;
        let problem = match read {
            Err(problem) => problem,
            Ok(()) if group.ends.len() == n_rows => return Ok(group),
            Ok(()) => format!("{} rows where the file promises {n_rows}", group.ends.len()),
        };
        let place = place(&self.path, first + group.ends.len());
        Err(SourceError::bad(place, problem, "the file is damaged or of an unread type: write it again"))
    }

    fn first_row(&self, group_idx: usize) -> usize {
        if group_idx == 0 { 0 } else { self.ends[group_idx - 1] }
    }
}

impl Source for ParquetFile {
    fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    fn row(&self, row_idx: usize) -> Result<Row, SourceError> {
        let group_idx = self.ends.partition_point(|&end| end <= row_idx);
        let group = self.group(group_idx)?;
        let at = row_idx - self.first_row(group_idx);
        let start = if at == 0 { 0 } else { group.ends[at - 1] };
        parse_row(&group.text[start..group.ends[at]])
            .map_err(|fault| SourceError::bad(self.locate(row_idx), fault.problem, fault.fix))
    }

    fn locate(&self, row_idx: usize) -> String {
        place(&self.path, row_idx)
    }
}

fn place(path: &Path, row_idx: usize) -> String {
    format!("{} row {row_idx}", path.display())
}

/// The record API panics on column types it has no rule for; that is an error like any other.
fn guarded<T>(read: impl FnOnce() -> Result<T, parquet::errors::ParquetError>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(read)) {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(_) => Err("a column has a type that cannot be read".into()),
    }
}
