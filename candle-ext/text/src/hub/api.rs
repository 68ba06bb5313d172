//! Hub API: the commit of a revision and its file list.

use std::time::Duration;

use hf_hub::repository::{RepoTreeEntry, RepoTypeDataset, RepoTypeModel};
use hf_hub::{HFClient, HFClientSync, HFError, HFResult};

use super::cache::{is_commit, is_inside};
use super::error::innermost;
use super::fetch::listing_client;
use super::retry::{AttemptError, ErrorResponse, RequestTarget, with_retries};
use super::{HubError, HubSettings, ListedFile, RepoId, RepoKind};

pub(crate) struct HubApi {
    client: HFClientSync,
    settings: HubSettings,
}

impl HubApi {
    pub(crate) fn new(settings: &HubSettings) -> Result<Self, HubError> {
        let lost = |reason: String| {
            let [endpoint, reason] = [&settings.endpoint, &reason].map(|text| settings.redact(text));
            HubError::Unreachable { endpoint, reason }
        };
        // The client of hf-hub has no timeout, and its retries ignore the wait that the Hub requests.
        let mut builder = HFClient::builder()
            .client(listing_client(settings).build().map_err(|e| lost(innermost(&e)))?)
            .endpoint(settings.endpoint.clone())
            .cache_dir(settings.cache.clone())
            .retry_max_attempts(0);
        // Without a token hf-hub searches for one, in the same places as `HubSettings::from_env`.
        if let Some(token) = &settings.token {
            builder = builder.token(token.clone());
        }
        let client = builder.build_sync().map_err(|error| lost(error.to_string()))?;
        Ok(Self { client, settings: settings.clone() })
    }

    /// Returns the commit of `revision` and its files.
    pub(crate) fn list(&self, repo: &RepoId, revision: &str) -> Result<(String, Vec<ListedFile>), HubError> {
        let asked = RequestTarget { repo, revision, file: None };
        let commit = with_retries(&self.settings, &asked, || self.commit(repo, revision).map_err(failure))?;
        if !is_commit(&commit) {
            let problem = format!("the Hub names {commit:?} as the commit of {revision:?}");
            return Err(HubError::WrongContents { id: repo.to_string(), problem });
        }
        let entries = with_retries(&self.settings, &asked, || self.tree(repo, &commit).map_err(failure))?;
        let files = entries.into_iter().filter_map(|entry| match entry {
            RepoTreeEntry::File { path, size, .. } if is_inside(&path) => Some(ListedFile { path, size }),
            _ => None,
        });
        Ok((commit, files.collect()))
    }

    fn commit(&self, repo: &RepoId, revision: &str) -> HFResult<String> {
        let (owner, name) = repo.owner_and_name();
        let only = vec!["sha".to_owned()];
        let sha = match repo.kind() {
            RepoKind::Model => {
                let repo = self.client.model(owner, name);
                repo.info().revision(revision).expand(only).send()?.sha
            }
            RepoKind::Dataset => {
                let repo = self.client.dataset(owner, name);
                repo.info().revision(revision).expand(only).send()?.sha
            }
        };
        sha.ok_or_else(|| HFError::malformed_response("the repository's commit"))
    }

    fn tree(&self, repo: &RepoId, commit: &str) -> HFResult<Vec<RepoTreeEntry>> {
        let (owner, name) = repo.owner_and_name();
        match repo.kind() {
            RepoKind::Model => {
                let repo = self.client.repository(RepoTypeModel, owner, name);
                repo.list_tree().revision(commit).recursive(true).send()
            }
            RepoKind::Dataset => {
                let repo = self.client.repository(RepoTypeDataset, owner, name);
                repo.list_tree().revision(commit).recursive(true).send()
            }
        }
    }
}

fn failure(error: HFError) -> AttemptError {
    match &error {
        HFError::RateLimited { context, .. }
        | HFError::Http { context }
        | HFError::AuthRequired { context }
        | HFError::Forbidden { context }
        | HFError::Conflict { context }
        | HFError::RepoNotFound { context: Some(context), .. }
        | HFError::RevisionNotFound { context: Some(context), .. }
        | HFError::EntryNotFound { context: Some(context), .. } => AttemptError::Status(ErrorResponse {
            status: context.status.as_u16(),
            code: context.error_code.clone().unwrap_or_default(),
            message: context.server_message.clone().unwrap_or_default(),
            url: context.url.clone(),
            wait: wait(&error),
        }),
        HFError::Request { source, .. } if source.is_decode() && !is_timeout(source) => {
            AttemptError::InvalidResponse(format!("the answer cannot be read: {}", innermost(source)))
        }
        HFError::Request { source, .. } => AttemptError::NoResponse(innermost(source)),
        other => AttemptError::InvalidResponse(other.to_string()),
    }
}

/// Returns true if a timeout is among the causes. While a body is read, it is not the outermost error.
fn is_timeout(error: &reqwest::Error) -> bool {
    error.is_timeout() || innermost(error).contains("timed out")
}

fn wait(error: &HFError) -> Option<Duration> {
    match error {
        HFError::RateLimited { retry_after, .. } => *retry_after,
        _ => None,
    }
}
