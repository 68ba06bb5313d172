//! Memory-mapped text file, with its byte order mark removed and line numbers.

use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::{SourceError, decompress};
use crate::files::open_regular_file;

const UTF8_MARK: &[u8] = &[0xEF, 0xBB, 0xBF];

#[derive(Debug)]
pub(crate) struct MappedFile {
    path: PathBuf,
    map: Option<Mmap>,
    body: usize,
}

impl MappedFile {
    /// Maps `path`, decompressed if needed. Rejects UTF-16 and UTF-32; skips the byte order mark of UTF-8.
    pub(crate) fn open(path: &Path) -> Result<Self, SourceError> {
        let file = open_regular(path)?;
        let file = decompress::unpacked(path, &file)?.unwrap_or(file);
        let n_bytes = file.metadata().map_err(|e| SourceError::io(path, e))?.len();
        let map = match n_bytes {
            0 => None,
            // SAFETY: the map is read-only and private to this value. A file that another process shortens while we
            // read it ends this process with SIGBUS, which `bus_error` reports.
            _ => Some(unsafe { Mmap::map(&file) }.map_err(|e| SourceError::io(path, e))?),
        };
        let mut mapped = Self { path: path.to_owned(), map, body: 0 };
        if let Some(name) = other_unicode(mapped.bytes()) {
            let fix = format!("convert it: iconv -f {name} -t UTF-8 {}", path.display());
            return Err(SourceError::invalid_data(path.display(), format!("the text is {name}"), fix));
        }
        if mapped.bytes().starts_with(UTF8_MARK) {
            mapped.body = UTF8_MARK.len();
        }
        Ok(mapped)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the bytes after the byte order mark.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.map.as_deref().map_or(&[], |map| &map[self.body..])
    }

    /// Returns `file:line` of a byte offset. Lines count from 1.
    pub(crate) fn place(&self, offset: usize) -> String {
        format!("{}:{}", self.path.display(), self.line(offset))
    }

    pub(crate) fn line(&self, offset: usize) -> usize {
        1 + count_lines(&self.bytes()[..offset.min(self.bytes().len())])
    }

    /// Returns the bytes from `start` to the end of its line, without the line break.
    pub(crate) fn line_at(&self, start: usize) -> &[u8] {
        let rest = &self.bytes()[start..];
        trim_return(&rest[..find_newline(rest).unwrap_or(rest.len())])
    }
}

/// Opens a regular file. Rejects pipes and devices, whose bytes may never end.
pub(crate) fn open_regular(path: &Path) -> Result<File, SourceError> {
    let is_file = std::fs::metadata(path).map_err(|e| SourceError::io(path, e))?.is_file();
    if !is_file {
        let problem = "it is a pipe, a device or a folder, not a regular file";
        return Err(SourceError::invalid_data(path.display(), problem, "write the rows to a file first"));
    }
    open_regular_file(path).map_err(|e| SourceError::io(path, e))
}

pub(crate) fn find_newline(bytes: &[u8]) -> Option<usize> {
    memchr::memchr(b'\n', bytes)
}

pub(crate) fn is_blank(bytes: &[u8]) -> bool {
    bytes.iter().all(u8::is_ascii_whitespace)
}

fn count_lines(bytes: &[u8]) -> usize {
    memchr::memchr_iter(b'\n', bytes).count()
}

fn trim_return(line: &[u8]) -> &[u8] {
    line.strip_suffix(b"\r").unwrap_or(line)
}

fn other_unicode(bytes: &[u8]) -> Option<&'static str> {
    match bytes {
        [0xFF, 0xFE, 0, 0, ..] => Some("UTF-32LE"),
        [0, 0, 0xFE, 0xFF, ..] => Some("UTF-32BE"),
        [0xFF, 0xFE, ..] => Some("UTF-16LE"),
        [0xFE, 0xFF, ..] => Some("UTF-16BE"),
        _ => None,
    }
}
