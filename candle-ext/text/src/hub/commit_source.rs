//! Sources of the commit of a revision: the Hub, a lock file, or the Hub with a record for a lock file.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use super::listing::LockContext;
use super::{HubError, HubLock, ListedFile, Listing, LockedFile, LockedRepo, RepoId};

/// Source of the commit of each revision.
pub(super) enum CommitSource {
    /// The Hub, or the cache when offline.
    Revisions,
    /// A lock file.
    Lock(EnforcedLock),
    /// The Hub, recorded for a lock file.
    Recorder(LockRecorder),
}

/// Lock file whose commits are the only ones in use.
#[derive(Clone)]
pub(super) struct EnforcedLock {
    pub(super) lock: HubLock,
    pub(super) context: LockContext,
}

/// Record of the files in use.
pub(super) struct LockRecorder {
    /// Earlier lock, whose commits are kept.
    kept: Option<HubLock>,
    /// Files by repository, revision and commit.
    used: Mutex<BTreeMap<RecordedRevision, BTreeMap<String, LockedFile>>>,
}

/// Repository, revision and commit in a record.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct RecordedRevision {
    repo: RepoId,
    revision: String,
    commit: String,
}

impl EnforcedLock {
    /// Returns the entry of a repository, or an error that names the missing entry.
    pub(super) fn find(&self, repo: &RepoId, revision: &str) -> Result<&LockedRepo, HubError> {
        self.lock.find(repo, revision).ok_or_else(|| {
            let entry = format!("the {} {repo} at revision {revision:?}", repo.kind().name());
            self.not_locked(entry)
        })
    }

    /// Returns the entry of a file of a listing, which must have the listed size.
    pub(super) fn check(&self, listing: &Listing, listed: &ListedFile) -> Result<&LockedFile, HubError> {
        let locked = self.find(&listing.repo, &listing.revision)?;
        match locked.file(&listed.path) {
            Some(file) if file.size == listed.size => Ok(file),
            _ => {
                Err(self.not_locked(format!("{} of the {} {}", listed.path, listing.repo.kind().name(), listing.repo)))
            }
        }
    }

    /// Returns the error of a cached file that differs from its entry.
    pub(super) fn damaged(&self, repo: &RepoId, file: &LockedFile, problem: String) -> HubError {
        let LockContext { path: lock, prefetch } = self.context.clone();
        let problem = format!("{problem} in {}", lock.display());
        HubError::LockedFileDamaged { file: format!("{} of {repo}", file.path), problem, prefetch }
    }

    fn not_locked(&self, entry: String) -> HubError {
        let LockContext { path, prefetch } = self.context.clone();
        HubError::NotLocked { lock: path, entry, prefetch }
    }
}

impl LockRecorder {
    /// Creates an empty record, which keeps the commits of an earlier lock.
    pub(super) fn new(kept: Option<HubLock>) -> Self {
        Self { kept, used: Mutex::default() }
    }

    /// Returns the files in use as a lock. An earlier lock keeps its endpoint.
    pub(super) fn recorded(&self, endpoint: String) -> HubLock {
        let locked = |(of, files): (RecordedRevision, BTreeMap<String, LockedFile>)| LockedRepo {
            kind: of.repo.kind(),
            id: of.repo.id().to_owned(),
            revision: of.revision,
            commit: of.commit,
            files: files.into_values().collect(),
        };
        let endpoint = self.kept.as_ref().map_or(endpoint, |kept| kept.endpoint.clone());
        let used = self.used.lock().unwrap_or_else(PoisonError::into_inner).clone();
        HubLock::new(endpoint, used.into_iter().map(locked).collect())
    }

    /// Returns the commit of the earlier lock, or else of an earlier request: a branch that moves has one commit in the lock.
    pub(super) fn kept_commit(&self, repo: &RepoId, revision: &str) -> Option<String> {
        let of_lock = self.kept.as_ref().and_then(|kept| kept.find(repo, revision));
        let used = || {
            let used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
            used.keys().find(|of| of.repo == *repo && of.revision == revision).map(|of| of.commit.clone())
        };
        of_lock.map(|locked| locked.commit.clone()).or_else(used)
    }

    /// Returns the hash of a file in the earlier lock.
    pub(super) fn kept_hash(&self, listing: &Listing, path: &str) -> Option<String> {
        let kept = self.kept.as_ref()?.find(&listing.repo, &listing.revision)?;
        Some(kept.file(path)?.sha256.to_ascii_lowercase())
    }

    /// Checks that the file list of a locked commit has the files of the earlier lock, with their sizes.
    pub(super) fn check_list(&self, listing: &Listing) -> Result<(), HubError> {
        let Some(kept) = self.kept.as_ref().and_then(|kept| kept.find(&listing.repo, &listing.revision)) else {
            return Ok(());
        };
        let problem = kept.files.iter().find_map(|file| {
            let LockedFile { path, size, .. } = file;
            match listing.files.iter().find(|listed| listed.path == *path) {
                None => Some(format!("the file list of the commit {} lacks {path} of the lock file", kept.commit)),
                Some(listed) if listed.size != *size => {
                    Some(format!("{path} has {} bytes, but {size} in the lock file", listed.size))
                }
                Some(_) => None,
            }
        });
        match problem {
            None => Ok(()),
            Some(problem) => Err(HubError::DiffersFromLock { id: listing.repo.to_string(), problem }),
        }
    }

    /// Returns true if the file is recorded.
    pub(super) fn has(&self, listing: &Listing, path: &str) -> bool {
        let used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        used.get(&RecordedRevision::of(listing)).is_some_and(|files| files.contains_key(path))
    }

    /// Records a file.
    pub(super) fn add(&self, listing: &Listing, file: LockedFile) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        used.entry(RecordedRevision::of(listing)).or_default().insert(file.path.clone(), file);
    }
}

impl RecordedRevision {
    fn of(listing: &Listing) -> Self {
        Self { repo: listing.repo.clone(), revision: listing.revision.clone(), commit: listing.commit.clone() }
    }
}
