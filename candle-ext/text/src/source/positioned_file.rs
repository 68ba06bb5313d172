//! Parquet input with positioned reads, which threads share.
//!
//! The parquet crate reads a [`File`] through duplicates of its handle. Duplicates share one file offset, so a thread that
//! seeks moves the reads of the others.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use bytes::Bytes;
use parquet::errors::{ParquetError, Result};
use parquet::file::reader::{ChunkReader, Length};

/// File of known length. Its reads use no file offset.
#[derive(Clone)]
pub(super) struct PositionedFile {
    file: Arc<File>,
    n_bytes: u64,
}

/// Sequential reader with a position of its own.
pub(super) struct PositionedReader {
    file: Arc<File>,
    position: u64,
}

impl PositionedFile {
    pub(super) fn new(file: File) -> io::Result<Self> {
        let n_bytes = file.metadata()?.len();
        Ok(Self { file: Arc::new(file), n_bytes })
    }
}

impl Length for PositionedFile {
    fn len(&self) -> u64 {
        self.n_bytes
    }
}

impl ChunkReader for PositionedFile {
    type T = BufReader<PositionedReader>;

    fn get_read(&self, start: u64) -> Result<Self::T> {
        Ok(BufReader::new(PositionedReader { file: self.file.clone(), position: start }))
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes> {
        // A damaged file may claim more bytes than memory holds.
        if start.checked_add(length as u64).is_none_or(|end| end > self.n_bytes) {
            let problem = format!("{length} bytes at offset {start} are beyond the {} bytes of the file", self.n_bytes);
            return Err(ParquetError::EOF(problem));
        }
        let mut bytes = vec![0; length];
        self.file.read_exact_at(&mut bytes, start)?;
        Ok(bytes.into())
    }
}

impl Read for PositionedReader {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let n_read = self.file.read_at(bytes, self.position)?;
        self.position += n_read as u64;
        Ok(n_read)
    }
}
