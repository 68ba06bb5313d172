//! The file system operations of a checkpoint, as a trait so that tests can inject faults.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use candlewick_model::checkpoint::{DurableFile, UNFINISHED_MARKER, remove_unfinished};
use candlewick_text::files::sync_folder;

/// File system operations.
pub(crate) trait Storage {
    fn create_dir(&self, dir: &Path) -> io::Result<()>;
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn StoredFile>>;
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Syncs the entries of a folder to disk.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Removes a folder that is marked as unfinished, with its contents. A missing folder is no error.
    fn remove_dir(&self, dir: &Path) -> io::Result<()>;
}

impl dyn Storage + '_ {
    /// Marks a folder as unfinished before it gets a temporary name.
    pub(crate) fn mark_unfinished(&self, dir: &Path) -> io::Result<()> {
        let mark = dir.join(UNFINISHED_MARKER);
        if mark.exists() { Ok(()) } else { self.create_file(&mark).map(drop) }
    }

    /// Removes the mark of an unfinished folder, after the folder has its final name.
    pub(crate) fn unmark_finished(&self, dir: &Path) -> io::Result<()> {
        let mark = dir.join(UNFINISHED_MARKER);
        if mark.exists() { self.remove_file(&mark) } else { Ok(()) }
    }
}

/// A file that is being written.
pub(crate) trait StoredFile: Write + Send {
    /// Syncs the written bytes to disk.
    fn sync(&mut self) -> io::Result<()>;
}

/// The local file system.
pub(crate) struct LocalDisk;

impl Storage for LocalDisk {
    fn create_dir(&self, dir: &Path) -> io::Result<()> {
        fs::create_dir_all(dir)
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn StoredFile>> {
        Ok(Box::new(DurableFile::create_new(path)?))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        sync_folder(dir)
    }

    fn remove_dir(&self, dir: &Path) -> io::Result<()> {
        remove_unfinished(dir)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }
}

impl StoredFile for DurableFile {
    fn sync(&mut self) -> io::Result<()> {
        self.sync()
    }
}
