//! Atomic replacement of a folder: written under a temporary name, flushed to disk, then renamed.

use std::{
    ffi::OsStr,
    fs::{self, File},
    path::{Path, PathBuf},
};

use super::folder_lock::FolderLock;
use super::unfinished::{UNFINISHED_MARKER, mark_unfinished, remove_unfinished, unmark_finished};
use crate::ModelError;

/// A temporary folder. If it is dropped before [`StagingFolder::commit`], it is deleted and the target stays unchanged. It
/// locks the target.
#[derive(Debug)]
pub struct StagingFolder {
    folder: PathBuf,
    target: PathBuf,
    _lock: FolderLock,
}

impl StagingFolder {
    /// Creates the temporary folder for `target`. An existing target must be empty, or a model or adapter folder.
    ///
    /// # Errors
    /// If another process writes `target`, or it has other contents.
    pub fn begin(target: &Path) -> Result<Self, ModelError> {
        Self::create(target, refuse_foreign)
    }

    /// Creates the temporary folder for `target`, which must be empty or missing.
    ///
    /// # Errors
    /// If another process writes `target`, or it has contents.
    pub fn begin_new(target: &Path) -> Result<Self, ModelError> {
        Self::create(target, require_empty)
    }

    fn create(target: &Path, check: fn(&Path) -> Result<(), ModelError>) -> Result<Self, ModelError> {
        let target = fs::canonicalize(target).unwrap_or_else(|_| target.to_path_buf());
        let parent = parent(&target);
        fs::create_dir_all(&parent).map_err(ModelError::io("create", &parent))?;
        let lock = FolderLock::take(sibling(&target, "lock"), &target)?;
        recover(&target)?;
        check(&target)?;
        let staging = Self { folder: sibling(&target, "tmp"), target, _lock: lock };
        // An unrelated folder of this name is an error now, before the weights are written.
        remove(&sibling(&staging.target, "old"))?;
        remove(&staging.folder)?;
        fs::create_dir(&staging.folder).map_err(ModelError::io("create", &staging.folder))?;
        mark_unfinished(&staging.folder).map_err(ModelError::io("mark", &staging.folder))?;
        Ok(staging)
    }

    /// Returns the temporary folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Renames the folder to `<target>.failed`, or `.failed.2` and so on, and returns that path. The target stays
    /// unchanged.
    pub fn keep_as_failed(self) -> Result<PathBuf, ModelError> {
        let name = self.target.file_name().unwrap_or(OsStr::new("model")).to_string_lossy().into_owned();
        let numbered = (2..).map(|i| format!("{name}.failed.{i}"));
        let mut names = std::iter::once(format!("{name}.failed")).chain(numbered);
        let unused = names.find_map(|name| Some(parent(&self.target).join(name)).filter(|path| !path.exists()));
        let failed = unused.expect("the names never end");
        fs::rename(&self.folder, &failed).map_err(ModelError::io("rename to", &failed))?;
        unmark_finished(&failed).map_err(ModelError::io("finish", &failed))?;
        Ok(failed)
    }

    /// Flushes all files to disk and renames the folder to the target. Logs and other files of the old folder are moved
    /// into the new one.
    pub fn commit(self) -> Result<(), ModelError> {
        flush(&self.folder)?;
        let old = sibling(&self.target, "old");
        remove(&old)?;
        let replaces = self.target.exists();
        if replaces {
            mark_unfinished(&self.target).map_err(ModelError::io("mark", &self.target))?;
            fs::rename(&self.target, &old).map_err(ModelError::io("replace", &self.target))?;
        }
        if let Err(error) = fs::rename(&self.folder, &self.target) {
            if replaces {
                restore(&old, &self.target)?;
            }
            return Err(ModelError::io("rename to", &self.target)(error));
        }
        unmark_finished(&self.target).map_err(ModelError::io("finish", &self.target))?;
        if replaces {
            keep_foreign_files(&old, &self.target)?;
            remove(&old)?;
        }
        sync(&parent(&self.target))
    }
}

impl Drop for StagingFolder {
    fn drop(&mut self) {
        // After a commit this name no longer exists.
        let _ = remove_unfinished(&self.folder);
    }
}

