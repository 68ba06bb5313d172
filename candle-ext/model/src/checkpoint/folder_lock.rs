//! Lock of an output folder. Two processes that write one folder would mix or replace their files.

use std::ffi::OsStr;
use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::ModelError;

/// Largest number of attempts to open the lock file while other processes remove it. Some file systems in user space number
/// their files anew at each look.
const MAX_ATTEMPTS: usize = 100;

/// A lock file next to a folder. The operating system releases the lock of a killed process; the file is reused then.
#[derive(Debug)]
pub(super) struct FolderLock {
    path: PathBuf,
    /// Holds the lock while it is open.
    _file: File,
}

impl FolderLock {
    /// Takes the lock file `path` of the folder `target`.
    ///
    /// # Errors
    /// If another process has the lock.
    pub(super) fn take(path: PathBuf, target: &Path) -> Result<Self, ModelError> {
        for _ in 0..MAX_ATTEMPTS {
            // Opening a named pipe blocks until a reader opens it.
            if fs::symlink_metadata(&path).is_ok_and(|found| !found.is_file()) {
                let error = io::Error::other("it is no regular file; remove it");
                return Err(ModelError::io("lock", &path)(error));
            }
            let file = File::options().create(true).write(true).truncate(false).open(&path);
            let file = file.map_err(ModelError::io("lock", &path))?;
            match file.try_lock() {
                Err(TryLockError::WouldBlock) => return Err(is_locked(target)),
                // Some network file systems do not support locks.
                Ok(()) | Err(TryLockError::Error(_)) => {}
            }
            // The process that had the lock may have removed the file between opening and locking.
            if is_at(&file, &path) {
                return Ok(Self { path, _file: file });
            }
        }
        let error = io::Error::other(format!(
            "after {MAX_ATTEMPTS} attempts it is still another file than the opened one; name a folder on another file system"
        ));
        Err(ModelError::io("lock", &path)(error))
    }
}

impl Drop for FolderLock {
    /// Removes the file before the lock is released, so that no other process locks a file that is then removed.
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

fn is_locked(target: &Path) -> ModelError {
    let name = target.file_name().unwrap_or(OsStr::new("model")).to_string_lossy();
    let problem = format!("another process is writing {name}; wait for it, or name another folder");
    ModelError::OutputPath { path: target.to_path_buf(), problem }
}

/// Returns true if `path` is the opened file.
fn is_at(file: &File, path: &Path) -> bool {
    let inode = |found: io::Result<fs::Metadata>| found.map(|found| (found.dev(), found.ino())).ok();
    let opened = inode(file.metadata());
    opened.is_some() && opened == inode(fs::symlink_metadata(path))
}
