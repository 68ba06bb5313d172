//! The disk space of files and folders.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::SystemTime;

/// Returns the bytes of a file, or of all files in a folder. A link has the bytes of its path.
pub(super) fn bytes_of(path: &Path) -> u64 {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => entries_of(path).map(|entry| bytes_of(&entry)).sum(),
        Ok(found) => found.len(),
        Err(_) => 0,
    }
}

/// Returns the last time at which a file, or one in a folder, was read or written.
pub(super) fn last_used(path: &Path) -> Option<SystemTime> {
    let found = fs::symlink_metadata(path).ok()?;
    if found.is_dir() {
        return entries_of(path).filter_map(|entry| last_used(&entry)).max().or_else(|| found.modified().ok());
    }
    let seconds = found.atime().max(found.mtime());
    Some(SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(u64::try_from(seconds).ok()?))
}

fn entries_of(folder: &Path) -> impl Iterator<Item = std::path::PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
}
