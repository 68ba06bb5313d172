//! Retries while the Hub is busy or unreachable, with the waits that it requests, up to a limit.

use std::time::{Duration, SystemTime};

use reqwest::Response;
use reqwest::header::RETRY_AFTER;
use serde_json::Value;

use super::error::innermost;
use super::retry_after::retry_after;
use super::{HubError, HubSettings, RepoId};
use crate::response_body::{BodyError, MIN_RATE, read_body};

/// Failure of one attempt.
#[derive(Debug)]
pub(crate) enum AttemptError {
    /// The server answers with an error status.
    Status(ErrorResponse),
    /// The server does not respond.
    NoResponse(String),
    /// The response is interrupted.
    Interrupted(String),
    /// The response is slower than the least accepted rate.
    TooSlow(String),
    /// The response is not valid.
    InvalidResponse(String),
    /// Final error that needs no further context.
    Hub(HubError),
}

/// Error response of the Hub.
#[derive(Debug)]
pub(crate) struct ErrorResponse {
    pub(crate) status: u16,
    /// The `X-Error-Code` header: `RepoNotFound`, `GatedRepo`, ...
    pub(crate) code: String,
    pub(crate) message: String,
    pub(crate) url: String,
    pub(crate) wait: Option<Duration>,
}

/// The largest body of an error response.
const MAX_ERROR_BYTES: u64 = 64 << 10;

/// Repository, revision and file of a request, to interpret a 404.
pub(crate) struct RequestTarget<'a> {
    pub(crate) repo: &'a RepoId,
    pub(crate) revision: &'a str,
    pub(crate) file: Option<&'a str>,
}

/// Downloads with [`retry`]. The error names the target.
pub(crate) fn with_retries<T>(
    settings: &HubSettings,
    asked: &RequestTarget,
    attempt: impl FnMut() -> Result<T, AttemptError>,
) -> Result<T, HubError> {
    retry(settings, attempt).map_err(|(failure, n_tries)| explain(settings, asked, failure, n_tries))
}

/// Calls `attempt` until it succeeds, fails permanently, or reaches the limit of attempts. The error is the last failure and
/// the number of attempts.
pub(crate) fn retry<T>(
    settings: &HubSettings,
    mut attempt: impl FnMut() -> Result<T, AttemptError>,
) -> Result<T, (AttemptError, usize)> {
    let mut n_tries = 0;
    loop {
        n_tries += 1;
        let failure = match attempt() {
            Ok(value) => return Ok(value),
            Err(failure) => failure,
        };
        let wait = failure.wait().unwrap_or(settings.backoff * (1 << (n_tries - 1).min(10)));
        let is_last = n_tries >= settings.max_attempts || wait > settings.max_retry_wait;
        if is_last || !failure.may_pass() {
            return Err((failure, n_tries));
        }
        tracing::info!("{} is busy or out of reach, next try in {wait:?}", settings.redact(&settings.endpoint));
        std::thread::sleep(wait);
    }
}

impl ErrorResponse {
    /// Reads the headers of an error response, and the message in its body if the headers have none.
    pub(crate) async fn read(answer: Response, read_timeout: Duration) -> Self {
        let header = |name: &str| {
            let value = answer.headers().get(name).and_then(|value| value.to_str().ok());
            value.unwrap_or_default().to_owned()
        };
        let (code, mut message) = (header("x-error-code"), header("x-error-message"));
        let wait = retry_after(&header(RETRY_AFTER.as_str()), SystemTime::now());
        let (status, url) = (answer.status().as_u16(), answer.url().to_string());
        if message.is_empty() {
            let body = read_body(answer, MAX_ERROR_BYTES, read_timeout).await.unwrap_or_default();
            let body: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
            message = body.get("error").and_then(Value::as_str).unwrap_or_default().to_owned();
        }
        Self { status, code, message, url, wait }
    }
}

