//! Whole files: reads with a size limit, and atomic writes.
//!
//! A path given by a user may be a pipe, a device or a link to one, whose bytes never end.

use std::fs::{File, create_dir_all, metadata, symlink_metadata};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use tempfile::Builder;

/// Size limit in bytes of a file that a person writes: a recipe, a task, a list of messages.
pub const MAX_CONFIG_FILE_BYTES: u64 = 64 << 20;
/// Size limit in bytes of a file that a program writes: a vocabulary, a list of requests. The largest vocabularies
/// in use take 35 MB.
pub const MAX_GENERATED_FILE_BYTES: u64 = 1 << 30;

/// Returns true unless the folder of `path` has no entry of that name. A pipe, a folder, a dangling link and an unreadable
/// entry count as present: a program that reads an optional file must not take them for an absent one.
pub fn is_present(path: &Path) -> bool {
    let is_absent = |error: io::Error| matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory);
    symlink_metadata(path).map_or_else(|error| !is_absent(error), |_| true)
}

/// Reads a regular file of at most `most` bytes.
///
/// # Errors
/// If the file cannot be read, is a folder, a pipe or a device, or has more bytes.
pub fn read_regular_file(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    read_to_end(open_regular_file(path)?, most)
}

/// Opens a regular file. The open of a pipe would wait for its writer.
///
/// # Errors
/// If the file cannot be opened, or is a folder, a pipe or a device.
pub fn open_regular_file(path: &Path) -> io::Result<File> {
    match metadata(path)?.is_file() {
        true => File::open(path),
        false => Err(io::Error::other("it is a pipe, a device or a folder, not a regular file")),
    }
}

/// Reads UTF-8 text of at most `most` bytes from a regular file.
///
/// # Errors
/// Those of [`read_regular_file`], and text that is not UTF-8.
pub fn read_regular_text_file(path: &Path, most: u64) -> io::Result<String> {
    text_of(read_regular_file(path, most)?)
}

/// Reads at most `most` bytes from a file, or from the pipe that shells pass for `<(command)`.
///
/// # Errors
/// If the file cannot be read, has more bytes, or is a named pipe: its open would wait for a writer.
pub fn read_file_or_pipe(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let is_of_shell = ["/dev", "/proc"].iter().any(|folder| path.starts_with(folder));
    match metadata(path)?.file_type().is_fifo() && !is_of_shell {
        true => Err(io::Error::other("it is a named pipe; use <(COMMAND), or a regular file")),
        false => read_to_end(File::open(path)?, most),
    }
}

/// Reads UTF-8 text of at most `most` bytes from a file or a pipe, or from standard input for the path `-`.
///
/// # Errors
/// Those of [`read_file_or_pipe`], and text that is not UTF-8.
pub fn read_text_or_stdin(path: &Path, most: u64) -> io::Result<String> {
    match path == Path::new("-") {
        true => text_of(read_to_end(io::stdin().lock(), most)?),
        false => text_of(read_file_or_pipe(path, most)?),
    }
}

