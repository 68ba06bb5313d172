//! Use and recording of lock files: the commit of each revision, and the files that a run reads.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::cache::HubCache;
use super::partial_download::hex;
use super::{Hub, HubError, HubLock, HubSettings, ListedFile, Listing, LockedFile, LockedRepo, RepoId};

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

/// Names for error messages about a lock file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockContext {
    /// The lock file.
    pub path: PathBuf,
    /// Command that writes the lock file.
    pub prefetch: String,
}

impl LockContext {
    /// Reads the lock file, and returns a client that uses only its commits.
    pub fn locked_hub(&self, settings: HubSettings) -> Result<Hub, HubError> {
        let lock = HubLock::read(&self.path)?;
        Ok(Hub::new(HubSettings { offline: true, ..settings })?.with_lock(lock, self.clone()))
    }
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
        Self { commits: CommitSource::Recorder(LockRecorder { kept, used: Mutex::default() }), ..self }
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
        let used = self.recorder().map(|recorder| recorder.used.lock().unwrap_or_else(PoisonError::into_inner).clone());
        let locked = |(of, files): (RecordedRevision, BTreeMap<String, LockedFile>)| LockedRepo {
            kind: of.repo.kind(),
            id: of.repo.id().to_owned(),
            revision: of.revision,
            commit: of.commit,
            files: files.into_values().collect(),
        };
        let kept = self.recorder().and_then(|recorder| recorder.kept.as_ref());
        let endpoint = kept.map_or_else(|| self.settings.redact(&self.settings.endpoint), |kept| kept.endpoint.clone());
        HubLock::new(endpoint, used.unwrap_or_default().into_iter().map(locked).collect())
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

impl EnforcedLock {
    /// Returns the entry of a repository, or an error that names the missing entry.
    pub(super) fn find(&self, repo: &RepoId, revision: &str) -> Result<&LockedRepo, HubError> {
        self.lock.find(repo, revision).ok_or_else(|| {
            let entry = format!("the {} {repo} at revision {revision:?}", repo.kind().name());
            self.not_locked(entry)
        })
    }

    /// Checks that the lock has a file of a listing, with the listed size.
    pub(super) fn check(&self, listing: &Listing, listed: &ListedFile) -> Result<(), HubError> {
        let locked = self.find(&listing.repo, &listing.revision)?;
        match locked.file(&listed.path) {
            Some(file) if file.size == listed.size => Ok(()),
            _ => {
                Err(self.not_locked(format!("{} of the {} {}", listed.path, listing.repo.kind().name(), listing.repo)))
            }
        }
    }

    fn not_locked(&self, entry: String) -> HubError {
        let LockContext { path, prefetch } = self.context.clone();
        HubError::NotLocked { lock: path, entry, prefetch }
    }
}

impl LockRecorder {
    /// Returns the commit of the earlier lock, or else of an earlier request: a branch that moves has one commit in the lock.
    pub(super) fn kept_commit(&self, repo: &RepoId, revision: &str) -> Option<String> {
        let of_lock = self.kept.as_ref().and_then(|kept| kept.find(repo, revision));
        let used = || {
            let used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
            used.keys().find(|of| of.repo == *repo && of.revision == revision).map(|of| of.commit.clone())
        };
        of_lock.map(|locked| locked.commit.clone()).or_else(used)
    }

    fn kept_hash(&self, listing: &Listing, path: &str) -> Option<String> {
        let kept = self.kept.as_ref()?.find(&listing.repo, &listing.revision)?;
        kept.file(path).filter(|_| kept.commit == listing.commit).map(|file| file.sha256.clone())
    }

    fn has(&self, listing: &Listing, path: &str) -> bool {
        let used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        used.get(&RecordedRevision::of(listing)).is_some_and(|files| files.contains_key(path))
    }

    fn add(&self, listing: &Listing, file: LockedFile) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        used.entry(RecordedRevision::of(listing)).or_default().insert(file.path.clone(), file);
    }
}

impl RecordedRevision {
    fn of(listing: &Listing) -> Self {
        Self { repo: listing.repo.clone(), revision: listing.revision.clone(), commit: listing.commit.clone() }
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
pub(super) fn sha256_of(path: &Path) -> io::Result<String> {
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
