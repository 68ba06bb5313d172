//! Log of refused requests, as warnings. Answered ones are in their records.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use axum::http::{Method, StatusCode, Uri};
use candlewick_text::printable::{printable, shortened};

use super::connections::ClientAddress;
use super::log_thread::{LogThread, RequestLogLine};

/// Log of refused requests, with a bounded number of lines.
pub(super) struct AccessLog(Mutex<LogPeriod>);

/// Reason of a refusal, in a response's extensions.
#[derive(Clone, Debug)]
pub(super) struct RefusalReason(pub(super) String);

/// Lines of a period.
struct LogPeriod {
    began: Instant,
    n_logged: usize,
    n_dropped: usize,
}

/// Largest number of logged refusals in a period.
const MAX_LINES: usize = 10;

const PERIOD: Duration = Duration::from_secs(1);

/// Largest number of characters of a path or reason.
const MAX_CHARS: usize = 200;

impl Default for AccessLog {
    fn default() -> Self {
        Self(Mutex::new(LogPeriod { began: Instant::now(), n_logged: 0, n_dropped: 0 }))
    }
}

impl AccessLog {
    /// Logs a refused request, with the reason.
    pub(super) fn log(
        &self,
        client: Option<&ClientAddress>,
        (method, uri): (&Method, &Uri),
        status: StatusCode,
        RefusalReason(reason): &RefusalReason,
        log: &LogThread,
    ) {
        let client = client.map_or_else(|| "?".to_owned(), |client| client.0.to_string());
        let request = format!("{client} \"{method} {}\" {}", on_one_line(uri.path()), status.as_u16());
        let mut period = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(n_dropped) = period.count(Instant::now()) {
            if n_dropped > 0 {
                log.add(RequestLogLine::Warning(format!("{n_dropped} more requests were refused")));
            }
            log.add(line_of(status, format!("{request}: {}", on_one_line(reason))));
        }
    }
}

impl LogPeriod {
    /// Counts a refusal. Returns `None` if the period has too many, else the number that earlier periods dropped.
    fn count(&mut self, now: Instant) -> Option<usize> {
        if now.duration_since(self.began) >= PERIOD {
            (self.began, self.n_logged) = (now, 0);
        }
        if self.n_logged >= MAX_LINES {
            self.n_dropped += 1;
            return None;
        }
        self.n_logged += 1;
        Some(std::mem::take(&mut self.n_dropped))
    }
}

/// Returns the log line of a response with this status.
pub(super) fn line_of(status: StatusCode, text: String) -> RequestLogLine {
    match status {
        StatusCode::INTERNAL_SERVER_ERROR => RequestLogLine::Failure(text),
        _ => RequestLogLine::Warning(text),
    }
}

/// Returns the beginning of a text on one line, for a terminal.
pub(super) fn on_one_line(text: &str) -> String {
    printable(&shortened(text, MAX_CHARS)).replace(['\n', '\t'], " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_period_has_a_bounded_number_of_lines() {
        let began = Instant::now();
        let mut period = LogPeriod { began, n_logged: 0, n_dropped: 0 };
        let n_logged = (0..100).filter(|_| period.count(began).is_some()).count();
        assert_eq!(n_logged, MAX_LINES);
        assert_eq!(period.count(began + PERIOD), Some(90));
        assert_eq!(period.count(began + PERIOD), Some(0));
    }

    #[test]
    fn a_line_has_no_control_characters() {
        assert_eq!(on_one_line("a\n\u{1b}[2Jb"), r"a \u001b[2Jb");
        assert_eq!(on_one_line(&"x".repeat(1000)).chars().count(), MAX_CHARS);
    }
}
