//! A folder with everything that a run reads, for a machine without a network.

use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use candlewick_runtime::exit::ExitCode;
use candlewick_text::hub::{Hub, HubLock};

/// Folder of the Hub files, for HF_HOME.
const HF_HOME: &str = "hf-home";

/// Output folder of `prefetch`.
pub(super) struct PortableFolder {
    folder: PathBuf,
}

impl PortableFolder {
    /// Creates the folder, which must be empty or missing.
    pub(super) fn create(folder: &Path) -> Result<Self> {
        let failed = || format!("failed to write {}", folder.display());
        fs::create_dir_all(folder).with_context(failed)?;
        match fs::read_dir(folder).with_context(failed)?.next() {
            None => Ok(Self { folder: folder.to_owned() }),
            Some(_) => {
                let problem = format!("{}: the folder is not empty; name another, or empty it", failed());
                Err(anyhow!(problem).context(ExitCode::Usage))
            }
        }
    }

    /// Copies the locked files, and the local paths to the same places relative to the current folder. Returns lines of
    /// the report.
    pub(super) fn fill(&self, hub: &Hub, lock: &HubLock, local: &[PathBuf]) -> Result<Vec<String>> {
        let cache = self.folder.join(HF_HOME).join("hub");
        hub.copy_locked(lock, &cache).map_err(|error| anyhow!("failed to {error}").context(ExitCode::Data))?;
        let mut report = Vec::new();
        let here = std::env::current_dir().context("failed to find the current folder")?;
        for path in local {
            match below(&here, path) {
                Some(relative) => copy(path, &self.folder.join(&relative))
                    .with_context(|| format!("failed to copy {} into {}", path.display(), self.folder.display()))?,
                None => report.push(format!(
                    "left out: {} is not below the current folder; copy it to the same path on the other machine",
                    path.display()
                )),
            }
        }
        let folder = self.folder.display();
        report.push(format!("wrote {folder}; on the other machine, change to the folder and set HF_HOME={HF_HOME}"));
        Ok(report)
    }
}

/// Returns the path relative to `here`, if it is below.
fn below(here: &Path, path: &Path) -> Option<PathBuf> {
    let relative = match path.is_absolute() {
        true => path.strip_prefix(here).ok()?,
        false => path,
    };
    let parts: PathBuf = relative.components().filter(|part| *part != Component::CurDir).collect();
    let is_below = parts.components().all(|part| matches!(part, Component::Normal(_)));
    (is_below && parts.components().next().is_some()).then_some(parts)
}

/// Copies a file or a folder. Links to files become files; links to folders inside a folder are left out.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    if !from.is_dir() {
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent)?;
        }
        return fs::copy(from, to).map(drop);
    }
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() || entry.path().is_file() {
            copy(&entry.path(), &to.join(entry.file_name()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_below_the_current_folder_keep_their_place() {
        let relative = |path: &str| below(Path::new("/project"), Path::new(path));
        for (path, want) in [("a/b", "a/b"), ("./a", "a"), ("/project/a", "a"), ("/project/a/./b", "a/b")] {
            assert_eq!(relative(path).as_deref(), Some(Path::new(want)), "{path}");
        }
        for path in ["../a", "/else/a", ".", "/project", "a/../../b"] {
            assert_eq!(relative(path), None, "{path}");
        }
    }

    #[test]
    fn a_folder_that_is_not_empty_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(PortableFolder::create(&folder.path().join("new/out")).is_ok());
        let error = PortableFolder::create(folder.path()).map(drop).unwrap_err();
        assert!(format!("{error:#}").contains("the folder is not empty"), "{error:#}");
    }
}
