//! File locks of a run's folders. Two runs in one folder would mix their checkpoints and metrics.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use candlewick_text::files::is_present;

use crate::checkpoint::CheckpointError;
use crate::plan::Plan;

/// File locks, held until they are dropped or the process ends. A drop removes the new folders in which nothing was written.
pub(crate) struct Locks {
    folders: Vec<LockedFolder>,
}

struct LockedFolder {
    path: PathBuf,
    /// True if this run created the folder.
    is_new: bool,
    /// `None` if the file system has no locks.
    _file: Option<File>,
}

const NAME: &str = ".lock";

/// A command that locks folders, and the remedy if a run has locked them.
struct LockingCommand {
    name: &'static str,
    advice: &'static str,
}

const START: LockingCommand = LockingCommand {
    name: "start",
    advice: "Wait for it, or set another output_dir (checkpoint.N.output_dir for a checkpoint folder)",
};
const CLEAN: LockingCommand = LockingCommand { name: "clean", advice: "Wait for its end" };

/// Locks the folders that a run of `plan` writes to.
pub(super) fn lock(plan: &Plan) -> Result<Locks> {
    let folders = plan.log.output_dir.iter().chain(plan.checkpoints.iter().map(|checkpoint| &checkpoint.output_dir));
    let folders: Vec<&Path> = folders.map(PathBuf::as_path).collect();
    lock_folders(&folders)
}

fn lock_folders(folders: &[&Path]) -> Result<Locks> {
    let is_new: Vec<bool> = folders.iter().map(|folder| !is_present(folder)).collect();
    // Two paths may resolve to the same folder.
    let found = folders.iter().zip(is_new).map(|(folder, is_new)| Ok((created(folder)?, is_new)));
    let folders: BTreeMap<PathBuf, bool> = found.collect::<Result<_>>()?;
    let mut locks = Locks { folders: Vec::new() };
    for (path, is_new) in folders {
        let _file = lock_folder(path.clone(), &START)?;
        locks.folders.push(LockedFolder { path, is_new, _file });
    }
    Ok(locks)
}

/// Locks those of the folders that a run has locked before. Fails if a run is writing to one.
pub(crate) fn lock_existing(folders: &[PathBuf]) -> Result<Locks> {
    let mut locks = Locks { folders: Vec::new() };
    let existing = folders.iter().filter(|folder| folder.join(NAME).exists());
    let existing: BTreeSet<PathBuf> = existing.filter_map(|folder| folder.canonicalize().ok()).collect();
    for path in existing {
        let _file = lock_folder(path.clone(), &CLEAN)?;
        locks.folders.push(LockedFolder { path, is_new: false, _file });
    }
    Ok(locks)
}

impl Drop for Locks {
    /// Removes each new folder whose only file is the lock. The folders are sorted, so a subfolder goes first.
    fn drop(&mut self) {
        for LockedFolder { path, .. } in self.folders.iter().rev().filter(|folder| folder.is_new) {
            // Keep the lock until the file is removed: another run compares the files.
            let mut entries = fs::read_dir(path).into_iter().flatten().flatten();
            if entries.all(|entry| entry.file_name() == NAME) {
                let _ = fs::remove_file(path.join(NAME)).and_then(|()| fs::remove_dir(path));
            }
        }
    }
}

fn created(folder: &Path) -> Result<PathBuf> {
    let created = fs::create_dir_all(folder).and_then(|()| folder.canonicalize());
    created.map_err(|source| CheckpointError::Io { action: "create", path: folder.to_owned(), source }.into())
}

fn lock_folder(folder: PathBuf, command: &LockingCommand) -> Result<Option<File>> {
    let path = folder.join(NAME);
    let open = || File::options().create(true).write(true).truncate(false).open(&path);
    let failed = |source: io::Error| CheckpointError::Io { action: "lock", path: path.clone(), source };
    // Opening a named pipe blocks until a reader opens it.
    if fs::metadata(&path).is_ok_and(|found| !found.is_file()) {
        return Err(failed(io::Error::other("it is not a regular file; remove it")).into());
    }
    let file = open().map_err(failed)?;
    match file.try_lock() {
        Ok(()) if is_removed(&file, &path) => lock_folder(created(&folder)?, command),
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => {
            let error = anyhow::anyhow!(
                "failed to {}: another run is writing to {}. {}",
                command.name,
                folder.display(),
                command.advice
            );
            bail!(error.context(crate::exit::ExitCode::Checkpoint))
        }
        // Some network file systems do not support locks.
        Err(TryLockError::Error(error)) => {
            tracing::warn!("cannot lock {}: {error}; do not start a second run there", folder.display());
            Ok(None)
        }
    }
}

/// Returns true if the run that held the lock has removed the file since it was opened.
fn is_removed(file: &File, path: &Path) -> bool {
    let id = |found: io::Result<fs::Metadata>| found.ok().map(|found| (found.dev(), found.ino()));
    id(file.metadata()) != id(fs::metadata(path))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_second_run_in_a_folder_is_refused_until_the_first_ends() {
        let dir = tempfile::tempdir().unwrap();
        let folder = created(&dir.path().join("runs/a")).unwrap();
        assert_eq!(created(&dir.path().join("./runs/../runs/a")).unwrap(), folder);
        let first = lock_folder(folder.clone(), &START).unwrap();
        assert!(first.is_some());
        let error = lock_folder(folder.clone(), &START).unwrap_err();
        let text = format!("{error:#}");
        assert!(text.contains("another run is writing to") && text.contains("runs/a"), "{text}");
        assert_eq!(crate::exit::classify(&error), crate::exit::ExitCode::Checkpoint);
        drop(first);
        assert!(lock_folder(folder, &START).unwrap().is_some());
    }

    #[test]
    fn the_folders_of_a_run_that_wrote_nothing_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let locked = |names: &[&str]| {
            let folders: Vec<PathBuf> = names.iter().map(|name| dir.path().join(name)).collect();
            lock_folders(&folders.iter().map(PathBuf::as_path).collect::<Vec<_>>()).unwrap()
        };
        fs::create_dir(dir.path().join("own")).unwrap();
        let locks = locked(&["run", "run/checkpoints", "run/model", "own"]);
        let file = File::options().read(true).open(dir.path().join("run/model/.lock")).unwrap();
        fs::write(dir.path().join("run/checkpoints/latest"), "x").unwrap();
        drop(locks);
        assert!(dir.path().join("run/checkpoints/latest").exists() && !dir.path().join("run/model").exists());
        assert!(is_removed(&file, &dir.path().join("run/model/.lock")));
        assert!(dir.path().join("own").exists(), "the user created it");
        fs::remove_dir_all(dir.path().join("run")).unwrap();
        drop(locked(&["run", "run/checkpoints"]));
        assert!(!dir.path().join("run").exists());
    }
}
