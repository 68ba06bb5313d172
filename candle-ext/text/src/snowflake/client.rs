//! Requests of the SQL REST API: statements, their status and the partitions of their results.

use std::io::Read;
use std::time::Duration;

use flate2::read::MultiGzDecoder;
use reqwest::header::{ACCEPT, ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_TYPE};
use reqwest::{Client, RequestBuilder};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};

use super::error::SnowflakeError;
use super::settings::SnowflakeSettings;
use super::values::ResultColumn;

const STATEMENTS: &str = "/api/v2/statements";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// A synchronous statement responds after at most 45 seconds.
const READ_TIMEOUT: Duration = Duration::from_secs(120);
const MAX_ATTEMPTS: usize = 5;
const FIRST_WAIT: Duration = Duration::from_millis(250);
/// The longest wait between two requests for the status of a statement.
const MAX_POLL_WAIT: Duration = Duration::from_secs(5);
/// The largest uncompressed response. Snowflake's partitions have about 16 MB.
const MAX_RESPONSE_BYTES: u64 = 1 << 30;
/// The part of a statement that an error shows, in characters.
const MAX_SHOWN: usize = 80;

/// Client of one account.
pub(super) struct SnowflakeClient<'a> {
    settings: &'a SnowflakeSettings,
    url: &'a str,
    token: &'a str,
    token_type: &'static str,
    client: Client,
    runtime: Runtime,
}

