//! Download of one file into the cache, verified before it becomes visible.
//!
//! A HEAD request returns ETag and size. The body is written to `<etag>.incomplete` while its bytes are counted and
//! hashed. Only a body of the announced size becomes a blob. The ETag of a large file is its SHA-256, which must
//! match too.
//!
//! A wrong body is removed and requested once more. An interrupted body is resumed while retries make progress, if a
//! SHA-256 can verify the whole file.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use reqwest::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_LENGTH, ETAG, HeaderMap, IF_NONE_MATCH, LOCATION, RANGE,
};
use reqwest::{Client, ClientBuilder, Response, StatusCode, Url};

use super::cache::{HubCache, is_inside};
use super::error::innermost;
use super::partial_download::{FileMetadata, PartialDownload};
use super::retry::{AttemptError, ErrorResponse, RequestTarget, with_retries};
use super::{HubError, HubSettings, ListedFile, RepoId};
use crate::response_body::{MIN_RATE, ResponseRate};

/// Progress of one file's download.
#[derive(Debug, Clone, Copy)]
pub struct DownloadProgress<'a> {
    /// Path of the file in its repository.
    pub file: &'a str,
    /// Bytes received.
    pub done: u64,
    /// Size of the file in bytes.
    pub total: u64,
}

/// Callback for download progress. Several threads call it after each chunk.
pub type DownloadCallback = Arc<dyn Fn(DownloadProgress) + Send + Sync>;

pub(crate) struct Downloader {
    pub(crate) on_progress: Option<DownloadCallback>,
    settings: HubSettings,
    runtime: tokio::runtime::Runtime,
    client: Client,
    /// Client without redirects. The redirect response for a large file has its ETag and size.
    unredirected: Client,
}

/// Download of one file.
struct Download<'a> {
    asked: RequestTarget<'a>,
    url: Url,
    partial: &'a Path,
    metadata: &'a FileMetadata,
}

impl Download<'_> {
    fn path(&self) -> &str {
        self.asked.file.unwrap_or_default()
    }
}

const MAX_REDIRECTS: usize = 10;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// Timeout of a response without a large body, as a multiple of [`HubSettings::read_timeout`].
pub(crate) const RESPONSE_TIMEOUT_FACTOR: u32 = 4;

