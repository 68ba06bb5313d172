//! File lists of repositories.

use serde::{Deserialize, Serialize};

use super::error::HubError;
use super::repo::RepoId;

/// File list of a repository at one commit.
pub(crate) struct Listing {
    pub(super) repo: RepoId,
    pub(super) revision: String,
    pub(super) commit: String,
    pub(super) files: Vec<ListedFile>,
    /// True for the cached list. The Hub was not reachable, so no file can be downloaded.
    pub(super) is_cached: bool,
}

/// One file of a repository: path and size in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ListedFile {
    pub(super) path: String,
    pub(super) size: u64,
}

impl Listing {
    pub(crate) fn paths(&self) -> Vec<String> {
        self.files.iter().map(|file| file.path.clone()).collect()
    }

    pub(crate) fn has(&self, path: &str) -> bool {
        self.files.iter().any(|file| file.path == path)
    }

    /// Returns the error for a file that the repository or the cache lacks.
    pub(crate) fn missing_file(&self, path: &str) -> HubError {
        if self.is_cached {
            return HubError::offline(&self.repo, &self.revision, format!("{path} is not in the cache"));
        }
        HubError::FileNotFound { id: self.repo.to_string(), revision: self.revision.clone(), file: path.to_owned() }
    }

    /// Returns the error for a repository or a cached copy that lacks required files.
    pub(crate) fn unusable(&self, problem: String) -> HubError {
        if self.is_cached {
            let missing = format!("the cached copy is incomplete: {problem}");
            return HubError::offline(&self.repo, &self.revision, missing);
        }
        HubError::WrongContents { id: self.repo.to_string(), problem }
    }
}
