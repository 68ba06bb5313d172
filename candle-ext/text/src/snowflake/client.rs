//! Requests of the SQL REST API: statements, their status and the partitions of their results.

use std::io::Read;
use std::time::{Duration, Instant};

use flate2::read::MultiGzDecoder;
use reqwest::header::{ACCEPT, ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_TYPE};
use reqwest::{Client, RequestBuilder};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};

use super::error::SnowflakeError;
use super::settings::SnowflakeSettings;
use super::values::ResultColumn;
use crate::printable::shortened;
use crate::response_body::{BodyError, read_body};

const STATEMENTS: &str = "/api/v2/statements";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// A synchronous statement responds after at most 45 seconds.
const READ_TIMEOUT: Duration = Duration::from_secs(120);
const MAX_ATTEMPTS: usize = 5;
const FIRST_WAIT: Duration = Duration::from_millis(250);
/// The longest wait between two requests for the status of a statement.
const MAX_POLL_WAIT: Duration = Duration::from_secs(5);
/// Time between two log lines about a running statement.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(30);
/// The largest response, compressed or not. Snowflake's partitions have about 16 MB.
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
    /// Announced rows of all partitions, if the server announces them.
    pub(super) n_rows: Option<usize>,
    /// Announced rows of each partition.
    pub(super) partitions: Vec<PartitionInfo>,
    pub(super) first_rows: Vec<Vec<Value>>,
}

/// Announced size of a partition.
#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PartitionInfo {
    pub(super) row_count: Option<usize>,
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
    num_rows: Option<usize>,
    #[serde(default)]
    partition_info: Vec<PartitionInfo>,
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
        let failed = |reason: String| SnowflakeError::Unreachable { url: settings.shown_url(), reason };
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

    /// Runs a statement and waits for its result, at most [`SnowflakeSettings::statement_timeout`].
    pub(super) fn run(&self, statement: &str) -> Result<StatementResult, SnowflakeError> {
        let mut body = json!({ "statement": statement });
        for (name, value) in &self.settings.context {
            body[*name] = json!(value);
        }
        let body = body.to_string();
        let post = || self.client.post(format!("{}{STATEMENTS}", self.url)).body(body.clone());
        let (start, mut reported) = (Instant::now(), Instant::now());
        let mut response = self.send(&post)?;
        let mut wait = FIRST_WAIT;
        let mut handle = String::new();
        while response.status == 202 {
            if handle.is_empty() {
                handle = checked_handle(&parse(&response.body)?.statement_handle)?;
            }
            if start.elapsed() >= self.settings.statement_timeout {
                let reason = format!(
                    "it still runs after {} s; query fewer rows, or a table with the result",
                    self.settings.statement_timeout.as_secs()
                );
                return Err(SnowflakeError::Statement {
                    statement: shortened(statement, MAX_SHOWN).into_owned(),
                    reason,
                });
            }
            if reported.elapsed() >= PROGRESS_INTERVAL {
                tracing::info!("the Snowflake query runs since {} s", start.elapsed().as_secs());
                reported = Instant::now();
            }
            std::thread::sleep(wait);
            wait = (wait * 2).min(MAX_POLL_WAIT);
            response = self.send(&|| self.client.get(format!("{}{STATEMENTS}/{handle}", self.url)))?;
        }
        let result = parse(&self.accepted(response, statement)?)?;
        let no_columns = || SnowflakeError::InvalidResponse("it has no resultSetMetaData".into());
        let metadata = result.result_set_meta_data.ok_or_else(no_columns)?;
        let mut partitions = metadata.partition_info;
        if partitions.is_empty() {
            partitions.push(PartitionInfo { row_count: metadata.num_rows });
        }
        Ok(StatementResult {
            handle: checked_handle(&result.statement_handle)?,
            columns: metadata.row_type,
            n_rows: metadata.num_rows,
            partitions,
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
        let (url, reason) = (self.settings.shown_url(), reason.replace(self.token, "(token)"));
        Err(match status {
            401 | 403 => SnowflakeError::AccessDenied { url, reason },
            400..500 => SnowflakeError::Statement { statement: shortened(statement, MAX_SHOWN).into_owned(), reason },
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
                let url = self.settings.shown_url();
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
        let body = read_body(response, MAX_RESPONSE_BYTES, READ_TIMEOUT).await.map_err(|error| match error {
            BodyError::TooLong { max_bytes } => format!("the response has more than {max_bytes} bytes"),
            BodyError::TooSlow => "the response is too slow".to_owned(),
            BodyError::Lost(error) => reason(error),
        })?;
        Ok(HttpResponse { status, body: if is_gzip { gunzip(&body)? } else { body } })
    }
}

fn gunzip(body: &[u8]) -> Result<Vec<u8>, String> {
    let mut text = Vec::new();
    let unpacked = MultiGzDecoder::new(body).take(MAX_RESPONSE_BYTES + 1).read_to_end(&mut text);
    match unpacked.map_err(|error| error.to_string())? as u64 > MAX_RESPONSE_BYTES {
        false => Ok(text),
        true => Err(format!("the response unpacks to more than {MAX_RESPONSE_BYTES} bytes")),
    }
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
    fn a_statement_that_runs_for_ever_is_given_up() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let body = r#"{"statementHandle": "01b2-c3"}"#;
        let answer = format!("HTTP/1.1 202 X\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len());
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let _ = stream.read(&mut [0; 4096]).and_then(|_| stream.write_all(answer.as_bytes()));
            }
        });
        let variables = [("SNOWFLAKE_HOST", url.as_str()), ("SNOWFLAKE_TOKEN", "t")];
        let lookup = |name: &str| variables.iter().find(|(own, _)| *own == name).map(|(_, value)| (*value).to_owned());
        let settings = SnowflakeSettings { statement_timeout: Duration::ZERO, ..SnowflakeSettings::from_vars(lookup) };
        let error = SnowflakeClient::new(&settings).unwrap().run("SELECT 1").err().unwrap().to_string();
        assert!(error.starts_with("run the Snowflake query `SELECT 1`: it still runs after 0 s; "), "{error}");
    }

    #[test]
    fn a_handle_is_safe_in_a_url() {
        assert_eq!(checked_handle("01b2-c3").unwrap(), "01b2-c3");
        for wrong in ["", "../x", "a?b", "a/b"] {
            assert!(checked_handle(wrong).is_err(), "{wrong}");
        }
    }
}
