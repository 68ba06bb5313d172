//! Models and data sets of the Hugging Face Hub, as verified local files.
//!
//! hf-hub provides repository metadata and file lists. This crate downloads the files itself: hf-hub 1.0 does not
//! check status, size or hash of a download. It also stops waiting for a lock after ten seconds. The files use the
//! standard Hugging Face cache layout.
//!
//! | module | check that hf-hub lacks |
//! |---|---|
//! | [`fetch`](fetch) | status, ETag and redirects of a file's HEAD response; least accepted download rate |
//! | [`partial_download`](partial_download) | size and SHA-256 of a file, also after a resumed download |
//! | [`retry`](retry) | limit on each wait that a server requests |
//! | [`cache`](cache) | sizes of cached files, and complete snapshots offline |

mod api;
mod cache;
mod dataset;
mod error;
mod fetch;
mod listing;
mod local;
mod model;
mod partial_download;
mod repo;
mod retry;
mod retry_after;
mod settings;
mod upload;
mod upload_client;

pub use dataset::DatasetRequest;
pub use error::HubError;
pub use fetch::{DownloadCallback, DownloadProgress};
pub use local::{LocalModel, LocalModelKind, local_model};
pub use model::{ModelAndAdapter, ModelFiles};
pub use repo::{RepoId, RepoIdError, RepoKind};
pub use settings::HubSettings;
pub use upload::{FolderUpload, RepoVisibility};

use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use api::HubApi;
use cache::HubCache;
use fetch::Downloader;
pub(crate) use listing::{ListedFile, Listing};

/// Client of the Hugging Face Hub. Threads share it by reference.
pub struct Hub {
    settings: HubSettings,
    cache: HubCache,
    /// `None` when offline.
    online: Option<(HubApi, Downloader)>,
}

/// Log filter directives that silence the Hub's libraries. [`HubError`] reports their failures.
pub const LIBRARY_LOG_FILTER: &str = "hf_hub=off,hf_xet=off,xet_client=off,xet_data=off";

/// Number of concurrent downloads.
const N_PARALLEL_DOWNLOADS: usize = 4;

impl Hub {
    /// Creates a client without sending a request.
    pub fn new(settings: HubSettings) -> Result<Self, HubError> {
        let online = match settings.offline {
            true => None,
            false => Some((HubApi::new(&settings)?, Downloader::new(&settings)?)),
        };
        Ok(Self { cache: HubCache::new(&settings.cache), settings, online })
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
        let Some((remote, _)) = &self.online else {
            return work(&self.cached(repo, revision)?);
        };
        let (commit, files) = match remote.list(repo, revision) {
            Ok(found) => found,
            Err(error) if error.is_transient() => {
                return match self.cached(repo, revision).and_then(|listing| work(&listing)) {
                    Err(HubError::Offline { .. }) => Err(error),
                    other => {
                        tracing::warn!("{repo} is loaded from the cache, because the Hub does not respond: {error}");
                        other
                    }
                };
            }
            Err(error) => return Err(error),
        };
        self.cache.set_listing(repo, &commit, &files)?;
        let listing = Listing { repo: repo.clone(), revision: revision.to_owned(), commit, files, is_cached: false };
        let done = work(&listing)?;
        self.cache.set_commit(repo, revision, &listing.commit)?;
        Ok(done)
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
        let (repo, commit) = (&listing.repo, listing.commit.as_str());
        let listed = listing.files.iter().find(|file| file.path == path).ok_or_else(|| listing.missing_file(path))?;
        let Some((_, downloader)) = self.online.as_ref().filter(|_| !listing.is_cached) else {
            return if self.cache.has(repo, commit, listed) { Ok(()) } else { Err(listing.missing_file(path)) };
        };
        if self.cache.verify_or_evict(repo, commit, listed)? {
            return Ok(());
        }
        let old = previous.filter(|old| *old != commit);
        let known = old.and_then(|old| self.cache.etag(repo, old, path));
        downloader.fetch(&self.cache, repo, commit, listed, known)
    }

    fn cached(&self, repo: &RepoId, revision: &str) -> Result<Listing, HubError> {
        let nothing = |missing: String| HubError::offline(repo, revision, missing);
        let commit = self
            .cache
            .commit_of(repo, revision)
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
        Ok(Listing { repo: repo.clone(), revision, commit, files, is_cached: true })
    }
}