/// Rejects an output folder that holds a model, a run's output or other files.
///
/// # Errors
/// If the path is a file or a folder with contents.
fn require_empty(folder: &Path) -> Result<(), ModelError> {
    let refuse =
        |problem: &str| Err(ModelError::OutputPath { path: folder.to_path_buf(), problem: problem.to_owned() });
    match fs::read_dir(folder).map(|mut entries| entries.next().is_none()) {
        Ok(true) => Ok(()),
        Ok(false) => refuse("the folder is not empty; name a new one"),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotADirectory => refuse("it is a file; name a new folder"),
        Err(error) => Err(ModelError::io("read", folder)(error)),
    }
}

fn parent(target: &Path) -> PathBuf {
    match target.parent() {
        Some(parent) if parent != Path::new("") => parent.to_path_buf(),
        _ => PathBuf::from("."),
    }
}

fn sibling(target: &Path, role: &str) -> PathBuf {
    let name = target.file_name().unwrap_or(OsStr::new("model")).to_string_lossy();
    parent(target).join(format!(".{name}.{role}"))
}

/// Completes or reverts a commit whose process was killed.
fn recover(target: &Path) -> Result<(), ModelError> {
    let old = sibling(target, "old");
    match (old.join(UNFINISHED_MARKER).is_file(), target.exists()) {
        (true, false) => restore(&old, target)?,
        (true, true) => keep_foreign_files(&old, target)?,
        (false, _) => {}
    }
    // A folder with the final name is whole: the marker is removed after the rename.
    match target.is_dir() {
        true => unmark_finished(target).map_err(ModelError::io("finish", target)),
        false => Ok(()),
    }
}

fn restore(old: &Path, target: &Path) -> Result<(), ModelError> {
    fs::rename(old, target).and_then(|()| unmark_finished(target)).map_err(ModelError::io("restore", target))
}

fn remove(folder: &Path) -> Result<(), ModelError> {
    remove_unfinished(folder).map_err(ModelError::io("remove", folder))
}

fn refuse_foreign(target: &Path) -> Result<(), ModelError> {
    let refuse =
        |problem: &str| Err(ModelError::OutputPath { path: target.to_path_buf(), problem: problem.to_string() });
    if !target.exists() {
        return Ok(());
    }
    if !target.is_dir() {
        return refuse("it exists and is not a folder");
    }
    let ours = ["config.json", "adapter_config.json"].iter().any(|name| target.join(name).is_file());
    let empty = fs::read_dir(target).map_err(ModelError::io("read", target))?.next().is_none();
    if ours || empty { Ok(()) } else { refuse("it exists and holds other things than a model; choose another folder") }
}

fn keep_foreign_files(old: &Path, new: &Path) -> Result<(), ModelError> {
    for item in fs::read_dir(old).map_err(ModelError::io("read", old))? {
        let item = item.map_err(ModelError::io("read", old))?;
        let place = new.join(item.file_name());
        let name = item.file_name();
        if name != UNFINISHED_MARKER && !is_weights(&name.to_string_lossy()) && !place.exists() {
            fs::rename(item.path(), &place).map_err(ModelError::io("keep", &place))?;
        }
    }
    Ok(())
}

fn is_weights(name: &str) -> bool {
    ["model", "adapter_model", "pytorch_model"].iter().any(|stem| name.starts_with(stem))
}

/// Flushes a folder and all its contents to disk.
fn flush(folder: &Path) -> Result<(), ModelError> {
    for item in fs::read_dir(folder).map_err(ModelError::io("read", folder))? {
        let path = item.map_err(ModelError::io("read", folder))?.path();
        match path.is_dir() {
            true => flush(&path)?,
            false => sync(&path)?,
        }
    }
    sync(folder)
}

