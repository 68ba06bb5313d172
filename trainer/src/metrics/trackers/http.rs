//! An HTTP client for JSON: with time limits, and without secrets in its errors.

use std::time::Duration;

use reqwest::header::{CONTENT_TYPE, RETRY_AFTER};
use reqwest::{Client, RequestBuilder, Response, StatusCode};
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};

use crate::metrics::tracking_plan::Credentials;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit of a request with its response.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// The largest response that is read, in bytes.
const MAX_RESPONSE: usize = 1 << 24;
/// The part of a response that an error shows, in characters.
const MAX_SHOWN: usize = 200;
/// The longest wait that a server may request.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(300);

/// Sends requests to one server. Blocks the calling thread.
#[derive(Debug)]
pub(super) struct HttpClient {
    client: Client,
    runtime: Runtime,
    base_url: String,
    credentials: Credentials,
}

/// The reason why a request failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum UploadError {
    /// No response, or a response that may be another one later.
    #[error("{reason}")]
    Temporary {
        /// The reason.
        reason: String,
        /// The wait that the server requests.
        retry_after: Option<Duration>,
    },
    /// A response that a repetition cannot change.
    #[error("{reason}")]
    Refused {
        /// The HTTP status; 200 for an error within a response.
        status: u16,
        /// The reason.
        reason: String,
    },
}

impl UploadError {
    /// Returns the error of a response without an expected field.
    pub(super) fn unexpected(field: &str) -> Self {
        Self::Refused { status: 200, reason: format!("the server's response has no {field}") }
    }

    fn temporary(reason: impl Into<String>) -> Self {
        Self::Temporary { reason: reason.into(), retry_after: None }
    }
}

/// Returns a field of a response; null if it has none, or is no object.
pub(super) fn into_field(mut response: Value, name: &str) -> Value {
    response.get_mut(name).map(Value::take).unwrap_or_default()
}

impl HttpClient {
    /// Creates a client of the server at `base_url`.
    pub(super) fn new(base_url: &str, credentials: Credentials) -> Result<Self, UploadError> {
        let failed = |reason: String| UploadError::Refused { status: 0, reason };
        let client = Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(REQUEST_TIMEOUT)
            // A redirect would change a POST into a GET.
            .redirect(reqwest::redirect::Policy::none())
            .user_agent(concat!("candlewick/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|error| failed(innermost(&error)))?;
        let runtime = Builder::new_current_thread().enable_all().build().map_err(|error| failed(error.to_string()))?;
        Ok(Self { client, runtime, base_url: base_url.trim_end_matches('/').to_owned(), credentials })
    }

    /// Posts a JSON body and returns the JSON of the response; null for an empty response.
    pub(super) fn post(&self, path: &str, body: &Value) -> Result<Value, UploadError> {
        let request = self.client.post(format!("{}{path}", self.base_url));
        self.send(request.header(CONTENT_TYPE, "application/json").body(body.to_string()))
    }

    /// Gets a path with a query and returns the JSON of the response.
    pub(super) fn get(&self, path: &str, query: (&str, &str)) -> Result<Value, UploadError> {
        let mut url = reqwest::Url::parse(&format!("{}{path}", self.base_url))
            .map_err(|error| UploadError::Refused { status: 0, reason: error.to_string() })?;
        url.query_pairs_mut().append_pair(query.0, query.1);
        self.send(self.client.get(url))
    }

    fn send(&self, request: RequestBuilder) -> Result<Value, UploadError> {
        let request = match &self.credentials {
            Credentials::None => request,
            Credentials::Basic { username, password } => request.basic_auth(username, Some(password.reveal())),
            Credentials::Bearer(token) => request.bearer_auth(token.reveal()),
        };
        let responded = self.runtime.block_on(async {
            let response = request.send().await.map_err(|error| UploadError::temporary(innermost(&error)))?;
            let (status, retry_after) = (response.status(), retry_after(&response));
            Ok((status, retry_after, body(response).await?))
        });
        let (status, retry_after, body) = responded.map_err(|error| self.redacted(error))?;
        if status.is_success() {
            return if body.is_empty() {
                Ok(Value::Null)
            } else {
                serde_json::from_slice(&body)
                    .map_err(|_| UploadError::Refused { status: 200, reason: "the response is not JSON".to_owned() })
            };
        }
        let shown: String = String::from_utf8_lossy(&body).trim().chars().take(MAX_SHOWN).collect();
        let reason = if shown.is_empty() { format!("HTTP {status}") } else { format!("HTTP {status}: {shown}") };
        Err(self.redacted(match status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => {
                UploadError::Temporary { reason, retry_after }
            }
            _ if status.is_server_error() => UploadError::Temporary { reason, retry_after },
            _ => UploadError::Refused { status: status.as_u16(), reason },
        }))
    }

    /// Removes the credentials from an error.
    pub(super) fn redacted(&self, error: UploadError) -> UploadError {
        let redact = |reason: String| self.credentials.redact(&reason);
        match error {
            UploadError::Temporary { reason, retry_after } => {
                UploadError::Temporary { reason: redact(reason), retry_after }
            }
            UploadError::Refused { status, reason } => UploadError::Refused { status, reason: redact(reason) },
        }
    }
}

async fn body(mut response: Response) -> Result<Vec<u8>, UploadError> {
    let mut body = Vec::new();
    while let Some(piece) = response.chunk().await.map_err(|error| UploadError::temporary(innermost(&error)))? {
        if body.len() + piece.len() > MAX_RESPONSE {
            return Err(UploadError::temporary("the response is too long"));
        }
        body.extend_from_slice(&piece);
    }
    Ok(body)
}

fn retry_after(response: &Response) -> Option<Duration> {
    let seconds = response.headers().get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds).min(MAX_RETRY_AFTER))
}

/// Returns the message of an error's innermost cause. The messages around it repeat the URL.
fn innermost(error: &(dyn std::error::Error + 'static)) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}
