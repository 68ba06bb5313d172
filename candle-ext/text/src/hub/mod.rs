//! Models and data sets of the Hugging Face Hub, as verified local files.
//!
//! This crate sends its own requests. hf-hub 1.0 does not check status, size or hash of a download, and stops waiting for
//! a lock after ten seconds. Its file lists have no limit, and its token follows them to other hosts. The files use the
//! standard Hugging Face cache layout.
//!
//! | module | check that hf-hub lacks |
//! |---|---|
//! | [`api`](api) | limits of answers, the requested commit, no token to other hosts |
//! | [`fetch`](fetch) | status, ETag and redirects of a file's HEAD response; least accepted download rate |
//! | [`partial_download`](partial_download) | size and SHA-256 of a file, also after a resumed download |
//! | [`retry`](retry) | limit on each wait that a server requests |
//! | [`cache`](cache) | sizes of cached files, complete snapshots offline, no writes through links |
//! | [`verified_files`](verified_files) | SHA-256 of locked files |

mod api;
mod cache;
mod commit_source;
mod dataset;
mod error;
mod fetch;
mod listing;
mod local;
mod lock_file;
mod locked;
mod model;
mod partial_download;
mod repo;
mod retry;
mod retry_after;
mod settings;
mod upload;
mod upload_client;
mod verified_files;

pub use dataset::DatasetRequest;
pub use error::HubError;
pub use fetch::{DownloadCallback, DownloadProgress};
pub use listing::LockContext;
pub use local::{LocalModel, LocalModelKind, local_model};
pub use lock_file::{HubLock, LockedFile, LockedRepo};
pub use locked::LockFault;
pub use model::{ModelAndAdapter, ModelFiles};
pub use repo::{RepoId, RepoIdError, RepoKind};
pub use settings::HubSettings;
pub use upload::{FolderUpload, RepoVisibility};

use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use api::HubApi;
use cache::{HubCache, is_commit};
use commit_source::{CommitSource, EnforcedLock};
use fetch::Downloader;
use listing::ListingOrigin;
pub(crate) use listing::{ListedFile, Listing};

/// Client of the Hugging Face Hub. Threads share it by reference.
pub struct Hub {
    settings: HubSettings,
    cache: HubCache,
    /// `None` when offline.
    online: Option<(HubApi, Downloader)>,
    commits: CommitSource,
}

/// Number of concurrent downloads.
const N_PARALLEL_DOWNLOADS: usize = 4;

impl Hub {
    /// Creates a client without sending a request.
    pub fn new(settings: HubSettings) -> Result<Self, HubError> {
        let online = match settings.offline {
            true => None,
            false => Some((HubApi::new(&settings)?, Downloader::new(&settings)?)),
        };
        Ok(Self { cache: HubCache::new(&settings.cache), settings, online, commits: CommitSource::Revisions })
    }

    /// Sets a callback for download progress.
    #[must_use]
    pub fn with_progress(mut self, on_progress: DownloadCallback) -> Self {
        if let Some((_, downloader)) = &mut self.online {
            downloader.on_progress = Some(on_progress);
        }
        self
    }

    /// Returns the settings.
    pub fn settings(&self) -> &HubSettings {
        &self.settings
    }

    /// Calls `work` with the file list of `repo`.
    ///
    /// Uses the cached list when offline, or when the Hub does not respond and the cache has all files that `work`
    /// needs.
    pub(crate) fn with_listing<T>(
        &self,
        repo: &RepoId,
        revision: &str,
        work: impl Fn(&Listing) -> Result<T, HubError>,
    ) -> Result<T, HubError> {
        if let CommitSource::Lock(enforced) = &self.commits {
            return work(&self.locked(enforced, repo, revision)?);
        }
        let kept = self.recorder().and_then(|recorder| recorder.kept_commit(repo, revision));
        let work = |listing: &Listing| {
            self.recorder().map_or(Ok(()), |recorder| recorder.check_list(listing))?;
            work(listing)
        };
        let Some((remote, _)) = &self.online else {
            return work(&self.cached(repo, revision, kept.as_deref())?);
        };
        let (commit, files) = match self.list(remote, repo, kept.as_deref().unwrap_or(revision)) {
            Ok(found) => found,
            Err(error) if error.is_transient() && self.recorder().is_none() => {
                return match self.cached(repo, revision, None).and_then(|listing| work(&listing)) {
                    Err(HubError::Offline { .. }) => Err(error),
                    other => {
                        tracing::warn!("{repo} is loaded from the cache, because the Hub does not respond: {error}");
                        other
                    }
                };
            }
            Err(HubError::RevisionNotFound { id, revision }) if kept.is_some() => {
                return Err(HubError::LockedCommitNotFound { id, commit: revision });
            }
            Err(error) => return Err(error),
        };
        self.cache.set_listing(repo, &commit, &files)?;
        let (revision, origin) = (revision.to_owned(), ListingOrigin::Remote);
        let listing = Listing { repo: repo.clone(), revision, commit, files, origin };
        let done = work(&listing)?;
        // An old commit of a lock does not replace a newer one in the cache.
        if kept.is_none() || self.cache.commit_of(repo, &listing.revision).is_none() {
            self.cache.set_commit(repo, &listing.revision, &listing.commit)?;
        }
        Ok(done)
    }