fn sync(path: &Path) -> Result<(), ModelError> {
    File::open(path).and_then(|file| file.sync_all()).map_err(ModelError::io("flush", path))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn write(folder: &Path, name: &str, text: &str) {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join(name), text).unwrap();
    }

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_commit_replaces_the_weights_and_keeps_the_notes() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("out");
        write(&target, "config.json", "old");
        write(&target, "model-00001-of-00002.safetensors", "old");
        write(&target, "notes.txt", "mine");
        let staging = StagingFolder::begin(&target).unwrap();
        write(staging.folder(), "config.json", "new");
        staging.commit().unwrap();
        assert_eq!(names(&target), ["config.json", "notes.txt"]);
        assert_eq!(fs::read_to_string(target.join("config.json")).unwrap(), "new");
        assert_eq!(names(root.path()), ["out"]);
    }

    #[test]
    fn an_abandoned_write_leaves_only_the_old_folder() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("out");
        write(&target, "config.json", "old");
        let staging = StagingFolder::begin(&target).unwrap();
        write(staging.folder(), "config.json", "half");
        drop(staging);
        assert_eq!(names(root.path()), ["out"]);
        assert_eq!(fs::read_to_string(target.join("config.json")).unwrap(), "old");
    }

    #[test]
    fn a_failed_write_is_kept_under_an_unused_name() {
        let root = tempfile::tempdir().unwrap();
        for wanted in ["out.failed", "out.failed.2"] {
            let staging = StagingFolder::begin(&root.path().join("out")).unwrap();
            write(staging.folder(), "config.json", "wrong");
            assert_eq!(staging.keep_as_failed().unwrap(), root.path().join(wanted));
            assert_eq!(names(&root.path().join(wanted)), ["config.json"]);
        }
        assert_eq!(names(root.path()), ["out.failed", "out.failed.2"]);
    }

    #[test]
    fn the_remains_of_a_killed_write_are_removed_or_restored() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("out");
        for (folder, name, text) in [(".out.old", "config.json", "old"), (".out.tmp", "model.safetensors", "half")] {
            write(&root.path().join(folder), name, text);
            write(&root.path().join(folder), UNFINISHED_MARKER, "");
        }
        drop(StagingFolder::begin(&target).unwrap());
        assert_eq!(names(root.path()), ["out"]);
        assert_eq!(fs::read_to_string(target.join("config.json")).unwrap(), "old");
    }

    #[test]
    fn a_commit_that_was_killed_after_the_renames_is_completed() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("out");
        write(&target, "config.json", "new");
        write(&root.path().join(".out.old"), "config.json", "old");
        write(&root.path().join(".out.old"), "notes.txt", "mine");
        for folder in ["out", ".out.old"] {
            write(&root.path().join(folder), UNFINISHED_MARKER, "");
        }
        drop(StagingFolder::begin(&target).unwrap());
        assert_eq!(names(root.path()), ["out"]);
        assert_eq!(names(&target), ["config.json", "notes.txt"]);
        assert_eq!(fs::read_to_string(target.join("config.json")).unwrap(), "new");
    }

    #[test]
    fn a_folder_that_another_process_writes_is_refused_by_name() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("out");
        // The lock file of a killed process.
        write(root.path(), ".out.lock", "");
        let first = StagingFolder::begin_new(&target).unwrap();
        write(first.folder(), "config.json", "first");
        for second in [StagingFolder::begin(&target), StagingFolder::begin_new(&target)] {
            let error = second.unwrap_err().to_string();
            assert!(error.contains("another process is writing out; wait for it"), "{error}");
        }
        assert!(StagingFolder::begin(&root.path().join("other")).is_ok());
        first.commit().unwrap();
        assert_eq!(names(root.path()), ["out"]);
        let error = StagingFolder::begin_new(&target).unwrap_err().to_string();
        assert!(error.contains("the folder is not empty"), "{error}");
        assert_eq!(names(&target), ["config.json"]);
        drop(StagingFolder::begin(&target).unwrap());
        assert_eq!(names(root.path()), ["out"]);
    }

    #[test]
    fn a_foreign_folder_with_a_temporary_name_is_refused_at_the_start() {
        for name in [".out.tmp", ".out.old"] {
            let root = tempfile::tempdir().unwrap();
            write(&root.path().join(name), "config.json", "mine");
            write(&root.path().join("out"), "config.json", "old");
            let error = StagingFolder::begin(&root.path().join("out")).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("move it away"), "{error}");
            assert_eq!(fs::read_to_string(root.path().join(name).join("config.json")).unwrap(), "mine");
        }
    }

    #[test]
    fn a_folder_with_other_things_is_not_replaced() {
        let root = tempfile::tempdir().unwrap();
        write(&root.path().join("home"), "thesis.tex", "years");
        let refused = |name: &str| StagingFolder::begin(&root.path().join(name)).unwrap_err().to_string();
        assert!(refused("home").contains("other things"));
        write(root.path(), "file", "");
        assert!(refused("file").contains("not a folder"));
        assert!(StagingFolder::begin(&root.path().join("a/b/c")).is_ok());
    }
}