impl From<BodyError> for AttemptError {
    fn from(error: BodyError) -> Self {
        match error {
            BodyError::TooLong { max_bytes } => {
                Self::InvalidResponse(format!("the answer has more than {max_bytes} bytes"))
            }
            BodyError::TooSlow => Self::TooSlow(format!(
                "fewer than {MIN_RATE} bytes a second arrive; try again later, or set HF_ENDPOINT to a mirror"
            )),
            BodyError::Lost(error) => Self::NoResponse(innermost(&error)),
        }
    }
}

impl AttemptError {
    fn may_pass(&self) -> bool {
        match self {
            Self::Status(refusal) => matches!(refusal.status, 408 | 429 | 500 | 502 | 503 | 504),
            Self::NoResponse(_) | Self::Interrupted(_) => true,
            Self::TooSlow(_) | Self::InvalidResponse(_) | Self::Hub(_) => false,
        }
    }

    fn wait(&self) -> Option<Duration> {
        match self {
            Self::Status(refusal) => refusal.wait,
            _ => None,
        }
    }
}

fn explain(settings: &HubSettings, asked: &RequestTarget, failure: AttemptError, n_tries: usize) -> HubError {
    let id = asked.repo.to_string();
    let redact = |text: String| settings.redact(&text);
    match failure {
        AttemptError::Hub(error) => error,
        AttemptError::NoResponse(reason) => {
            HubError::Unreachable { endpoint: redact(settings.endpoint.clone()), reason: redact(reason) }
        }
        AttemptError::Interrupted(problem) | AttemptError::TooSlow(problem) => {
            HubError::Interrupted { id, file: name_of(asked), problem: redact(problem) }
        }
        AttemptError::InvalidResponse(problem) => {
            HubError::CorruptDownload { id, file: name_of(asked), problem: redact(problem) }
        }
        AttemptError::Status(refusal) => match refusal.status {
            401 | 403 if refusal.code != "RepoNotFound" => {
                let (status, advice) = (refusal.status, redact(advice(settings, asked, &refusal)));
                HubError::AccessDenied { id, status, advice }
            }
            401 | 404 => not_found(asked, &refusal),
            429 => HubError::RateLimited { id, n_tries, wait: refusal.wait },
            status => {
                let message = match refusal.message.as_str() {
                    "" => String::new(),
                    message => redact(format!(": {message}")),
                };
                HubError::HttpStatus { id, url: redact(refusal.url), status, message }
            }
        },
    }
}

fn name_of(asked: &RequestTarget) -> String {
    asked.file.unwrap_or("the listing").to_owned()
}

fn not_found(asked: &RequestTarget, refusal: &ErrorResponse) -> HubError {
    let (id, revision) = (asked.repo.to_string(), asked.revision.to_owned());
    match (refusal.code.as_str(), asked.file) {
        ("EntryNotFound", Some(file)) => HubError::FileNotFound { id, revision, file: file.into() },
        ("RevisionNotFound", _) => HubError::RevisionNotFound { id, revision },
        ("RepoNotFound", _) | (_, None) => HubError::RepoNotFound { id, kind: asked.repo.kind() },
        (_, Some(file)) => HubError::FileNotFound { id, revision, file: file.into() },
    }
}

fn advice(settings: &HubSettings, asked: &RequestTarget, refusal: &ErrorResponse) -> String {
    let page = format!("{}/{}", settings.endpoint, asked.repo.web_path());
    let said = match refusal.message.as_str() {
        "" => String::new(),
        message => format!(" (the server says: {message})"),
    };
    match (settings.token.is_some(), refusal.status) {
        (false, _) => format!(
            "it is gated or private: accept its terms at {page} and set HF_TOKEN to a token of \
             that account{said}"
        ),
        (true, 401) => format!("HF_TOKEN is not accepted: check that it is complete and not expired{said}"),
        (true, _) => format!(
            "this token has no access: accept the terms at {page} with its account, and check \
             that the token may read gated repositories{said}"
        ),
    }
}
