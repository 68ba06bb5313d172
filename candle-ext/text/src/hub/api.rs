//! Hub API: the commit of a revision and its file list.

use reqwest::header::LINK;
use reqwest::{Client, Response, Url};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::cache::{is_commit, is_inside};
use super::error::innermost;
use super::fetch::{authorized_headers, error_response, listing_client};
use super::retry::{AttemptError, RequestTarget, with_retries};
use super::{HubError, HubSettings, ListedFile, RepoId, RepoKind};

pub(crate) struct HubApi {
    settings: HubSettings,
    runtime: tokio::runtime::Runtime,
    client: Client,
}

/// Repository at a revision, as far as it is requested.
#[derive(Deserialize)]
struct RepoInfo {
    sha: String,
}

/// File or folder of a repository.
#[derive(Deserialize)]
struct TreeEntry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    #[serde(default)]
    size: u64,
}

impl HubApi {
    pub(crate) fn new(settings: &HubSettings) -> Result<Self, HubError> {
        let lost = |reason: String| {
            let [endpoint, reason] = [&settings.endpoint, &reason].map(|text| settings.redact(text));
            HubError::Unreachable { endpoint, reason }
        };
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| lost(e.to_string()))?;
        let client = listing_client(settings).build().map_err(|e| lost(innermost(&e)))?;
        Ok(Self { settings: settings.clone(), runtime, client })
    }

    /// Returns the commit of `revision` and its files.
    pub(crate) fn list(&self, repo: &RepoId, revision: &str) -> Result<(String, Vec<ListedFile>), HubError> {
        let asked = RequestTarget { repo, revision, file: None };
        let commit = with_retries(&self.settings, &asked, || self.runtime.block_on(self.commit(repo, revision)))?;
        if !is_commit(&commit) {
            let problem = format!("the Hub names {commit:?} as the commit of {revision:?}");
            return Err(HubError::WrongContents { id: repo.to_string(), problem });
        }
        let entries = with_retries(&self.settings, &asked, || self.runtime.block_on(self.tree(repo, &commit)))?;
        let is_file = |entry: &TreeEntry| entry.kind == "file" && is_inside(&entry.path);
        let files = entries.into_iter().filter(is_file).map(|TreeEntry { path, size, .. }| ListedFile { path, size });
        Ok((commit, files.collect()))
    }

    async fn commit(&self, repo: &RepoId, revision: &str) -> Result<String, AttemptError> {
        let url = self.url(repo, "revision", revision, ("expand", "sha"))?;
        let info: RepoInfo = parse(self.get(url).await?).await?;
        Ok(info.sha)
    }

    /// Returns all entries of a commit. A response is a page and links to the next one.
    async fn tree(&self, repo: &RepoId, commit: &str) -> Result<Vec<TreeEntry>, AttemptError> {
        let mut next = Some(self.url(repo, "tree", commit, ("recursive", "true"))?);
        let mut entries = Vec::new();
        while let Some(url) = next {
            let response = self.get(url).await?;
            next = next_page(&response);
            let page: Vec<TreeEntry> = parse(response).await?;
            entries.extend(page);
        }
        Ok(entries)
    }

    /// Returns the URL of `part` of a repository at `revision`. A `/` in a revision is part of its name.
    fn url(&self, repo: &RepoId, part: &str, revision: &str, query: (&str, &str)) -> Result<Url, AttemptError> {
        let kind = match repo.kind() {
            RepoKind::Model => "models",
            RepoKind::Dataset => "datasets",
        };
        let base = format!("{}/api/{kind}/{repo}/{part}", self.settings.endpoint);
        let wrong = |problem: String| AttemptError::InvalidResponse(format!("{base} is no address: {problem}"));
        let mut url = Url::parse(&base).map_err(|error| wrong(error.to_string()))?;
        url.path_segments_mut().map_err(|()| wrong("it has no path".to_owned()))?.push(revision);
        url.query_pairs_mut().append_pair(query.0, query.1);
        Ok(url)
    }

    async fn get(&self, url: Url) -> Result<Response, AttemptError> {
        let request = self.client.get(url).headers(authorized_headers(&self.settings));
        let response = request.send().await.map_err(|error| AttemptError::NoResponse(innermost(&error)))?;
        if response.status().is_success() { Ok(response) } else { Err(refusal(response).await) }
    }
}

async fn parse<T: DeserializeOwned>(response: Response) -> Result<T, AttemptError> {
    let unreadable = |problem: String| AttemptError::InvalidResponse(format!("the answer cannot be read: {problem}"));
    let body = response.bytes().await.map_err(|error| match error.is_decode() && !is_timeout(&error) {
        true => unreadable(innermost(&error)),
        false => AttemptError::NoResponse(innermost(&error)),
    })?;
    serde_json::from_slice(&body).map_err(|error| unreadable(error.to_string()))
}

/// Returns true if a timeout is among the causes. While a body is read, it is not the outermost error.
fn is_timeout(error: &reqwest::Error) -> bool {
    error.is_timeout() || innermost(error).contains("timed out")
}

/// Returns the URL with `rel="next"` in the `Link` header.
fn next_page(response: &Response) -> Option<Url> {
    let links = response.headers().get(LINK)?.to_str().ok()?;
    let next = links.split(',').find(|link| link.contains("rel=\"next\""))?;
    let (_, rest) = next.split_once('<')?;
    Url::parse(rest.split_once('>')?.0).ok()
}

/// Reads an error response. Its message is a header, or the `error` field of its body.
async fn refusal(response: Response) -> AttemptError {
    let mut error = error_response(&response);
    if error.message.is_empty()
        && let Ok(body) = response.bytes().await
        && let Ok(body) = serde_json::from_slice::<serde_json::Value>(&body)
    {
        error.message = body["error"].as_str().unwrap_or_default().to_owned();
    }
    AttemptError::Status(error)
}
