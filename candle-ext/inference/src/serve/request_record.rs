//! Record of a request: its log line and its metrics, once the response has ended.

use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use serde_json::json;

use super::access_log::{line_of, on_one_line};
use super::api_error::ApiError;
use super::connections::ClientAddress;
use super::log_thread::{LogThread, RequestLogLine};
use super::metrics::{ServedRoute, ServerMetrics};

/// Receiver of all records.
pub(super) struct RequestReporter {
    pub(super) metrics: ServerMetrics,
    pub(super) log: Arc<LogThread>,
}

/// Record of a request. It is reported when its last copy is dropped, which a response's stream has.
#[derive(Clone)]
pub(super) struct RequestRecord(Arc<OpenRecord>);

struct OpenRecord {
    reporter: Arc<RequestReporter>,
    client: Option<ClientAddress>,
    route: ServedRoute,
    began: Instant,
    facts: Mutex<RequestFacts>,
}

/// Facts about a request and its response. They do not include any text.
#[derive(Clone, Debug, Default)]
struct RequestFacts {
    /// Id of the response.
    id: Option<String>,
    model: Option<String>,
    is_streamed: bool,
    /// Status of a stream that has ended, by its last event or an error.
    stream_end: Option<StatusCode>,
    /// `None` if the client has closed the connection before the response.
    status: Option<StatusCode>,
    n_prompt: usize,
    n_generated: usize,
    first_token: Option<Duration>,
    finish_reasons: Vec<&'static str>,
}

/// Status in records of a request whose client has closed the connection, nginx's.
const CLIENT_CLOSED: u16 = 499;

impl RequestReporter {
    /// Creates a reporter that writes records to a file.
    pub(super) fn new(file: Option<Arc<File>>) -> Self {
        Self { metrics: ServerMetrics::default(), log: Arc::new(LogThread::start(file)) }
    }
}

impl RequestRecord {
    /// Creates the record of a request that begins now.
    pub(super) fn begin(reporter: &Arc<RequestReporter>, route: ServedRoute, client: Option<ClientAddress>) -> Self {
        reporter.metrics.begin(route);
        let (reporter, began) = (Arc::clone(reporter), Instant::now());
        Self(Arc::new(OpenRecord { reporter, client, route, began, facts: Mutex::default() }))
    }

    /// Sets the status of the response.
    pub(super) fn set_status(&self, status: StatusCode) {
        self.0.facts().status = Some(status);
    }

    /// Logs the error that ends a streamed response. The log of refused requests has those of other responses.
    pub(super) fn log_error(&self, error: &ApiError) {
        let OpenRecord { reporter, client, route, .. } = &*self.0;
        let client = client.map_or_else(|| "?".to_owned(), |client| client.0.to_string());
        let (status, message) = (error.status(), on_one_line(error.message()));
        reporter.log.add(line_of(status, format!("{client} {} {}: {message}", route.name(), status.as_u16())));
    }

    /// Sets the result of a streamed response, whose headers have status 200 in any case.
    pub(super) fn end_stream(&self, status: StatusCode) {
        self.0.facts().stream_end = Some(status);
    }

    /// Sets the response that the model generates, and counts the tokens of its prompts.
    pub(super) fn set_response(&self, id: &str, model: &str, is_streamed: bool, n_prompt: usize) {
        let mut facts = self.0.facts();
        (facts.id, facts.model) = (Some(id.to_owned()), Some(model.to_owned()));
        (facts.is_streamed, facts.n_prompt) = (is_streamed, n_prompt);
        self.0.reporter.metrics.add_prompt(n_prompt);
    }

    /// Counts a generated token.
    pub(super) fn add_token(&self) {
        let mut facts = self.0.facts();
        facts.n_generated += 1;
        let since_request = facts.first_token.is_none().then(|| self.0.began.elapsed());
        facts.first_token = facts.first_token.or(since_request);
        self.0.reporter.metrics.add_token(since_request);
    }

    /// Adds the finish reason of a choice.
    pub(super) fn add_finish_reason(&self, reason: &'static str) {
        self.0.facts().finish_reasons.push(reason);
    }
}

impl RequestFacts {
    /// Returns the status of the whole response; `None` if the client has closed the connection before its end.
    fn result(&self) -> Option<StatusCode> {
        match self.status {
            Some(status) if self.is_streamed && status.is_success() => self.stream_end,
            status => status,
        }
    }
}

impl OpenRecord {
    fn facts(&self) -> MutexGuard<'_, RequestFacts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for OpenRecord {
    fn drop(&mut self) {
        let (facts, time) = (self.facts().clone(), self.began.elapsed());
        let result = facts.result();
        let status = result.map_or(CLIENT_CLOSED, |status| status.as_u16());
        self.reporter.metrics.end(self.route, status, time);
        let client = self.client.map_or_else(|| "?".to_owned(), |client| client.0.to_string());
        let route = self.route.name();
        let log = &self.reporter.log;
        if result.is_none_or(|status| status.is_success()) && tracing::enabled!(tracing::Level::INFO) {
            let RequestFacts { n_prompt, n_generated, finish_reasons, .. } = &facts;
            let reasons = finish_reasons.join(",");
            log.add(RequestLogLine::Information(format!(
                "{client} {route} {status}: {n_prompt} and {n_generated} tokens in {:.3} s {reasons}",
                time.as_secs_f64()
            )));
        }
        if !log.has_file() {
            return;
        }
        let line = json!({
            "time": jiff::Timestamp::now().to_string(), "id": facts.id, "client": client, "route": route,
            "model": facts.model, "stream": facts.is_streamed, "status": status, "prompt_tokens": facts.n_prompt,
            "completion_tokens": facts.n_generated, "seconds": time.as_secs_f64(),
            "time_to_first_token": facts.first_token.map(|time| time.as_secs_f64()),
            "finish_reasons": facts.finish_reasons,
        });
        log.add(RequestLogLine::Record(line.to_string()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_has_the_status_of_its_end() {
        let check = |status: u16, end: Option<u16>, want: Option<u16>| {
            let code = |status| StatusCode::from_u16(status).ok();
            let facts = RequestFacts {
                is_streamed: true,
                status: code(status),
                stream_end: end.and_then(code),
                ..RequestFacts::default()
            };
            assert_eq!(facts.result(), want.and_then(code), "{status} {end:?}");
        };
        check(200, Some(200), Some(200));
        check(200, Some(503), Some(503));
        check(200, None, None);
        check(429, None, Some(429));
    }
}