/// Result of a statement: its first rows, and the handle of the others.
pub(super) struct StatementResult {
    pub(super) handle: String,
    pub(super) columns: Vec<ResultColumn>,
    pub(super) n_partitions: usize,
    pub(super) first_rows: Vec<Vec<Value>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ResultSet {
    #[serde(default)]
    statement_handle: String,
    result_set_meta_data: Option<ResultSetMetaData>,
    #[serde(default)]
    data: Vec<Vec<Value>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ResultSetMetaData {
    row_type: Vec<ResultColumn>,
    #[serde(default)]
    partition_info: Vec<Value>,
}

/// Status and body of a response.
struct HttpResponse {
    status: u16,
    body: Vec<u8>,
}

impl<'a> SnowflakeClient<'a> {
    pub(super) fn new(settings: &'a SnowflakeSettings) -> Result<Self, SnowflakeError> {
        let missing = |problem: &str, variable| SnowflakeError::NotConfigured { problem: problem.into(), variable };
        let url = settings.url.as_deref().ok_or_else(|| missing("the account is unknown", "SNOWFLAKE_ACCOUNT"))?;
        let no_token = || missing("there is no OAuth token or programmatic access token", "SNOWFLAKE_TOKEN");
        let token = settings.token.as_deref().ok_or_else(no_token)?;
        let other_type = || {
            let problem = "the authenticator is not supported: it is oauth or programmatic_access_token";
            missing(problem, "SNOWFLAKE_AUTHENTICATOR")
        };
        let token_type = settings.token_type.ok_or_else(other_type)?.header();
        let failed = |reason: String| SnowflakeError::Unreachable { url: url.to_owned(), reason };
        let client = Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .read_timeout(READ_TIMEOUT)
            // A redirect would send the token to another server.
            .redirect(reqwest::redirect::Policy::none())
            .user_agent(concat!("candlewick/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|error| failed(error.to_string()))?;
        let runtime = Builder::new_current_thread().enable_all().build().map_err(|error| failed(error.to_string()))?;
        Ok(Self { settings, url, token, token_type, client, runtime })
    }

    /// Runs a statement and waits for its result.
    pub(super) fn run(&self, statement: &str) -> Result<StatementResult, SnowflakeError> {
        let mut body = json!({ "statement": statement });
        for (name, value) in &self.settings.context {
            body[*name] = json!(value);
        }
        let body = body.to_string();
        let post = || self.client.post(format!("{}{STATEMENTS}", self.url)).body(body.clone());
        let mut response = self.send(&post)?;
        let mut wait = FIRST_WAIT;
        let mut handle = String::new();
        while response.status == 202 {
            if handle.is_empty() {
                handle = checked_handle(&parse(&response.body)?.statement_handle)?;
            }
            std::thread::sleep(wait);
            wait = (wait * 2).min(MAX_POLL_WAIT);
            response = self.send(&|| self.client.get(format!("{}{STATEMENTS}/{handle}", self.url)))?;
        }
        let result = parse(&self.accepted(response, statement)?)?;
        let no_columns = || SnowflakeError::InvalidResponse("it has no resultSetMetaData".into());
        let metadata = result.result_set_meta_data.ok_or_else(no_columns)?;
        Ok(StatementResult {
            handle: checked_handle(&result.statement_handle)?,
            columns: metadata.row_type,
            n_partitions: metadata.partition_info.len().max(1),
            first_rows: result.data,
        })
    }

    /// Returns the rows of a partition.
    pub(super) fn partition(&self, handle: &str, partition: usize) -> Result<Vec<Vec<Value>>, SnowflakeError> {
        let url = format!("{}{STATEMENTS}/{handle}?partition={partition}", self.url);
        let response = self.send(&|| self.client.get(&url))?;
        let what = format!("partition {partition}");
        Ok(parse(&self.accepted(response, &what)?)?.data)
    }

    /// Returns the body of a successful response.
    fn accepted(&self, response: HttpResponse, statement: &str) -> Result<Vec<u8>, SnowflakeError> {
        let HttpResponse { status, body } = response;
        if status == 200 {
            return Ok(body);
        }
        let message = serde_json::from_slice::<Value>(&body).ok();
        let message = message.as_ref().and_then(|body| body["message"].as_str());
        let reason = message
            .map_or_else(|| format!("HTTP status {status}"), |message| format!("{message} (HTTP status {status})"));
        let (url, reason) = (self.url.to_owned(), reason.replace(self.token, "(token)"));
        Err(match status {
            401 | 403 => SnowflakeError::AccessDenied { url, reason },
            400..500 => {
                let statement = statement.chars().take(MAX_SHOWN).collect();
                SnowflakeError::Statement { statement, reason }
            }
            _ => SnowflakeError::Unreachable { url, reason },
        })
    }

    /// Sends a request, again while the server is busy or out of reach.
    fn send(&self, request: &dyn Fn() -> RequestBuilder) -> Result<HttpResponse, SnowflakeError> {
        let mut n_attempts = 0;
        loop {
            n_attempts += 1;
            let attempt = self.runtime.block_on(self.attempt(request()));
            let is_temporary = match &attempt {
                Ok(response) => matches!(response.status, 408 | 429 | 500 | 502 | 503 | 504),
                Err(_) => true,
            };
            if !is_temporary || n_attempts == MAX_ATTEMPTS {
                let url = self.url.to_owned();
                return attempt.map_err(|reason| SnowflakeError::Unreachable { url, reason });
            }
            std::thread::sleep(FIRST_WAIT * (1 << (n_attempts - 1)));
        }
    }

    async fn attempt(&self, request: RequestBuilder) -> Result<HttpResponse, String> {
        let request = request
            .bearer_auth(self.token)
            .header("X-Snowflake-Authorization-Token-Type", self.token_type)
            .header(ACCEPT, "application/json")
            .header(ACCEPT_ENCODING, "gzip")
            .header(CONTENT_TYPE, "application/json");
        // The error's own text ends with the URL, and its innermost cause has the reason.
        let reason = |error: reqwest::Error| {
            let mut source: &dyn std::error::Error = &error;
            while let Some(inner) = source.source() {
                source = inner;
            }
            source.to_string()
        };
        let response = request.send().await.map_err(reason)?;
        let status = response.status().as_u16();
        let encoding = response.headers().get(CONTENT_ENCODING).and_then(|value| value.to_str().ok());
        let is_gzip = encoding.is_some_and(|encoding| encoding.eq_ignore_ascii_case("gzip"));
        let body = response.bytes().await.map_err(reason)?.to_vec();
        Ok(HttpResponse { status, body: if is_gzip { gunzip(&body)? } else { body } })
    }
}

fn gunzip(body: &[u8]) -> Result<Vec<u8>, String> {
    let mut text = Vec::new();
    MultiGzDecoder::new(body).take(MAX_RESPONSE_BYTES).read_to_end(&mut text).map_err(|error| error.to_string())?;
    Ok(text)
}

fn parse(body: &[u8]) -> Result<ResultSet, SnowflakeError> {
    serde_json::from_slice(body).map_err(|error| SnowflakeError::InvalidResponse(error.to_string()))
}

/// Returns a handle that is safe in a URL.
fn checked_handle(handle: &str) -> Result<String, SnowflakeError> {
    let is_handle = !handle.is_empty() && handle.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    let wrong = || SnowflakeError::InvalidResponse(format!("{handle:?} is no statementHandle"));
    if is_handle { Ok(handle.to_owned()) } else { Err(wrong()) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    #[test]
    fn compressed_partitions_are_read() {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(br#"{"data": [["a", null]]}"#).unwrap();
        let body = encoder.finish().unwrap();
        assert_eq!(parse(&gunzip(&body).unwrap()).unwrap().data, [[Value::from("a"), Value::Null]]);
        assert!(gunzip(&body[..body.len() / 2]).is_err());
    }

    #[test]
    fn a_handle_is_safe_in_a_url() {
        assert_eq!(checked_handle("01b2-c3").unwrap(), "01b2-c3");
        for wrong in ["", "../x", "a?b", "a/b"] {
            assert!(checked_handle(wrong).is_err(), "{wrong}");
        }
    }
}
