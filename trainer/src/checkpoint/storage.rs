//! The few things that a save asks of a file system, so that tests can take them away half-way.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use candlewick_model::checkpoint::{DurableFile, UNFINISHED_MARKER, remove_unfinished};

/// Stands for a disk.
pub(crate) trait Storage {
    fn create_dir(&self, dir: &Path) -> io::Result<()>;
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn StoredFile>>;
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Makes the entries of a folder durable.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Removes a folder that is marked as unfinished, and all in it; a missing one is fine.
    fn remove_dir(&self, dir: &Path) -> io::Result<()>;
}

impl dyn Storage + '_ {
    /// Marks a folder as unfinished before it gets a temporary name.
    pub(crate) fn mark(&self, dir: &Path) -> io::Result<()> {
        let mark = dir.join(UNFINISHED_MARKER);
        if mark.exists() { Ok(()) } else { self.create_file(&mark).map(drop) }
    }

    /// Removes the mark of a folder that has its own name.
    pub(crate) fn unmark(&self, dir: &Path) -> io::Result<()> {
        let mark = dir.join(UNFINISHED_MARKER);
        if mark.exists() { self.remove_file(&mark) } else { Ok(()) }
    }
}

/// Stands for a file being written.
pub(crate) trait StoredFile: Write + Send {
    /// Makes what was written durable.
    fn sync(&mut self) -> io::Result<()>;
}

/// The real disk.
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
        File::open(dir)?.sync_all()
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