impl Downloader {
    pub(crate) fn new(settings: &HubSettings) -> Result<Self, HubError> {
        let lost = |reason: String| {
            let [endpoint, reason] = [&settings.endpoint, &reason].map(|text| settings.redact(text));
            HubError::Unreachable { endpoint, reason }
        };
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| lost(e.to_string()))?;
        let redirect = reqwest::redirect::Policy::none();
        Ok(Self {
            on_progress: None,
            settings: settings.clone(),
            runtime,
            client: client(settings).build().map_err(|e| lost(innermost(&e)))?,
            unredirected: client(settings).redirect(redirect).build().map_err(|e| lost(innermost(&e)))?,
        })
    }

    /// Downloads a listed file. `known` is the ETag of an earlier version in the cache.
    pub(crate) fn fetch(
        &self,
        cache: &HubCache,
        repo: &RepoId,
        commit: &str,
        listed: &ListedFile,
        known: Option<String>,
    ) -> Result<(), HubError> {
        let asked = RequestTarget { repo, revision: commit, file: Some(&listed.path) };
        let url = self.url(repo, commit, &listed.path)?;
        let metadata = with_retries(&self.settings, &asked, || {
            let metadata = self.runtime.block_on(self.head(&url, commit, listed, known.as_deref()))?;
            compared(metadata, listed)
        })?;
        let _lock = cache.lock(repo, &metadata.etag)?;
        let blob = cache.blob(repo, &metadata.etag);
        if fs::metadata(&blob).is_ok_and(|found| found.len() == metadata.size) {
            return cache.link(repo, commit, &listed.path, &metadata.etag);
        }
        cache.create_parent(repo, &blob)?;
        let partial = blob.with_file_name(format!("{}.incomplete", metadata.etag));
        tracing::info!("downloading {} of {repo}, {} bytes", listed.path, metadata.size);
        let download = Download { asked, url, partial: &partial, metadata: &metadata };
        self.download_with_retries(&download).inspect_err(|_| drop_unless_resumable(&partial, &metadata))?;
        fs::rename(&partial, &blob).map_err(|e| HubError::cache(&blob, e))?;
        cache.link(repo, commit, &listed.path, &metadata.etag)
    }

    /// Downloads the body, and starts a new series of retries while each series makes progress.
    fn download_with_retries(&self, download: &Download) -> Result<(), HubError> {
        let Download { asked, partial, metadata, .. } = download;
        let (mut is_second, mut is_slow) = (false, false);
        loop {
            let n_before = n_bytes(partial);
            let tried = with_retries(&self.settings, asked, || match self.runtime.block_on(self.body(download)) {
                Err(AttemptError::InvalidResponse(problem)) if !is_second => {
                    tracing::warn!("{} of {}: {problem}; trying once more", download.path(), asked.repo);
                    is_second = true;
                    self.runtime.block_on(self.body(download))
                }
                slow @ Err(AttemptError::TooSlow(_)) => {
                    is_slow = true;
                    slow
                }
                other => other,
            });
            let has_advanced = metadata.sha256().is_some() && n_bytes(partial) > n_before;
            if tried.is_ok() || is_slow || !has_advanced {
                return tried;
            }
        }
    }

    fn url(&self, repo: &RepoId, commit: &str, path: &str) -> Result<Url, HubError> {
        let base = format!("{}/{}/resolve/{commit}/", self.settings.endpoint, repo.web_path());
        let wrong = |problem: String| HubError::WrongContents { id: repo.to_string(), problem };
        let mut url = Url::parse(&base).map_err(|e| wrong(format!("{base} is no address: {e}")))?;
        url.path_segments_mut()
            .map_err(|()| wrong(format!("{base} is no address for files")))?
            .pop_if_empty()
            .extend(path.split('/'));
        Ok(url)
    }

    /// Requests ETag and size. Follows redirects within the Hub only.
    async fn head(
        &self,
        url: &Url,
        commit: &str,
        listed: &ListedFile,
        known: Option<&str>,
    ) -> Result<FileMetadata, AttemptError> {
        let mut url = url.clone();
        for _ in 0..MAX_REDIRECTS {
            let mut request = self.unredirected.head(url.clone()).headers(self.headers());
            request = request.timeout(RESPONSE_TIMEOUT_FACTOR * self.settings.read_timeout);
            if let Some(etag) = known {
                request = request.header(IF_NONE_MATCH, format!("\"{etag}\""));
            }
            let answer = request.send().await.map_err(|e| AttemptError::NoResponse(innermost(&e)))?;
            let status = answer.status();
            if let (StatusCode::NOT_MODIFIED, Some(etag)) = (status, known) {
                return Ok(FileMetadata { etag: etag.to_owned(), size: listed.size });
            }
            match redirect_within(&answer) {
                Some(location) => {
                    url = url.join(location).map_err(|e| AttemptError::InvalidResponse(e.to_string()))?;
                }
                None if status.is_success() || status.is_redirection() => {
                    return announced(&answer, commit, listed);
                }
                None => return Err(self.refusal(answer).await),
            }
        }
        Err(AttemptError::InvalidResponse(format!("more than {MAX_REDIRECTS} redirects from {url}")))
    }

    /// Downloads the missing part of the body and verifies the whole file.
    async fn body(&self, download: &Download<'_>) -> Result<(), AttemptError> {
        let mut body = PartialDownload::resume(download.partial, download.metadata)?;
        let mut request = self.client.get(download.url.clone()).headers(self.headers());
        if body.n_bytes > 0 {
            request = request.header(RANGE, format!("bytes={}-", body.n_bytes));
        }
        let answer = tokio::time::timeout(RESPONSE_TIMEOUT_FACTOR * self.settings.read_timeout, request.send()).await;
        let answer = answer.map_err(|_| AttemptError::NoResponse("no answer in time".to_owned()))?;
        let mut answer = answer.map_err(|e| AttemptError::NoResponse(innermost(&e)))?;
        match answer.status() {
            StatusCode::PARTIAL_CONTENT if body.n_bytes > 0 => {}
            StatusCode::OK => body.restart()?,
            StatusCode::RANGE_NOT_SATISFIABLE => {
                body.restart()?;
                return Err(AttemptError::InvalidResponse("the server cannot continue the file".into()));
            }
            _ => return Err(self.refusal(answer).await),
        }
        let mut rate = ResponseRate::start(self.settings.read_timeout, body.n_bytes);
        loop {
            match answer.chunk().await {
                Ok(Some(piece)) => body.write(&piece)?,
                Ok(None) => return body.verify(),
                Err(error) => return Err(body.interrupted(&innermost(&error))),
            }
            if rate.is_too_low(body.n_bytes) {
                return Err(body.too_slow(MIN_RATE));
            }
            if let Some(on_progress) = &self.on_progress {
                on_progress(DownloadProgress {
                    file: download.path(),
                    done: body.n_bytes,
                    total: download.metadata.size,
                });
            }
        }
    }

    async fn refusal(&self, answer: Response) -> AttemptError {
        AttemptError::Status(ErrorResponse::read(answer, self.settings.read_timeout).await)
    }

    fn headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT_ENCODING, reqwest::header::HeaderValue::from_static("identity"));
        let bearer = self.settings.token.as_ref().map(|token| format!("Bearer {token}"));
        if let Some(Ok(mut value)) = bearer.map(reqwest::header::HeaderValue::try_from) {
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        headers
    }
}

