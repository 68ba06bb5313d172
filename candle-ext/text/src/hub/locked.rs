//! The Hub client's use of lock files: recording, verification, copies.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::cache::HubCache;
use super::commit_source::{CommitSource, EnforcedLock, LockRecorder};
use super::listing::LockContext;
use super::partial_download::hex;
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
            let problem = fault_of(&self.cache.pointer(id, &repo.commit, &file.path), file)?;
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
        let mut sha256 = sha256_of(&pointer).map_err(|error| HubError::cache(&pointer, error))?;
        if expected().is_some_and(|expected| expected != sha256) && self.online.is_some() {
            tracing::warn!("cached {} of {} is damaged: removed", listed.path, listing.repo);
            let blob = fs::canonicalize(&pointer).map_err(|error| HubError::cache(&pointer, error))?;
            fs::remove_file(&blob).map_err(|error| HubError::cache(&blob, error))?;
            fetch()?;
            sha256 = sha256_of(&pointer).map_err(|error| HubError::cache(&pointer, error))?;
        }
        if let Some(expected) = expected().filter(|expected| *expected != sha256) {
            let problem = format!("its sha256 is {sha256}, expected {expected}");
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

/// Returns the difference between a file on disk and its entry, if there is one.
fn fault_of(path: &Path, file: &LockedFile) -> Option<String> {
    let size = match fs::metadata(path) {
        Ok(found) => found.len(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Some("it is not in the cache".to_owned()),
        Err(error) => return Some(error.to_string()),
    };
    if size != file.size {
        return Some(format!("it has {size} bytes, expected {}", file.size));
    }
    match sha256_of(path) {
        Ok(sha256) if sha256 == file.sha256 => None,
        Ok(sha256) => Some(format!("its sha256 is {sha256}, expected {}", file.sha256)),
        Err(error) => Some(error.to_string()),
    }
}

/// Returns the SHA-256 of a file in hexadecimal digits.
fn sha256_of(path: &Path) -> io::Result<String> {
    let (mut hasher, mut file) = (Sha256::new(), File::open(path)?);
    let mut piece = vec![0; 1 << 20];
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(hex(&hasher.finalize())),
            n => hasher.update(&piece[..n]),
        }
    }
}

fn copy_file(from: &Path, to: &Path) -> Result<(), HubError> {
    super::cache::make_parent(to)?;
    fs::copy(from, to).map(drop).map_err(|error| HubError::cache(from, error))
}
