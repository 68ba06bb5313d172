//! JSON Lines files, memory-mapped. The offset of each line is indexed; a row is parsed on access.

use super::mapped_file::{MappedFile, find_newline, is_blank};
use super::strict_json::{MAX_ROW_BYTES, parse_row, too_long};
use super::{Row, RowSource, SourceError};

#[derive(Debug)]
pub(crate) struct JsonLines {
    file: MappedFile,
    starts: Vec<u64>,
}

impl JsonLines {
    pub(crate) fn index(file: MappedFile) -> Result<Self, SourceError> {
        let mut starts = Vec::new();
        let mut start = 0;
        while start < file.bytes().len() {
            let rest = &file.bytes()[start..];
            let n_bytes = find_newline(rest).unwrap_or(rest.len());
            if n_bytes > MAX_ROW_BYTES {
                let fault = too_long(n_bytes);
                return Err(SourceError::invalid_data(file.place(start), fault.problem, fault.fix));
            }
            if !is_blank(&rest[..n_bytes]) {
                starts.push(start as u64);
            }
            start += n_bytes + 1;
        }
        Ok(Self { file, starts })
    }
}

impl RowSource for JsonLines {
    fn len(&self) -> usize {
        self.starts.len()
    }

    fn row(&self, row_idx: usize) -> Result<Row, SourceError> {
        let line = self.file.line_at(self.starts[row_idx] as usize);
        parse_row(line).map_err(|fault| SourceError::invalid_data(self.locate(row_idx), fault.problem, fault.fix))
    }

    fn locate(&self, row_idx: usize) -> String {
        self.file.place(self.starts[row_idx] as usize)
    }
}
