//! Decompression of data files into an unnamed temporary file.

use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::Path;

use super::SourceError;

/// Decompressed size in bytes above which the compression ratio is checked.
const UNCHECKED_BYTES: u64 = 1 << 30;
/// Largest accepted compression ratio. Text shrinks 3 to 20 times, a file of zeros a thousand times.
const MAX_RATIO: u64 = 200;

/// Compression algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Compression {
    Gzip,
    Zstd,
}

/// Decompresses `file` if its first bytes mark gzip or zstd. `None` if it is not compressed.
///
/// The decompressed file has no name and disappears with the process.
pub(super) fn unpacked(path: &Path, file: &File) -> Result<Option<File>, SourceError> {
    let failed = |error| SourceError::io(path, error);
    let mut head = [0; 4];
    let n_read = read_head(file, &mut head).map_err(failed)?;
    let compression = match &head[..n_read] {
        [0x1F, 0x8B, ..] => Compression::Gzip,
        [0x28, 0xB5, 0x2F, 0xFD] => Compression::Zstd,
        _ => return Ok(None),
    };
    let n_packed = file.metadata().map_err(failed)?.len();
    let reader: Box<dyn Read> = match compression {
        Compression::Gzip => Box::new(flate2::read::MultiGzDecoder::new(BufReader::new(file))),
        Compression::Zstd => Box::new(zstd::stream::read::Decoder::new(file).map_err(failed)?),
    };
    let mut unpacked = tempfile::tempfile().map_err(|error| no_room(path, &error))?;
    copy(path, reader, &mut unpacked, (n_packed * MAX_RATIO).max(UNCHECKED_BYTES))?;
    Ok(Some(unpacked))
}

fn read_head(mut file: &File, head: &mut [u8]) -> io::Result<usize> {
    use std::io::{Seek, SeekFrom};
    let n_read = file.take(head.len() as u64).read(head)?;
    file.seek(SeekFrom::Start(0))?;
    Ok(n_read)
}

fn copy(path: &Path, mut reader: impl Read, unpacked: &mut File, limit: u64) -> Result<(), SourceError> {
    let mut chunk = vec![0; 1 << 18];
    let mut n_bytes = 0;
    loop {
        let n_read = reader.read(&mut chunk).map_err(|error| broken(path, &error))?;
        n_bytes += n_read as u64;
        if n_read == 0 {
            return Ok(());
        }
        if n_bytes > limit {
            let problem = format!("it unpacks to more than {MAX_RATIO} times its size");
            return Err(SourceError::invalid_data(path.display(), problem, "unpack it by hand if that is right"));
        }
        unpacked.write_all(&chunk[..n_read]).map_err(|error| no_room(path, &error))?;
    }
}

fn broken(path: &Path, error: &io::Error) -> SourceError {
    SourceError::invalid_data(
        path.display(),
        format!("it cannot be unpacked ({error})"),
        "fetch or write the file again",
    )
}

fn no_room(path: &Path, error: &io::Error) -> SourceError {
    let folder = std::env::temp_dir();
    let problem = format!("it cannot be unpacked into {} ({error})", folder.display());
    SourceError::invalid_data(
        path.display(),
        problem,
        "set TMPDIR to a folder on a disk with free space, or unpack it by hand",
    )
}
