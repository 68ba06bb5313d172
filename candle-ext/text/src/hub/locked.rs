//! The Hub client's use of lock files: recording, verification, copies.

use std::fs;
use std::path::Path;

use rayon::prelude::*;

use super::cache::HubCache;
use super::commit_source::{CommitSource, EnforcedLock, LockRecorder};
use super::listing::LockContext;
use super::{Hub, HubError, HubLock, HubSettings, ListedFile, Listing, LockedFile, LockedRepo, RepoId};

impl LockContext {
    /// Reads the lock file, and returns a client that uses only its commits.
    pub fn locked_hub(&self, settings: HubSettings) -> Result<Hub, HubError> {
        let lock = HubLock::read(&self.path)?;
        Ok(Hub::new(HubSettings { offline: true, ..settings })?.with_lock(lock, self.clone()))
    }
}

/// Fault of a locked file in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockFault {
    /// Repository.
    pub id: String,
    /// File path in the repository.
    pub file: String,
    /// The problem, as a clause.
    pub problem: String,
}

impl Hub {
    /// Uses only the commits and files of `lock`, from the cache. Sends no request.
    #[must_use]
    pub fn with_lock(self, lock: HubLock, context: LockContext) -> Self {
        Self { online: None, commits: CommitSource::Lock(EnforcedLock { lock, context }), ..self }
    }

    /// Returns a client of the same cache and lock that sends no request.
    #[must_use]
    pub fn cached_only(&self) -> Self {
        let commits = match &self.commits {
            CommitSource::Lock(enforced) => CommitSource::Lock(enforced.clone()),
            _ => CommitSource::Revisions,
        };
        Self { settings: self.settings.clone(), cache: HubCache::new(&self.settings.cache), online: None, commits }
    }

    /// Records the files in use, and verifies their hashes. Keeps the commits of `kept`; other revisions are resolved.
    #[must_use]
    pub fn with_recorder(self, kept: Option<HubLock>) -> Self {
        Self { commits: CommitSource::Recorder(LockRecorder::new(kept)), ..self }
    }

    /// Returns the lock in use and its names.
    pub fn lock(&self) -> Option<(&HubLock, &LockContext)> {
        match &self.commits {
            CommitSource::Lock(enforced) => Some((&enforced.lock, &enforced.context)),
            _ => None,
        }
    }

    /// Returns the files that were used since [`Hub::with_recorder`].
    pub fn recorded(&self) -> HubLock {
        let endpoint = self.settings.redact(&self.settings.endpoint);
        match self.recorder() {
            Some(recorder) => recorder.recorded(endpoint),
            None => HubLock::new(endpoint, Vec::new()),
        }
    }

    /// Checks size and SHA-256 of every locked file in the cache.
    pub fn verify(&self, lock: &HubLock) -> Result<Vec<LockFault>, HubError> {
        let repos =
            lock.repositories.iter().map(|repo| Ok((repo.repo_id()?, repo))).collect::<Result<Vec<_>, HubError>>()?;
        let files: Vec<_> =
            repos.iter().flat_map(|(id, repo)| repo.files.iter().map(move |file| (id, *repo, file))).collect();
        let fault = |(id, repo, file): &(&RepoId, &LockedRepo, &LockedFile)| {
            let problem = self.cache.fault(id, &repo.commit, file)?;
            Some(LockFault { id: repo.id.clone(), file: file.path.clone(), problem })
        };
        Ok(files.par_iter().filter_map(fault).collect())
    }

    /// Copies the locked files into another cache folder, as regular files, and makes the revisions point to them.
    pub fn copy_locked(&self, lock: &HubLock, folder: &Path) -> Result<(), HubError> {
        let to = HubCache::new(folder);
        for locked in &lock.repositories {
            let repo = locked.repo_id()?;
            for file in &locked.files {
                let pointers = [&self.cache, &to].map(|cache| cache.pointer(&repo, &locked.commit, &file.path));
                copy_file(&pointers[0], &pointers[1])?;
            }
            to.set_commit(&repo, &locked.revision, &locked.commit)?;
            if let Some(files) = self.cache.listing(&repo, &locked.commit) {
                to.set_listing(&repo, &locked.commit, &files)?;
            }
        }
        Ok(())
    }

    pub(super) fn recorder(&self) -> Option<&LockRecorder> {
        match &self.commits {
            CommitSource::Recorder(recorder) => Some(recorder),
            _ => None,
        }
    }

    /// Makes a file available with `fetch`, verifies its contents, and records it. A damaged file is removed and
    /// fetched once more.
    pub(super) fn fetch_and_record(
        &self,
        recorder: &LockRecorder,
        listing: &Listing,
        listed: &ListedFile,
        fetch: impl Fn() -> Result<(), HubError>,
    ) -> Result<(), HubError> {
        if recorder.has(listing, &listed.path) {
            return Ok(());
        }
        let pointer = self.cache.pointer(&listing.repo, &listing.commit, &listed.path);
        let expected = || recorder.kept_hash(listing, &listed.path).or_else(|| self.announced_hash(&pointer));
        fetch()?;
        let hashed = || {
            let sha256 = self.cache.hashed(&listing.repo, &listing.commit, listed);
            sha256.map_err(|error| HubError::cache(&pointer, error))
        };
        let mut sha256 = hashed()?;
        if expected().is_some_and(|expected| expected != sha256) && self.online.is_some() {
            tracing::warn!("cached {} of {} is damaged: removed", listed.path, listing.repo);
            self.cache.evict(&listing.repo, &listing.commit, &listed.path)?;
            fetch()?;
            sha256 = hashed()?;
        }
        if let Some(expected) = expected().filter(|expected| *expected != sha256) {
            let problem = format!("its sha256 is {sha256}, expected {expected}");
            if recorder.kept_hash(listing, &listed.path).is_some() {
                let problem = format!("{} differs from the lock file: {problem}", listed.path);
                return Err(HubError::DiffersFromLock { id: listing.repo.to_string(), problem });
            }
            return Err(HubError::CorruptDownload { id: listing.repo.to_string(), file: listed.path.clone(), problem });
        }
        recorder.add(listing, LockedFile { path: listed.path.clone(), size: listed.size, sha256 });
        Ok(())
    }

    /// Returns the SHA-256 that is the name of a large file's blob.
    fn announced_hash(&self, pointer: &Path) -> Option<String> {
        let blob = fs::canonicalize(pointer).ok()?;
        let is_blob = blob.parent()?.file_name()? == "blobs";
        let name = blob.file_name()?.to_str()?;
        let is_hash = name.len() == 64 && name.bytes().all(|b| b.is_ascii_hexdigit());
        (is_blob && is_hash).then(|| name.to_owned())
    }
}

fn copy_file(from: &Path, to: &Path) -> Result<(), HubError> {
    super::cache::make_parent(to)?;
    fs::copy(from, to).map(drop).map_err(|error| HubError::cache(from, error))
}
