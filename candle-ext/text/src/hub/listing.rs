//! The files of a repository.

use serde::{Deserialize, Serialize};

use super::error::HubError;
use super::repo::RepoId;

/// The files of a repository at one commit.
pub(crate) struct Listing {
    pub(super) repo: RepoId,
    pub(super) revision: String,
    pub(super) commit: String,
    pub(super) files: Vec<ListedFile>,
    /// The cached listing: the Hub was not or could not be asked, so nothing can be fetched.
    pub(super) is_cached: bool,
}

/// One file of a listing.
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

    /// A file that is wanted is not there.
    pub(crate) fn missing_file(&self, path: &str) -> HubError {
        if self.is_cached {
            return HubError::offline(&self.repo, &self.revision, format!("{path} is not in the cache"));
        }
        HubError::FileNotFound { id: self.repo.to_string(), revision: self.revision.clone(), file: path.to_owned() }
    }

    /// The files that are there are not enough.
    pub(crate) fn unusable(&self, problem: String) -> HubError {
        if self.is_cached {
            let missing = format!("what the cache holds does not do: {problem}");
            return HubError::offline(&self.repo, &self.revision, missing);
        }
        HubError::WrongContents { id: self.repo.to_string(), problem }
    }
}