/// Builds the HTTP client.
pub(crate) fn client(settings: &HubSettings) -> ClientBuilder {
    Client::builder()
        .user_agent(concat!("candlewick/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(CONNECT_TIMEOUT)
        .read_timeout(settings.read_timeout)
}

fn n_bytes(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |found| found.len())
}

/// Removes a partial download that cannot be resumed.
fn drop_unless_resumable(partial: &Path, metadata: &FileMetadata) {
    if metadata.sha256().is_none() || n_bytes(partial) == 0 {
        let _ = fs::remove_file(partial);
    }
}

fn announced(answer: &Response, commit: &str, listed: &ListedFile) -> Result<FileMetadata, AttemptError> {
    let header = |name: &str| answer.headers().get(name).and_then(|value| value.to_str().ok());
    if let Some(other) = header("x-repo-commit").filter(|other| !other.eq_ignore_ascii_case(commit)) {
        return Err(AttemptError::InvalidResponse(format!("the file is of the commit {other}, not of {commit}")));
    }
    let etag = header("x-linked-etag").or_else(|| header(ETAG.as_str())).unwrap_or_default();
    let etag = etag.trim_start_matches("W/").trim_matches('"').to_owned();
    if !is_inside(&etag) || etag.contains(['/', '\\']) {
        return Err(AttemptError::InvalidResponse(format!("{} answers without a usable ETag", answer.url())));
    }
    let length = || header(CONTENT_LENGTH.as_str()).filter(|_| answer.status().is_success());
    let size = header("x-linked-size").or_else(length).and_then(|size| size.parse().ok());
    Ok(FileMetadata { etag, size: size.unwrap_or(listed.size) })
}

/// Checks that the answer to a HEAD request agrees with the file list.
fn compared(metadata: FileMetadata, listed: &ListedFile) -> Result<FileMetadata, AttemptError> {
    let differs = |what: &str, announced: &str, in_list: &str| {
        AttemptError::InvalidResponse(format!(
            "its {what} is announced as {announced}, but the file list has {in_list}"
        ))
    };
    if metadata.size != listed.size {
        return Err(differs("size", &metadata.size.to_string(), &listed.size.to_string()));
    }
    match (metadata.sha256(), listed.sha256.as_deref()) {
        (Some(announced), Some(in_list)) if !announced.eq_ignore_ascii_case(in_list) => {
            Err(differs("sha256", announced, in_list))
        }
        _ => Ok(metadata),
    }
}

fn redirect_within(answer: &Response) -> Option<&str> {
    let location = answer.headers().get(LOCATION)?.to_str().ok()?;
    let is_relative = !location.starts_with("//") && Url::parse(location).is_err();
    (answer.status().is_redirection() && is_relative).then_some(location)
}
