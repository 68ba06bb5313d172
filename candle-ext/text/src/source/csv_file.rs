//! CSV and TSV files with a header. The offset of each record is indexed; every value is a string.

use std::collections::HashSet;
use std::path::Path;

use csv::{ByteRecord, ReaderBuilder, StringRecord};
use serde_json::Value;

use super::mapped_file::MappedFile;
use super::{Row, RowSource, SourceError};

#[derive(Debug)]
pub(crate) struct CsvFile {
    file: MappedFile,
    delimiter: u8,
    header: Vec<String>,
    starts: Vec<u64>,
}

impl CsvFile {
    pub(crate) fn index(file: MappedFile, delimiter: u8) -> Result<Self, SourceError> {
        let mut reader =
            ReaderBuilder::new().delimiter(delimiter).has_headers(false).flexible(true).from_reader(file.bytes());
        let mut record = ByteRecord::new();
        let mut starts = Vec::new();
        while reader.read_byte_record(&mut record).map_err(|e| broken(&file, 0, &e))? {
            starts.push(record.position().map_or(0, csv::Position::byte));
        }
        if starts.is_empty() {
            return Ok(Self { file, delimiter, header: Vec::new(), starts });
        }
        check_closed(&file, delimiter, starts[starts.len() - 1] as usize)?;
        let first = starts.remove(0) as usize;
        let header = read_record(&file, delimiter, first)?;
        let header: Vec<String> = header.iter().map(|name| name.trim().to_owned()).collect();
        check_header(file.path(), &header)?;
        Ok(Self { file, delimiter, header, starts })
    }
}

impl RowSource for CsvFile {
    fn len(&self) -> usize {
        self.starts.len()
    }

    fn row(&self, row_idx: usize) -> Result<Row, SourceError> {
        let record = read_record(&self.file, self.delimiter, self.starts[row_idx] as usize)?;
        if record.len() != self.header.len() {
            return Err(SourceError::invalid_data(
                self.locate(row_idx),
                format!("{} values under {} columns", record.len(), self.header.len()),
                "quote values that hold the delimiter, a quote or a line break",
            ));
        }
        let values = record.iter().map(|value| Value::String(value.to_owned()));
        Ok(self.header.iter().cloned().zip(values).collect())
    }

    fn locate(&self, row_idx: usize) -> String {
        self.file.place(self.starts[row_idx] as usize)
    }
}

/// Rejects an unclosed quote, which would join all following rows to one value.
fn check_closed(file: &MappedFile, delimiter: u8, last_record: usize) -> Result<(), SourceError> {
    let bytes = file.bytes();
    let (mut at, mut begins_value) = (last_record, true);
    while at < bytes.len() {
        if bytes[at] == b'"' && begins_value {
            at = end_of_quotes(bytes, at).ok_or_else(|| {
                let problem = "a quote is opened here and never closed";
                SourceError::invalid_data(file.place(at), problem, "close it, or write quotes inside a value twice")
            })?;
            begins_value = false;
        } else {
            begins_value = [delimiter, b'\n', b'\r'].contains(&bytes[at]);
            at += 1;
        }
    }
    Ok(())
}

/// Returns the offset after the quote that closes the one at `start`. Two quotes in a row are an escaped quote.
fn end_of_quotes(bytes: &[u8], start: usize) -> Option<usize> {
    let mut at = start + 1;
    loop {
        at += bytes.get(at..)?.iter().position(|&byte| byte == b'"')? + 1;
        match bytes.get(at) {
            Some(b'"') => at += 1,
            _ => return Some(at),
        }
    }
}

fn read_record(file: &MappedFile, delimiter: u8, start: usize) -> Result<StringRecord, SourceError> {
    let mut reader =
        ReaderBuilder::new().delimiter(delimiter).has_headers(false).flexible(true).from_reader(&file.bytes()[start..]);
    let mut record = StringRecord::new();
    reader.read_record(&mut record).map_err(|e| broken(file, start, &e))?;
    Ok(record)
}

fn broken(file: &MappedFile, start: usize, error: &csv::Error) -> SourceError {
    let (problem, fix) = match error.kind() {
        csv::ErrorKind::Utf8 { err, .. } => {
            (format!("value {} is not UTF-8", err.field() + 1), "save the file as UTF-8")
        }
        _ => (error.to_string(), "correct or delete the row"),
    };
    SourceError::invalid_data(file.place(start), problem, fix)
}

fn check_header(path: &Path, header: &[String]) -> Result<(), SourceError> {
    let mut names = HashSet::new();
    match header.iter().find(|name| !names.insert(name.as_str())) {
        None => Ok(()),
        Some(name) => Err(SourceError::invalid_data(
            format!("{}:1", path.display()),
            format!("the header names the column {name:?} twice"),
            "give each column its own name",
        )),
    }
}