/// Replaces the file at `path` atomically: a concurrent reader sees the old file or the whole new one.
///
/// A device, a pipe or /dev/stdout is written as it is, and a link stays a link. Creates missing parent folders. Does not sync the disk, so a power failure may lose the new file.
///
/// # Errors
/// If a folder or a file cannot be created, or `write` fails. The old file then stays.
pub fn write_atomically(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> io::Result<()> {
    let is_special = metadata(path).is_ok_and(|metadata| !metadata.is_file() && !metadata.is_dir());
    // A link of the system to an open file, such as /dev/stdout, has no folder for a new file.
    if is_special || path.starts_with("/dev") || path.starts_with("/proc") {
        let mut file = BufWriter::new(File::options().append(true).open(path)?);
        return write(&mut file).and_then(|()| file.flush());
    }
    replace_atomically(&without_links(path), |unfinished| {
        let mut file = BufWriter::new(File::create_new(unfinished)?);
        write(&mut file)?;
        file.flush()
    })
}

/// Returns the path without symlinks and `..`, if it exists; else the path itself.
pub fn without_links(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// Writes a file that must not exist. A failed write leaves no file.
///
/// # Errors
/// Those of [`write_atomically`], and `AlreadyExists`.
pub fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if path.symlink_metadata().is_ok() {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    write_atomically(path, |file| file.write_all(bytes))
}

/// Replaces the file at `path` atomically, as [`write_atomically`] does, and syncs it and its name to disk.
///
/// # Errors
/// Those of [`write_atomically`], and a failed sync.
pub fn write_durably(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> io::Result<()> {
    write_atomically(path, |file| {
        write(file)?;
        file.flush()?;
        file.get_ref().sync_all()
    })?;
    sync_folder(folder_of(path))
}

/// Syncs the names in a folder to disk.
///
/// # Errors
/// If the folder cannot be opened or synced.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Replaces `path` with the file or link that `create` makes under a temporary name in the same folder.
///
/// # Errors
/// Those of [`write_atomically`].
pub fn replace_atomically(path: &Path, create: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let folder = folder_of(path);
    create_dir_all(folder)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let unfinished = Builder::new().prefix(&format!(".{name}.")).suffix(".tmp").make_in(folder, |_| Ok(()))?;
    create(unfinished.path())?;
    unfinished.persist(path).map(drop).map_err(|error| error.error)
}

/// Returns JSON without the byte order mark that some editors put first.
pub fn without_bom(json: &[u8]) -> &[u8] {
    json.strip_prefix("\u{feff}".as_bytes()).unwrap_or(json)
}

fn read_to_end(from: impl Read, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(most + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > most {
        false => Ok(bytes),
        true => Err(io::Error::other(format!("it has more than {most} bytes"))),
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."))
}

fn text_of(bytes: Vec<u8>) -> io::Result<String> {
    let message = |at: usize| format!("it is not UTF-8 text: byte {at} is the first that is none");
    String::from_utf8(bytes).map_err(|error| io::Error::other(message(error.utf8_error().valid_up_to())))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_end_is_refused() {
        let zero = Path::new("/dev/zero");
        assert!(read_regular_file(zero, 10).unwrap_err().to_string().contains("a device"));
        assert_eq!(read_file_or_pipe(zero, 10).unwrap_err().to_string(), "it has more than 10 bytes");
    }

    #[test]
    fn a_pipe_without_a_writer_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        assert!(read_regular_file(&pipe, 10).unwrap_err().to_string().contains("a pipe"));
        assert!(read_text_or_stdin(&pipe, 10).unwrap_err().to_string().contains("it is a named pipe"));
        let (reader, mut writer) = io::pipe().unwrap();
        writer.write_all(b"text").unwrap();
        drop(writer);
        let of_shell = format!("/dev/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&reader));
        assert_eq!(read_text_or_stdin(Path::new(&of_shell), 10).unwrap(), "text");
    }

    #[test]
    fn what_is_no_regular_file_is_not_absent() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("file"), "").unwrap();
        std::fs::create_dir(path("folder")).unwrap();
        std::os::unix::fs::symlink("nowhere", path("dangling")).unwrap();
        std::os::unix::fs::symlink("itself", path("itself")).unwrap();
        for name in ["file", "folder", "dangling", "itself"] {
            assert!(is_present(&path(name)), "{name}");
        }
        for name in ["none", "none/file", "file/none"] {
            assert!(!is_present(&path(name)), "{name}");
        }
    }

    fn names(folder: &Path) -> Vec<String> {
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn a_write_that_fails_leaves_the_old_file_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b.json");
        write_durably(&path, |file| file.write_all(b"old")).unwrap();
        let failed = write_durably(&path, |file| file.write_all(b"ne").and(Err(io::ErrorKind::StorageFull.into())));
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        write_durably(&path, |file| file.write_all(b"new")).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(names(path.parent().unwrap()), ["b.json"]);
    }

    #[test]
    fn a_new_file_replaces_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        write_new(&path, b"one").unwrap();
        assert_eq!(write_new(&path, b"two").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read(&path).unwrap(), b"one");
    }

    #[test]
    fn a_device_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("null");
        std::os::unix::fs::symlink("/dev/null", &path).unwrap();
        write_atomically(&path, |file| file.write_all(b"text")).unwrap();
        assert_eq!(std::fs::read_link(&path).unwrap(), Path::new("/dev/null"));
    }

    #[test]
    fn a_file_has_the_permissions_of_any_new_file() {
        let folder = tempfile::tempdir().unwrap();
        let [plain, path] = ["plain", "path"].map(|name| folder.path().join(name));
        std::fs::write(&plain, "").unwrap();
        write_atomically(&path, |_| Ok(())).unwrap();
        assert_eq!(metadata(&path).unwrap().permissions(), metadata(&plain).unwrap().permissions());
    }

    #[test]
    fn a_file_of_the_limit_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, "0123456789").unwrap();
        assert_eq!(read_regular_text_file(&path, 10).unwrap(), "0123456789");
        assert!(read_regular_file(&path, 9).is_err());
        std::fs::write(&path, b"ab\xff").unwrap();
        assert!(read_text_or_stdin(&path, 10).unwrap_err().to_string().contains("byte 2"));
    }
}
