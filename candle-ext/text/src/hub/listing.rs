//! File lists of repositories.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::error::HubError;
use super::repo::RepoId;

/// File list of a repository at one commit.
pub(crate) struct Listing {
    pub(super) repo: RepoId,
    pub(super) revision: String,
    pub(super) commit: String,
    pub(super) files: Vec<ListedFile>,
    pub(super) origin: ListingOrigin,
}

/// Origin of a file list.
pub(super) enum ListingOrigin {
    /// The Hub, from which files can be downloaded.
    Remote,
    /// The cache, because the Hub was not reachable.
    Cache,
    /// The cache, at the commit of a lock file.
    Lock(LockContext),
}

/// Names for error messages about a lock file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockContext {
    /// The lock file.
    pub path: PathBuf,
    /// Command that writes the lock file.
    pub prefetch: String,
}

/// One file of a repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ListedFile {
    pub(super) path: String,
    /// Size in bytes.
    pub(super) size: u64,
    /// SHA-256 of the contents, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) sha256: Option<String>,
}

impl Listing {
    /// Returns true if no file can be downloaded.
    pub(super) fn is_cached(&self) -> bool {
        !matches!(self.origin, ListingOrigin::Remote)
    }

    /// Returns the error for a part that the cache lacks.
    fn not_cached(&self, missing: String) -> HubError {
        match &self.origin {
            ListingOrigin::Lock(LockContext { path, prefetch }) => HubError::NotPrefetched {
                id: self.repo.to_string(),
                lock: path.clone(),
                missing,
                prefetch: prefetch.clone(),
            },
            _ => HubError::offline(&self.repo, &self.revision, missing),
        }
    }

    pub(crate) fn paths(&self) -> Vec<String> {
        self.files.iter().map(|file| file.path.clone()).collect()
    }

    pub(crate) fn has(&self, path: &str) -> bool {
        self.files.iter().any(|file| file.path == path)
    }

    /// Returns the error for a file that the repository or the cache lacks.
    pub(crate) fn missing_file(&self, path: &str) -> HubError {
        if self.is_cached() {
            return self.not_cached(format!("{path} is not in the cache"));
        }
        HubError::FileNotFound { id: self.repo.to_string(), revision: self.revision.clone(), file: path.to_owned() }
    }

    /// Returns the error for a repository or a cached copy that lacks required files.
    pub(crate) fn unusable(&self, problem: String) -> HubError {
        if self.is_cached() {
            return self.not_cached(format!("the cached copy is incomplete: {problem}"));
        }
        HubError::WrongContents { id: self.repo.to_string(), problem }
    }
}
