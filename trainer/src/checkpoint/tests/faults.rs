//! Saves that are killed at each operation, and a disk that fills up at many byte counts.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use candlewick_model::checkpoint::UNFINISHED_MARKER;

use super::*;
use crate::checkpoint::storage::StoredFile;

/// The injected fault.
#[derive(Clone, Copy)]
enum Fault {
    /// This operation and all later ones do nothing, as if the process had died.
    KilledAt(usize),
    /// The disk holds only this many bytes.
    FullAfter(usize),
}

#[derive(Clone)]
struct FaultyStorage {
    fault: Fault,
    n_operations: Arc<AtomicUsize>,
    n_bytes: Arc<AtomicUsize>,
}

impl FaultyStorage {
    fn new(fault: Fault) -> Self {
        Self { fault, n_operations: Arc::default(), n_bytes: Arc::default() }
    }

    fn operation(&self) -> io::Result<()> {
        let number = self.n_operations.fetch_add(1, SeqCst);
        match self.fault {
            Fault::KilledAt(last) if number >= last => Err(io::Error::other("killed")),
            _ => Ok(()),
        }
    }
}

impl Storage for FaultyStorage {
    fn create_dir(&self, dir: &Path) -> io::Result<()> {
        self.operation().and_then(|()| LocalDisk.create_dir(dir))
    }
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn StoredFile>> {
        self.operation()?;
        Ok(Box::new(FaultyFile { file: File::create_new(path)?, disk: self.clone() }))
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.operation().and_then(|()| LocalDisk.rename(from, to))
    }
    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.operation().and_then(|()| LocalDisk.sync_dir(dir))
    }
    /// Counts two operations, so that a kill can come between two files.
    fn remove_dir(&self, dir: &Path) -> io::Result<()> {
        self.operation()?;
        let paths = fs::read_dir(dir).into_iter().flatten().map(|entry| entry.map(|entry| entry.path()));
        if let Some(path) = paths.flatten().find(|path| !path.ends_with(UNFINISHED_MARKER)) {
            fs::remove_file(path)?;
        }
        self.operation().and_then(|()| LocalDisk.remove_dir(dir))
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.operation().and_then(|()| LocalDisk.remove_file(path))
    }
}

struct FaultyFile {
    file: File,
    disk: FaultyStorage,
}

impl Write for FaultyFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let is_torn = matches!(self.disk.fault, Fault::KilledAt(n) if n == self.disk.n_operations.load(SeqCst));
        if let Err(error) = self.disk.operation() {
            self.file.write_all(&bytes[..if is_torn { bytes.len() / 2 } else { 0 }])?;
            return Err(error);
        }
        let n_free = match self.disk.fault {
            Fault::FullAfter(limit) => limit - self.disk.n_bytes.load(SeqCst),
            Fault::KilledAt(_) => bytes.len(),
        };
        let n = self.file.write(&bytes[..n_free.min(bytes.len())])?;
        self.disk.n_bytes.fetch_add(n, SeqCst);
        if n == 0 && !bytes.is_empty() { Err(io::ErrorKind::StorageFull.into()) } else { Ok(n) }
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl StoredFile for FaultyFile {
    fn sync(&mut self) -> io::Result<()> {
        self.disk.operation().and_then(|()| self.file.sync_all())
    }
}

/// Kills the process at each operation of saving `step`, with checkpoints of the steps `before` on disk.
///
/// One of the steps `want` must resume each time, and a repeated save must then succeed.
fn kill_everywhere(save_total_limit: Option<usize>, before: &[usize], step: usize, want: &[usize]) {
    for n in 0.. {
        let dir = tempfile::tempdir().unwrap();
        let plan = plan(&dir, save_total_limit);
        before.iter().for_each(|&step| _ = save_step(&LocalDisk, &plan, step).unwrap());
        let result = save_step(&FaultyStorage::new(Fault::KilledAt(n)), &plan, step);
        let resumed = resumed_step(&plan);
        assert!(want.contains(&resumed), "killed at operation {n}: resumed at {resumed}");
        assert!(names(&plan.output_dir).iter().all(|name| !name.starts_with('.')));
        let finished = result.is_ok();
        save_step(&LocalDisk, &plan, step).unwrap();
        assert_eq!(resumed_step(&plan), step);
        if finished {
            assert!(n > 20, "only {n} operations were seen");
            return;
        }
    }
}

#[test]
fn killed_at_any_operation_the_last_complete_checkpoint_resumes() {
    kill_everywhere(None, &[1], 2, &[1, 2]);
}

#[test]
fn killed_while_replacing_a_checkpoint_one_of_the_two_resumes() {
    kill_everywhere(None, &[2], 2, &[2]);
}

#[test]
fn killed_while_deleting_old_checkpoints_a_newer_one_resumes() {
    kill_everywhere(Some(1), &[1, 2], 3, &[2, 3]);
}

#[test]
fn a_full_disk_leaves_only_the_old_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(&dir, Some(1));
    save_step(&LocalDisk, &plan, 1).unwrap();
    let mut limit = 0;
    loop {
        match save_step(&FaultyStorage::new(Fault::FullAfter(limit)), &plan, 2) {
            Ok(_) => break,
            Err(error) => {
                assert!(matches!(error.downcast_ref(), Some(CheckpointError::DiskFull { .. })), "{limit}: {error}")
            }
        }
        assert_eq!(names(&plan.output_dir), ["epoch_0_global_step_1"]);
        assert_eq!(resumed_step(&plan), 1);
        limit += 97;
    }
    assert!(limit > 1000);
    assert_eq!(names(&plan.output_dir), ["epoch_0_global_step_2"]);
}
