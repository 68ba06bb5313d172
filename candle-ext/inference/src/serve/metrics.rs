//! Counters and histograms of the server, in Prometheus's text format.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Content type of Prometheus's text format.
pub(super) const METRICS_CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// ServedRoute of a request. Paths that are not served are one route, so that a client cannot add any.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ServedRoute {
    Chat,
    Completions,
    Models,
    Health,
    Metrics,
    Other,
}

impl ServedRoute {
    /// Returns the route of a path.
    pub(super) fn of(path: &str) -> Self {
        match path {
            "/v1/chat/completions" => Self::Chat,
            "/v1/completions" => Self::Completions,
            "/health" => Self::Health,
            "/metrics" => Self::Metrics,
            path if path == "/v1/models" || path.starts_with("/v1/models/") => Self::Models,
            _ => Self::Other,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Models => "/v1/models",
            Self::Health => "/health",
            Self::Metrics => "/metrics",
            Self::Other => "other",
        }
    }

    /// Returns true if the model answers.
    pub(super) fn generates(self) -> bool {
        matches!(self, Self::Chat | Self::Completions)
    }
}

/// Metrics of the server since its start.
#[derive(Default)]
pub(super) struct ServerMetrics {
    /// Answered requests by route and status.
    requests: Mutex<BTreeMap<(ServedRoute, u16), u64>>,
    /// Requests for which the model generates, or that wait for it.
    in_flight: AtomicUsize,
    n_prompt_tokens: AtomicU64,
    n_generated_tokens: AtomicU64,
    first_token: Mutex<DurationHistogram>,
    durations: Mutex<BTreeMap<ServedRoute, DurationHistogram>>,
}

/// Sequences of the model's worker.
#[derive(Default)]
pub(super) struct WorkerGauges {
    pub(super) n_running: AtomicUsize,
    /// Sequences that have left the queue, and wait for space.
    pub(super) n_waiting: AtomicUsize,
}

/// Upper bounds of a histogram's buckets, in seconds.
const BOUNDS: [f64; 14] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

/// Counts of durations in buckets.
#[derive(Clone, Debug, Default)]
struct DurationHistogram {
    n_up_to: [u64; BOUNDS.len()],
    n: u64,
    sum: f64,
}

impl DurationHistogram {
    fn add(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        self.n_up_to.iter_mut().zip(BOUNDS).for_each(|(n, bound)| *n += u64::from(seconds <= bound));
        (self.n, self.sum) = (self.n + 1, self.sum + seconds);
    }

    /// Writes the samples of a histogram. `labels` ends with a comma unless it is empty.
    fn write(&self, text: &mut String, name: &str, labels: &str) {
        let bounds = BOUNDS.iter().map(f64::to_string).chain(["+Inf".to_owned()]);
        for (bound, n) in bounds.zip(self.n_up_to.iter().chain([&self.n])) {
            let _ = writeln!(text, "{name}_bucket{{{labels}le=\"{bound}\"}} {n}");
        }
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.trim_end_matches(',')) };
        let _ = writeln!(text, "{name}_sum{labels} {}\n{name}_count{labels} {}", self.sum, self.n);
    }
}

impl ServerMetrics {
    /// Counts a request that has begun.
    pub(super) fn begin(&self, route: ServedRoute) {
        self.in_flight.fetch_add(usize::from(route.generates()), Ordering::Relaxed);
    }

    /// Counts a request that has ended after `time`.
    pub(super) fn end(&self, route: ServedRoute, status: u16, time: Duration) {
        self.in_flight.fetch_sub(usize::from(route.generates()), Ordering::Relaxed);
        *locked(&self.requests).entry((route, status)).or_default() += 1;
        if route.generates() && status == 200 {
            locked(&self.durations).entry(route).or_default().add(time);
        }
    }

    /// Counts the tokens of a request's prompts.
    pub(super) fn add_prompt(&self, n_tokens: usize) {
        self.n_prompt_tokens.fetch_add(n_tokens as u64, Ordering::Relaxed);
    }

    /// Counts a generated token. `since_request` is the time if it is the first of its request.
    pub(super) fn add_token(&self, since_request: Option<Duration>) {
        self.n_generated_tokens.fetch_add(1, Ordering::Relaxed);
        if let Some(time) = since_request {
            locked(&self.first_token).add(time);
        }
    }

