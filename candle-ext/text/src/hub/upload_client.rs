//! Requests of an upload, with retries.

use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;

use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderValue};
use reqwest::{Client, Method};
use serde_json::Value as Json;

use super::HubSettings;
use super::error::innermost;
use super::fetch::client;
use super::retry::{AttemptError, ErrorResponse, retry};
use crate::files::open_regular_file;
use crate::response_body::read_body;

pub(super) const LFS_JSON: &str = "application/vnd.git-lfs+json";
pub(super) const JSON: &str = "application/json";
pub(super) const NEWLINE_JSON: &str = "application/x-ndjson";

/// Part of a file that is read into memory at once; longer ones are streamed.
const MAX_BYTES_IN_MEMORY: u64 = 64 << 20;

/// The largest answer. It names some addresses for each file.
const MAX_ANSWER_BYTES: u64 = 32 << 20;

/// A file to upload.
pub(super) struct LocalFile {
    /// Path in the repository.
    pub(super) path: String,
    pub(super) local: PathBuf,
    pub(super) size: u64,
}

/// Client of the Hub and of its storage.
pub(super) struct UploadClient<'a> {
    settings: &'a HubSettings,
    runtime: tokio::runtime::Runtime,
    client: Client,
}

/// A request to the Hub or to its storage.
pub(super) struct UploadRequest<'r> {
    pub(super) method: Method,
    pub(super) url: String,
    pub(super) headers: Vec<(&'r str, String)>,
    pub(super) body: UploadBody<'r>,
}

/// Body of a request.
pub(super) enum UploadBody<'r> {
    Bytes(Vec<u8>),
    /// Bytes of a file.
    Part {
        file: &'r LocalFile,
        start: u64,
        len: u64,
    },
}

/// The last failure of a request, and the number of attempts.
pub(super) type RequestError = (AttemptError, usize);

impl<'a> UploadClient<'a> {
    /// Creates a client without sending a request. The error is the reason why that fails.
    pub(super) fn new(settings: &'a HubSettings) -> Result<Self, String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        Ok(Self {
            settings,
            runtime: runtime.map_err(|error| error.to_string())?,
            client: client(settings).build().map_err(|error| innermost(&error))?,
        })
    }

    /// Posts to the Hub: to a path, or to a whole address on the Hub.
    pub(super) fn post(&self, path: &str, content_type: &str, body: String) -> Result<Json, RequestError> {
        let endpoint = &self.settings.endpoint;
        let (url, is_hub) = match path.starts_with('/') {
            true => (format!("{endpoint}{path}"), true),
            false => (path.to_owned(), path.starts_with(&format!("{endpoint}/"))),
        };
        let accepted = if content_type == LFS_JSON { LFS_JSON } else { JSON };
        let headers = vec![(CONTENT_TYPE.as_str(), content_type.to_owned()), (ACCEPT.as_str(), accepted.to_owned())];
        let request = UploadRequest { method: Method::POST, url, headers, body: UploadBody::Bytes(body.into_bytes()) };
        // The token goes to the Hub alone, not to its storage.
        let answer = self.send(&request, if is_hub { Authorization::Token } else { Authorization::None })?;
        Ok(serde_json::from_slice(&answer.body).unwrap_or(Json::Null))
    }

    /// Sends a request until it succeeds, fails permanently, or reaches the limit of attempts.
    pub(super) fn send(
        &self,
        request: &UploadRequest,
        authorization: Authorization,
    ) -> Result<UploadResponse, RequestError> {
        retry(self.settings, || self.runtime.block_on(self.attempt(request, authorization)))
    }

    async fn attempt(
        &self,
        request: &UploadRequest<'_>,
        authorization: Authorization,
    ) -> Result<UploadResponse, AttemptError> {
        let lost = |error: reqwest::Error| AttemptError::NoResponse(innermost(&error));
        let mut sent = self.client.request(request.method.clone(), request.url.as_str());
        for (name, value) in &request.headers {
            sent = sent.header(*name, value);
        }
        if let (Authorization::Token, Some(token)) = (authorization, &self.settings.token) {
            let value = HeaderValue::try_from(format!("Bearer {token}"));
            let mut value = value.map_err(|_| AttemptError::InvalidResponse("HF_TOKEN is no token".to_owned()))?;
            value.set_sensitive(true);
            sent = sent.header(AUTHORIZATION, value);
        }
        sent = match &request.body {
            UploadBody::Bytes(bytes) => sent.body(bytes.clone()),
            UploadBody::Part { file, start, len } => {
                let unread = |error: std::io::Error| {
                    AttemptError::InvalidResponse(format!("cannot read {}: {error}", file.local.display()))
                };
                let sent = sent.header(CONTENT_LENGTH, *len);
                match *start == 0 && *len == file.size && *len > MAX_BYTES_IN_MEMORY {
                    true => sent.body(tokio::fs::File::from_std(open_regular_file(&file.local).map_err(unread)?)),
                    false => sent.body(read_part(file, *start, *len).map_err(unread)?),
                }
            }
        };
        let answer = sent.send().await.map_err(lost)?;
        if !answer.status().is_success() {
            return Err(AttemptError::Status(ErrorResponse::read(answer, self.settings.read_timeout).await));
        }
        let headers = answer.headers().clone();
        let body = read_body(answer, MAX_ANSWER_BYTES, self.settings.read_timeout).await?;
        Ok(UploadResponse { headers, body })
    }
}

/// Credentials of a request.
#[derive(Clone, Copy)]
pub(super) enum Authorization {
    None,
    Token,
}

/// A successful response.
pub(super) struct UploadResponse {
    pub(super) headers: HeaderMap,
    pub(super) body: Vec<u8>,
}

/// Reads a part of a file.
pub(super) fn read_part(file: &LocalFile, start: u64, len: u64) -> std::io::Result<Vec<u8>> {
    let mut open = open_regular_file(&file.local)?;
    open.seek(SeekFrom::Start(start))?;
    let mut bytes = vec![0; len as usize];
    open.read_exact(&mut bytes)?;
    Ok(bytes)
}
