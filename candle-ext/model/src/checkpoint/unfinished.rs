//! Marker file of a folder that is being written, replaced or deleted. Only marked or empty folders are ever deleted.

use std::fs::{self, File};
use std::io;
use std::path::Path;

/// Name of the marker file.
pub const UNFINISHED_MARKER: &str = ".candlewick_unfinished";

/// Marks a folder. Call it before the folder gets a temporary name.
pub fn mark_unfinished(folder: &Path) -> io::Result<()> {
    File::create(folder.join(UNFINISHED_MARKER)).map(drop)
}

/// Removes the marker of a folder that has its final name.
pub fn unmark_finished(folder: &Path) -> io::Result<()> {
    ignore_missing(fs::remove_file(folder.join(UNFINISHED_MARKER)))
}

/// Deletes a marked or empty folder; a missing one is not an error. The marker is deleted last, so an interrupted
/// deletion can be repeated.
///
/// # Errors
/// If the path is a file, a link or an unmarked folder with contents, or cannot be deleted.
pub fn remove_unfinished(folder: &Path) -> io::Result<()> {
    let found = match fs::symlink_metadata(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found?,
    };
    if !found.is_dir() {
        return Err(foreign("it is a file or a link"));
    }
    let names = fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>()?;
    if !names.is_empty() && !names.iter().any(|name| name == UNFINISHED_MARKER) {
        return Err(foreign("it is a folder with other contents"));
    }
    for path in names.iter().filter(|name| *name != UNFINISHED_MARKER).map(|name| folder.join(name)) {
        let is_dir = fs::symlink_metadata(&path).is_ok_and(|found| found.is_dir());
        ignore_missing(if is_dir { fs::remove_dir_all(&path) } else { fs::remove_file(&path) })?;
    }
    ignore_missing(fs::remove_dir_all(folder))
}

fn foreign(what: &str) -> io::Error {
    let message = format!("the name is one of this program's temporary folders, but {what}; move it away");
    io::Error::new(io::ErrorKind::AlreadyExists, message)
}

fn ignore_missing(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_without_the_mark_is_never_deleted() {
        let root = tempfile::tempdir().unwrap();
        let [folder, file, link] = ["folder", "file", "link"].map(|name| root.path().join(name));
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("thesis.txt"), "mine").unwrap();
        fs::write(&file, "mine").unwrap();
        std::os::unix::fs::symlink(&folder, &link).unwrap();
        for path in [&folder, &file, &link] {
            assert_eq!(remove_unfinished(path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        }
        assert!(folder.join("thesis.txt").exists() && file.exists() && link.exists());
        mark_unfinished(&folder).unwrap();
        assert!(remove_unfinished(&link).is_err());
        remove_unfinished(&folder).unwrap();
        remove_unfinished(&folder).unwrap();
        fs::create_dir(&folder).unwrap();
        remove_unfinished(&folder).unwrap();
        assert!(!folder.exists());
    }
}
