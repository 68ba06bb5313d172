//! Lock files: the commits of Hub repositories and the hashes of their files, as `prefetch` writes them.

use std::io::Write;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::cache::{is_commit, is_inside};
use super::{HubError, RepoId, RepoKind};
use crate::files::{MAX_GENERATED_FILE_BYTES, read_regular_file, without_bom, write_atomically};

/// Version of the format.
const VERSION: u32 = 1;

/// Commits and files of Hub repositories, for runs that must not change with the Hub.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HubLock {
    version: u32,
    /// URL of the Hub that the files come from.
    pub endpoint: String,
    /// The repositories, each at one revision.
    pub repositories: Vec<LockedRepo>,
}

/// Repository at one commit, with the files that are used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LockedRepo {
    /// Kind of the repository.
    #[serde(rename = "type")]
    pub kind: RepoKind,
    /// `owner/name`.
    pub id: String,
    /// Branch, tag or commit as requested.
    pub revision: String,
    /// Commit of the revision at the time of the download.
    pub commit: String,
    /// Files, sorted by path.
    pub files: Vec<LockedFile>,
}

/// File of a locked repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LockedFile {
    /// Path in the repository.
    pub path: String,
    /// Size in bytes.
    pub size: u64,
    /// SHA-256 of the contents, in hexadecimal digits.
    pub sha256: String,
}

impl HubLock {
    /// Creates a lock. Sorts the repositories by kind, id and revision.
    pub(super) fn new(endpoint: String, mut repositories: Vec<LockedRepo>) -> Self {
        repositories.sort_by(|a, b| a.key().cmp(&b.key()));
        Self { version: VERSION, endpoint, repositories }
    }

    /// Reads and checks a lock file.
    pub fn read(path: &Path) -> Result<Self, HubError> {
        let invalid = |problem: String| HubError::InvalidLock { path: path.to_owned(), problem };
        let bytes = read_regular_file(path, MAX_GENERATED_FILE_BYTES).map_err(|error| invalid(error.to_string()))?;
        let lock: Self = serde_json::from_slice(without_bom(&bytes)).map_err(|error| invalid(error.to_string()))?;
        match lock.problem() {
            None => Ok(lock),
            Some(problem) => Err(invalid(problem)),
        }
    }

    /// Writes the lock file.
    pub fn write(&self, path: &Path) -> Result<(), HubError> {
        let text = serde_json::to_string_pretty(self).expect("texts and numbers are JSON") + "\n";
        let written = write_atomically(path, |file| file.write_all(text.as_bytes()));
        written.map_err(|source| HubError::WriteLock { path: path.to_owned(), source })
    }

    /// Returns the repository with this kind, id and revision.
    pub fn find(&self, repo: &RepoId, revision: &str) -> Option<&LockedRepo> {
        self.repositories.iter().find(|locked| locked.key() == (repo.kind(), repo.id(), revision))
    }

    /// Returns the number of files.
    pub fn n_files(&self) -> usize {
        self.repositories.iter().map(|repo| repo.files.len()).sum()
    }

    /// Returns the bytes of all files.
    pub fn n_bytes(&self) -> u64 {
        self.repositories.iter().flat_map(|repo| &repo.files).map(|file| file.size).sum()
    }

    /// Returns the reason why the contents cannot be used, with the repository.
    fn problem(&self) -> Option<String> {
        if self.version != VERSION {
            return Some(format!("its version is {}, and this program reads version {VERSION}", self.version));
        }
        self.repositories.iter().find_map(|repo| Some(format!("{}: {}", repo.id, repo.problem()?)))
    }
}

impl LockedRepo {
    /// Returns the validated id.
    pub fn repo_id(&self) -> Result<RepoId, HubError> {
        Ok(RepoId::parse(self.kind, &self.id)?)
    }

    /// Returns the file at `path`.
    pub fn file(&self, path: &str) -> Option<&LockedFile> {
        self.files.iter().find(|file| file.path == path)
    }

    fn key(&self) -> (RepoKind, &str, &str) {
        (self.kind, &self.id, &self.revision)
    }

    fn problem(&self) -> Option<String> {
        if let Err(error) = self.repo_id() {
            return Some(format!("failed to {error}"));
        }
        if !is_commit(&self.commit) {
            return Some(format!("{:?} is no commit", self.commit));
        }
        if !is_inside(&self.revision) {
            return Some(format!("{:?} is no revision", self.revision));
        }
        let is_hash = |text: &str| text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit());
        let wrong = self.files.iter().find(|file| !is_inside(&file.path) || !is_hash(&file.sha256))?;
        Some(format!("the entry of the file {:?} has a path outside of the repository, or no SHA-256", wrong.path))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn lock() -> HubLock {
        let file = LockedFile { path: "config.json".into(), size: 2, sha256: "0".repeat(64) };
        let repo = |id: &str| LockedRepo {
            kind: RepoKind::Model,
            id: id.into(),
            revision: "main".into(),
            commit: "1".repeat(40),
            files: vec![file.clone()],
        };
        HubLock::new("http://hub".into(), vec![repo("b/b"), repo("a/a")])
    }

    #[track_caller]
    fn refused(lock: &HubLock, want: &str) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("r.yaml.lock");
        lock.write(&path).unwrap();
        let error = HubLock::read(&path).unwrap_err().to_string();
        assert!(error.contains(want) && error.contains("r.yaml.lock"), "{want:?} is not in {error:?}");
    }

    #[test]
    fn a_lock_file_is_read_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("r.yaml.lock");
        lock().write(&path).unwrap();
        let read = HubLock::read(&path).unwrap();
        assert_eq!(read, lock());
        assert_eq!((read.n_files(), read.n_bytes()), (2, 4));
        assert_eq!(read.repositories[0].id, "a/a");
        let repo = RepoId::parse(RepoKind::Model, "b/b").unwrap();
        assert!(read.find(&repo, "main").is_some() && read.find(&repo, "v2").is_none());
    }

    #[test]
    fn a_lock_file_that_leaves_the_cache_is_refused() {
        let with = |change: fn(&mut LockedRepo)| {
            let mut lock = lock();
            change(&mut lock.repositories[0]);
            lock
        };
        refused(&with(|repo| repo.id = "../../etc".into()), "no such folder");
        refused(&with(|repo| repo.commit = "..".into()), "\"..\" is no commit");
        refused(&with(|repo| repo.revision = "../x".into()), "\"../x\" is no revision");
        refused(&with(|repo| repo.files[0].path = "../../x".into()), "a path outside of the repository");
        refused(&with(|repo| repo.files[0].sha256 = "12".into()), "no SHA-256");
        refused(&HubLock { version: 2, ..lock() }, "version is 2");
    }

    #[test]
    fn an_unreadable_lock_file_is_refused_with_its_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("r.yaml.lock");
        std::fs::write(&path, "{\"version\": 1,\n  \"endpoint\": 3}").unwrap();
        let error = HubLock::read(&path).unwrap_err().to_string();
        assert!(error.contains("line 2"), "{error}");
    }
}