    /// Returns all metrics. `n_queued` is the number of sequences in the queue, and `n_lost` that of lost lines of the log.
    pub(super) fn text(&self, worker: &WorkerGauges, n_queued: usize, n_lost: u64) -> String {
        let mut text = String::new();
        head(&mut text, "requests_total", "counter", "Requests that have ended.");
        for ((route, status), n) in &*locked(&self.requests) {
            let _ = writeln!(text, "candlewick_requests_total{{route=\"{}\",status=\"{status}\"}} {n}", route.name());
        }
        let load = |count: &AtomicUsize| count.load(Ordering::Relaxed) as u64;
        for (name, kind, help, value) in [
            ("requests_in_flight", "gauge", "Chats and completions that have not ended.", load(&self.in_flight)),
            ("sequences_running", "gauge", "Sequences of the current batch.", load(&worker.n_running)),
            (
                "sequences_waiting",
                "gauge",
                "Sequences that wait for the model.",
                load(&worker.n_waiting) + n_queued as u64,
            ),
            ("prompt_tokens_total", "counter", "Tokens of prompts.", self.n_prompt_tokens.load(Ordering::Relaxed)),
            ("generated_tokens_total", "counter", "Generated tokens.", self.n_generated_tokens.load(Ordering::Relaxed)),
            ("request_log_lost_lines_total", "counter", "Lines of the request log that are not written.", n_lost),
        ] {
            head(&mut text, name, kind, help);
            let _ = writeln!(text, "candlewick_{name} {value}");
        }
        let name = "time_to_first_token_seconds";
        head(&mut text, name, "histogram", "Time from a request to its first token.");
        locked(&self.first_token).write(&mut text, &format!("candlewick_{name}"), "");
        let name = "request_duration_seconds";
        head(&mut text, name, "histogram", "Time of chats and completions with status 200, to their last token.");
        for (route, histogram) in &*locked(&self.durations) {
            histogram.write(&mut text, &format!("candlewick_{name}"), &format!("route=\"{}\",", route.name()));
        }
        text
    }
}

fn head(text: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(text, "# HELP candlewick_{name} {help}\n# TYPE candlewick_{name} {kind}");
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative() {
        let metrics = ServerMetrics::default();
        for (route, status, millis) in
            [(ServedRoute::Chat, 200, 4), (ServedRoute::Chat, 200, 40_000), (ServedRoute::Chat, 400, 1)]
        {
            metrics.begin(route);
            metrics.end(route, status, Duration::from_millis(millis));
        }
        metrics.begin(ServedRoute::Completions);
        metrics.begin(ServedRoute::Health);
        metrics.add_prompt(5);
        metrics.add_token(Some(Duration::from_millis(20)));
        metrics.add_token(None);
        let text = metrics.text(&WorkerGauges::default(), 3, 4);
        for line in [
            "# TYPE candlewick_requests_total counter",
            "candlewick_requests_total{route=\"/v1/chat/completions\",status=\"200\"} 2",
            "candlewick_requests_total{route=\"/v1/chat/completions\",status=\"400\"} 1",
            "candlewick_requests_in_flight 1",
            "candlewick_sequences_waiting 3",
            "candlewick_prompt_tokens_total 5",
            "candlewick_request_log_lost_lines_total 4",
            "candlewick_generated_tokens_total 2",
            "candlewick_time_to_first_token_seconds_bucket{le=\"0.01\"} 0",
            "candlewick_time_to_first_token_seconds_bucket{le=\"0.025\"} 1",
            "candlewick_time_to_first_token_seconds_count 1",
            "candlewick_request_duration_seconds_bucket{route=\"/v1/chat/completions\",le=\"0.005\"} 1",
            "candlewick_request_duration_seconds_bucket{route=\"/v1/chat/completions\",le=\"60\"} 2",
            "candlewick_request_duration_seconds_bucket{route=\"/v1/chat/completions\",le=\"+Inf\"} 2",
            "candlewick_request_duration_seconds_sum{route=\"/v1/chat/completions\"} 40.004",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in {text}");
        }
    }

    #[test]
    fn paths_that_are_not_served_are_one_route() {
        for (path, want) in [
            ("/v1/chat/completions", "/v1/chat/completions"),
            ("/v1/models/owner/name", "/v1/models"),
            ("/v1/modelsx", "other"),
            ("/v1/embeddings", "other"),
            ("/", "other"),
        ] {
            assert_eq!(ServedRoute::of(path).name(), want);
        }
    }
}
