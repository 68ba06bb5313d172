//! File locks of a run's folders. Two runs in one folder would mix their checkpoints and metrics.

use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::checkpoint::CheckpointError;
use crate::plan::Plan;

/// File locks, held until they are dropped or the process ends.
pub(super) struct Locks {
    _files: Vec<File>,
}

const NAME: &str = ".lock";

/// Locks the folders that a run of `plan` writes to.
pub(super) fn lock(plan: &Plan) -> Result<Locks> {
    let folders = plan.log.output_dir.iter().chain(plan.checkpoints.iter().map(|checkpoint| &checkpoint.output_dir));
    // Two paths may resolve to the same folder.
    let folders: BTreeSet<PathBuf> = folders.map(|folder| created(folder)).collect::<Result<_>>()?;
    let locks = folders.into_iter().map(lock_folder).collect::<Result<Vec<_>>>()?;
    Ok(Locks { _files: locks.into_iter().flatten().collect() })
}

fn created(folder: &Path) -> Result<PathBuf> {
    let created = fs::create_dir_all(folder).and_then(|()| folder.canonicalize());
    created.map_err(|source| CheckpointError::Io { action: "create", path: folder.to_owned(), source }.into())
}

fn lock_folder(folder: PathBuf) -> Result<Option<File>> {
    let path = folder.join(NAME);
    let open = || File::options().create(true).write(true).truncate(false).open(&path);
    let failed = |source: io::Error| CheckpointError::Io { action: "lock", path: path.clone(), source };
    // Opening a named pipe blocks until a reader opens it.
    if fs::metadata(&path).is_ok_and(|found| !found.is_file()) {
        return Err(failed(io::Error::other("it is not a regular file; remove it")).into());
    }
    let file = open().map_err(failed)?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => {
            let error = anyhow::anyhow!(
                "failed to start: another run is writing to {}. Wait for it, or set another output_dir (checkpoint.N.output_dir for a checkpoint folder)",
                folder.display()
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_second_run_in_a_folder_is_refused_until_the_first_ends() {
        let dir = tempfile::tempdir().unwrap();
        let folder = created(&dir.path().join("runs/a")).unwrap();
        assert_eq!(created(&dir.path().join("./runs/../runs/a")).unwrap(), folder);
        let first = lock_folder(folder.clone()).unwrap();
        assert!(first.is_some());
        let error = lock_folder(folder.clone()).unwrap_err();
        let text = format!("{error:#}");
        assert!(text.contains("another run is writing to") && text.contains("runs/a"), "{text}");
        assert_eq!(crate::exit::classify(&error), crate::exit::ExitCode::Checkpoint);
        drop(first);
        assert!(lock_folder(folder).unwrap().is_some());
    }
}