    /// Returns the commit of `revision` and its files. The list of a commit never changes, so a recorder uses the cached
    /// one.
    fn list(&self, remote: &HubApi, repo: &RepoId, revision: &str) -> Result<(String, Vec<ListedFile>), HubError> {
        let is_fixed = is_commit(revision) && self.recorder().is_some();
        match self.cache.listing(repo, revision).filter(|_| is_fixed) {
            Some(files) => Ok((revision.to_owned(), files)),
            None => remote.list(repo, revision),
        }
    }

    /// Downloads `paths` concurrently and returns their local paths in the same order.
    pub(crate) fn fetch(&self, listing: &Listing, paths: &[String]) -> Result<Vec<PathBuf>, HubError> {
        let (next, failed) = (AtomicUsize::new(0), OnceLock::new());
        let previous = self.cache.commit_of(&listing.repo, &listing.revision);
        std::thread::scope(|scope| {
            for _ in 0..N_PARALLEL_DOWNLOADS.min(paths.len()) {
                scope.spawn(|| {
                    while let Some(path) = paths.get(next.fetch_add(1, Ordering::Relaxed)) {
                        if let Err(error) = self.fetch_one(listing, path, previous.as_deref()) {
                            next.store(paths.len(), Ordering::Relaxed);
                            let _ = failed.set(error);
                        }
                    }
                });
            }
        });
        if let Some(error) = failed.into_inner() {
            return Err(error);
        }
        let pointer = |path: &String| self.cache.pointer(&listing.repo, &listing.commit, path);
        Ok(paths.iter().map(pointer).collect())
    }

    fn fetch_one(&self, listing: &Listing, path: &str, previous: Option<&str>) -> Result<(), HubError> {
        let listed = listing.files.iter().find(|file| file.path == path).ok_or_else(|| listing.missing_file(path))?;
        match &self.commits {
            CommitSource::Revisions => self.fetch_file(listing, listed, previous),
            CommitSource::Lock(enforced) => {
                let file = enforced.check(listing, listed)?;
                self.fetch_file(listing, listed, previous)?;
                match self.cache.locked_file_fault(&listing.repo, &listing.commit, file) {
                    None => Ok(()),
                    Some(problem) => Err(enforced.damaged(&listing.repo, file, problem)),
                }
            }
            CommitSource::Recorder(recorder) => {
                self.fetch_and_record(recorder, listing, listed, || self.fetch_file(listing, listed, previous))
            }
        }
    }

    fn fetch_file(&self, listing: &Listing, listed: &ListedFile, previous: Option<&str>) -> Result<(), HubError> {
        let (repo, commit, path) = (&listing.repo, listing.commit.as_str(), listed.path.as_str());
        let Some((_, downloader)) = self.online.as_ref().filter(|_| !listing.is_cached()) else {
            return if self.cache.has(repo, commit, listed) { Ok(()) } else { Err(listing.missing_file(path)) };
        };
        if self.cache.verify_or_evict(repo, commit, listed)? {
            return Ok(());
        }
        let old = previous.filter(|old| *old != commit);
        let known = old.and_then(|old| self.cache.etag(repo, old, path));
        downloader.fetch(&self.cache, repo, commit, listed, known)
    }

    /// Returns the file list of a locked commit: the cached one, else that of the lock.
    fn locked(&self, enforced: &EnforcedLock, repo: &RepoId, revision: &str) -> Result<Listing, HubError> {
        let locked = enforced.find(repo, revision)?;
        let listed = |file: &LockedFile| ListedFile {
            path: file.path.clone(),
            size: file.size,
            sha256: Some(file.sha256.to_ascii_lowercase()),
        };
        let of_lock = || locked.files.iter().map(listed).collect();
        Ok(Listing {
            repo: repo.clone(),
            revision: revision.to_owned(),
            commit: locked.commit.clone(),
            files: self.cache.listing(repo, &locked.commit).unwrap_or_else(of_lock),
            origin: ListingOrigin::Lock(enforced.context.clone()),
        })
    }

    /// Returns true if the lock in use has the repository at the branch `main`.
    fn is_locked(&self, repo: &RepoId) -> bool {
        self.lock().is_some_and(|(lock, _)| lock.find(repo, "main").is_some())
    }

    /// Returns the file list of a cached revision, at the commit `kept` if there is one.
    fn cached(&self, repo: &RepoId, revision: &str, kept: Option<&str>) -> Result<Listing, HubError> {
        let nothing = |missing: String| HubError::offline(repo, revision, missing);
        let commit = self
            .cache
            .commit_of(repo, kept.unwrap_or(revision))
            .ok_or_else(|| nothing(format!("the cache has no files of revision {revision:?}")))?;
        // Other tools store no file list. Their cached files count as complete.
        let files = match self.cache.listing(repo, &commit) {
            Some(files) => files,
            None => self.cache.files(repo, &commit)?,
        };
        if files.is_empty() {
            return Err(nothing(format!("the cache has no files of revision {revision:?}")));
        }
        let revision = revision.to_owned();
        Ok(Listing { repo: repo.clone(), revision, commit, files, origin: ListingOrigin::Cache })
    }
}
