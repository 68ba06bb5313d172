//! Hub API: the commit of a revision and its file list.
//!
//! Answers are bounded, and compared with the request: a commit has the requested hash, a list names each file once. The
//! token goes to the endpoint alone, wherever the next page of a list is. hf-hub has the types of the answers; its client
//! bounds neither answers nor pages.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use hf_hub::repository::{DatasetInfo, ModelInfo, RepoTreeEntry};
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue, LINK};
use reqwest::{Client, Url};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::cache::{is_commit, is_inside};
use super::error::innermost;
use super::fetch::{RESPONSE_TIMEOUT_FACTOR, client};
use super::retry::{AttemptError, ErrorResponse, RequestTarget, with_retries};
use super::{HubError, HubSettings, ListedFile, RepoId, RepoKind};
use crate::response_body::read_body;

pub(crate) struct HubApi {
    settings: HubSettings,
    runtime: tokio::runtime::Runtime,
    client: Client,
}

/// File or folder in a file list. hf-hub's type lacks the hash of an LFS file in a list.
#[derive(Deserialize)]
struct TreeEntry {
    lfs: Option<LfsPointer>,
    #[serde(flatten)]
    entry: RepoTreeEntry,
}

/// Pointer to the contents of a large file.
#[derive(Deserialize)]
struct LfsPointer {
    /// SHA-256 of the contents.
    oid: String,
}

/// The largest answer. A page of a file list has 1,000 entries.
const MAX_ANSWER_BYTES: u64 = 32 << 20;
/// The largest number of entries of a file list.
const MAX_ENTRIES: usize = 1_000_000;
/// Time between two log lines about a long file list.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

impl HubApi {
    pub(crate) fn new(settings: &HubSettings) -> Result<Self, HubError> {
        let lost = |reason: String| {
            let [endpoint, reason] = [&settings.endpoint, &reason].map(|text| settings.redact(text));
            HubError::Unreachable { endpoint, reason }
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        Ok(Self {
            settings: settings.clone(),
            runtime: runtime.map_err(|error| lost(error.to_string()))?,
            client: client(settings).build().map_err(|error| lost(innermost(&error)))?,
        })
    }

    /// Returns the commit of `revision` and its files. A `revision` that is a commit is the only accepted answer.
    pub(crate) fn list(&self, repo: &RepoId, revision: &str) -> Result<(String, Vec<ListedFile>), HubError> {
        let asked = RequestTarget { repo, revision, file: None };
        let mut url = self.url(repo, ["revision", revision])?;
        url.set_query(Some("expand=sha"));
        let commit = with_retries(&self.settings, &asked, || match repo.kind() {
            RepoKind::Model => self.get::<ModelInfo>(&url).map(|(info, _)| info.sha),
            RepoKind::Dataset => self.get::<DatasetInfo>(&url).map(|(info, _)| info.sha),
        })?;
        let commit = commit.unwrap_or_default();
        if !is_commit(&commit) {
            let problem = format!("the Hub names {commit:?} as the commit of {revision:?}");
            return Err(HubError::WrongContents { id: repo.to_string(), problem });
        }
        if is_commit(revision) && !commit.eq_ignore_ascii_case(revision) {
            return Err(HubError::OtherCommit {
                id: repo.to_string(),
                requested: revision.to_owned(),
                answered: commit,
            });
        }
        let files = self.tree(&asked, &commit)?;
        Ok((commit, files))
    }

    /// Returns the files of a commit, page by page.
    fn tree(&self, asked: &RequestTarget, commit: &str) -> Result<Vec<ListedFile>, HubError> {
        let wrong = |problem: String| HubError::WrongContents { id: asked.repo.to_string(), problem };
        let mut url = self.url(asked.repo, ["tree", commit])?;
        url.set_query(Some("recursive=true"));
        let (mut next, mut files, mut names) = (Some(url), Vec::new(), HashSet::new());
        let mut reported = Instant::now();
        while let Some(url) = next {
            let entries: Vec<TreeEntry>;
            (entries, next) = with_retries(&self.settings, asked, || self.get(&url))?;
            if entries.is_empty() && next.is_some() {
                return Err(wrong("a page of its file list is empty, but another page follows".to_owned()));
            }
            for TreeEntry { entry, lfs } in entries {
                let (RepoTreeEntry::File { path, .. } | RepoTreeEntry::Directory { path, .. }) = &entry;
                if !names.insert(path.clone()) {
                    return Err(wrong(format!("its file list names {path:?} twice")));
                }
                if let RepoTreeEntry::File { path, size, .. } = entry
                    && is_inside(&path)
                {
                    files.push(ListedFile { path, size, sha256: lfs.map(|lfs| lfs.oid.to_ascii_lowercase()) });
                }
            }
            if names.len() > MAX_ENTRIES {
                return Err(wrong(format!("its file list has more than {MAX_ENTRIES} entries")));
            }
            if reported.elapsed() > PROGRESS_INTERVAL {
                tracing::info!("listing the files of {}: {} entries", asked.repo, names.len());
                reported = Instant::now();
            }
        }
        Ok(files)
    }

    fn url(&self, repo: &RepoId, last: [&str; 2]) -> Result<Url, HubError> {
        let base = format!("{}/api/{}s/{}", self.settings.endpoint, repo.kind().name(), repo.id());
        let wrong = |problem: String| HubError::WrongContents { id: repo.to_string(), problem };
        let mut url = Url::parse(&base).map_err(|error| wrong(format!("{base} is no address: {error}")))?;
        url.path_segments_mut().map_err(|()| wrong(format!("{base} is no address of a Hub")))?.extend(last);
        Ok(url)
    }

    /// Returns the value at an address, and the address of the next page.
    fn get<T: DeserializeOwned>(&self, url: &Url) -> Result<(T, Option<Url>), AttemptError> {
        self.runtime.block_on(async {
            let window = self.settings.read_timeout;
            let request = self.client.get(url.clone()).headers(self.headers(url));
            let answer = tokio::time::timeout(RESPONSE_TIMEOUT_FACTOR * window, request.send()).await;
            let answer = answer.map_err(|_| AttemptError::NoResponse("no answer in time".to_owned()))?;
            let answer = answer.map_err(|error| AttemptError::NoResponse(innermost(&error)))?;
            if !answer.status().is_success() {
                return Err(AttemptError::Status(ErrorResponse::read(answer, window).await));
            }
            let next = next_page(answer.headers()).and_then(|link| url.join(link).ok());
            let body = read_body(answer, MAX_ANSWER_BYTES, window).await?;
            let unread = |error| AttemptError::InvalidResponse(format!("the answer cannot be read: {error}"));
            Ok((serde_json::from_slice(&body).map_err(unread)?, next))
        })
    }

    /// Returns the headers of a request, with the token if the address is the endpoint's.
    fn headers(&self, url: &Url) -> HeaderMap {
        let mut headers = HeaderMap::new();
        let is_own = Url::parse(&self.settings.endpoint).is_ok_and(|own| own.origin() == url.origin());
        let bearer = self.settings.token.as_ref().filter(|_| is_own).map(|token| format!("Bearer {token}"));
        if let Some(Ok(mut value)) = bearer.map(HeaderValue::try_from) {
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        headers
    }
}

/// Returns the address in the header `Link` with `rel="next"`.
fn next_page(headers: &HeaderMap) -> Option<&str> {
    let links = headers.get(LINK)?.to_str().ok()?;
    let next = links.split(',').find(|link| link.contains("rel=\"next\""))?;
    next.split_once('<')?.1.split_once('>').map(|(address, _)| address)
}
