//! Upload of metrics to a remote server, on a thread of its own.
//!
//! The queue is bounded, and the training loop never waits for the network. If the server is unreachable, the thread tries
//! again, and the queue keeps the rows. A full queue or a refusal ends the upload, not the run.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use candlewick_runtime::exit::ExitCode;

use super::http::UploadError;
use crate::metrics::console::Terminal;

/// The largest size of the rows that wait for the server, in bytes.
const MAX_QUEUED: usize = 32 << 20;
/// The largest number of rows of a request.
const MAX_BATCH: usize = 1_000;

/// The times of an upload.
#[derive(Clone, Copy, Debug)]
pub(super) struct UploadTimes {
    /// Time between requests. The servers limit the rate of requests, not of rows.
    interval: Duration,
    /// The wait after the first failed attempt. It doubles with each attempt.
    min_backoff: Duration,
    /// The longest wait before another attempt.
    max_backoff: Duration,
    /// The longest wait for the server at the end of a run.
    finish: Duration,
}

impl Default for UploadTimes {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(10),
            min_backoff: Duration::from_millis(500),
            max_backoff: Duration::from_secs(60),
            finish: Duration::from_secs(10),
        }
    }
}

/// Metrics that a server receives.
pub(super) trait UploadRow: Send + 'static {
    /// Returns the approximate size in memory.
    fn n_bytes(&self) -> usize;
}

/// A run on a remote server.
pub(super) trait RemoteRun: Send + 'static {
    /// The metrics of a record or a step.
    type Row: UploadRow;

    /// Creates or resumes the run, and returns its URL.
    fn open(&mut self) -> Result<String, UploadError>;

    /// Sends rows, or a heartbeat if there are none.
    fn send(&mut self, rows: &[Self::Row]) -> Result<(), UploadError>;

    /// Records the end of the run.
    fn close(&mut self, code: ExitCode) -> Result<(), UploadError>;
}

/// Sends the rows of a run to a server.
#[derive(Debug)]
pub(super) struct Uploader<Row> {
    server: &'static str,
    advice: String,
    times: UploadTimes,
    queue: Arc<UploadQueue<Row>>,
}

/// The rows that wait for the server.
#[derive(Debug)]
struct UploadQueue<Row> {
    state: Mutex<QueueState<Row>>,
    changed: Condvar,
}

#[derive(Debug)]
struct QueueState<Row> {
    rows: VecDeque<Row>,
    n_bytes: usize,
    /// The exit code, and the end of the time for the last requests.
    finish: Option<(ExitCode, Instant)>,
    phase: UploadPhase,
}

/// The state of an upload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UploadPhase {
    Active,
    /// The server has all rows and the end of the run.
    Complete,
    /// The upload has ended before.
    Stopped,
}

impl<Row: UploadRow> Uploader<Row> {
    /// Starts the thread. `advice` is the remedy for rows that the server does not receive. Warns and returns `None` if the
    /// system has no thread.
    pub(super) fn start<R: RemoteRun<Row = Row>>(
        server: &'static str,
        remote: R,
        terminal: Terminal,
        advice: String,
    ) -> Option<Self> {
        Self::start_with(UploadTimes::default(), server, remote, terminal, advice)
    }

    fn start_with<R: RemoteRun<Row = Row>>(
        times: UploadTimes,
        server: &'static str,
        remote: R,
        terminal: Terminal,
        advice: String,
    ) -> Option<Self> {
        let state = QueueState { rows: VecDeque::new(), n_bytes: 0, finish: None, phase: UploadPhase::Active };
        let queue = Arc::new(UploadQueue { state: Mutex::new(state), changed: Condvar::new() });
        let worker = UploadThread {
            server,
            advice: advice.clone(),
            times,
            queue: queue.clone(),
            terminal,
            remote,
            url: None,
            batch: Vec::new(),
            n_failures: 0,
        };
        match thread::Builder::new().name(format!("{server} upload")).spawn(move || worker.run()) {
            Ok(_) => Some(Self { server, advice, times, queue }),
            Err(error) => {
                tracing::warn!("{server}: failed to start the upload: {error}; {advice}");
                None
            }
        }
    }

    /// Queues a row. If the queue is full, the upload ends.
    pub(super) fn push(&self, row: Row) {
        let mut state = self.queue.lock();
        if state.phase != UploadPhase::Active {
            return;
        }
        state.n_bytes += row.n_bytes();
        if state.n_bytes <= MAX_QUEUED {
            state.rows.push_back(row);
            return;
        }
        let n_rows = state.rows.len();
        state.end(UploadPhase::Stopped);
        drop(state);
        let Self { server, advice, .. } = self;
        tracing::warn!("{server}: the upload ended, because {n_rows} rows wait for the server; {advice}");
    }

    /// Requests the upload of the remaining rows and of the end of the run.
    pub(super) fn finish(&self, code: ExitCode) {
        self.queue.lock().finish = Some((code, Instant::now() + self.times.finish));
        self.queue.changed.notify_all();
    }

    /// Waits for the end of the upload, at most for a fixed time after [`Uploader::finish`]. Warns if the server did not
    /// receive everything.
    pub(super) fn wait(&self) {
        let mut state = self.queue.lock();
        let deadline = state.finish.map_or_else(Instant::now, |(_, deadline)| deadline);
        while state.phase == UploadPhase::Active {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { break };
            state = self.queue.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        if state.phase == UploadPhase::Active {
            state.end(UploadPhase::Stopped);
            drop(state);
            let Self { server, advice, .. } = self;
            tracing::warn!("{server}: the server did not receive all metrics; {advice}");
        }
    }
}

impl<Row> UploadQueue<Row> {
    fn lock(&self) -> MutexGuard<'_, QueueState<Row>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for `time`. The end of the run interrupts the wait, unless the caller `is_finishing` already.
    fn wait(&self, time: Duration, is_finishing: bool) -> MutexGuard<'_, QueueState<Row>> {
        let state = self.lock();
        let keeps_waiting = |state: &mut QueueState<Row>| {
            state.phase == UploadPhase::Active && (is_finishing || state.finish.is_none())
        };
        self.changed.wait_timeout_while(state, time, keeps_waiting).unwrap_or_else(PoisonError::into_inner).0
    }
}

impl<Row> QueueState<Row> {
    fn end(&mut self, phase: UploadPhase) {
        self.phase = phase;
        self.rows = VecDeque::new();
    }
}

struct UploadThread<R: RemoteRun> {
    server: &'static str,
    advice: String,
    times: UploadTimes,
    queue: Arc<UploadQueue<R::Row>>,
    terminal: Terminal,
    remote: R,
    /// The URL of the run, once the server has it.
    url: Option<String>,
    /// Rows of the request that is sent or repeated.
    batch: Vec<R::Row>,
    n_failures: u32,
}

impl<R: RemoteRun> UploadThread<R> {
    fn run(mut self) {
        let mut wait = Duration::ZERO;
        let mut is_finishing = false;
        loop {
            let state = self.queue.wait(wait, is_finishing);
            if state.phase != UploadPhase::Active {
                return;
            }
            let finish = state.finish;
            drop(state);
            is_finishing = finish.is_some();
            match self.attempt(finish.map(|(code, _)| code)) {
                Ok(()) if is_finishing => return self.end(UploadPhase::Complete),
                Ok(()) => (wait, self.n_failures) = (self.times.interval, 0),
                Err(UploadError::Temporary { reason, retry_after }) => {
                    wait = self.after_failure(&reason, retry_after);
                    if finish.is_some_and(|(_, deadline)| Instant::now() + wait >= deadline) {
                        tracing::warn!(
                            "{}: the server did not receive all metrics: {reason}; {}",
                            self.server,
                            self.advice
                        );
                        return self.end(UploadPhase::Stopped);
                    }
                }
                Err(UploadError::Refused { reason, .. }) => {
                    tracing::warn!("{}: the upload ended: {reason}; {}", self.server, self.advice);
                    return self.end(UploadPhase::Stopped);
                }
            }
        }
    }

    /// Opens the run if it is not open, sends all queued rows, and records the end of the run if there is one.
    fn attempt(&mut self, finish: Option<ExitCode>) -> Result<(), UploadError> {
        if self.url.is_none() {
            let url = self.remote.open()?;
            self.terminal.line(&format!("{}: {url}", self.server));
            self.url = Some(url);
        }
        let mut has_sent = false;
        while self.fill_batch() || !has_sent {
            self.remote.send(&self.batch)?;
            self.batch.clear();
            has_sent = true;
        }
        finish.map_or(Ok(()), |code| self.remote.close(code))
    }

    /// Takes rows from the queue, unless a batch is waiting. Returns true if there are rows to send.
    fn fill_batch(&mut self) -> bool {
        if self.batch.is_empty() {
            let mut state = self.queue.lock();
            let n_rows = state.rows.len().min(MAX_BATCH);
            self.batch.extend(state.rows.drain(..n_rows));
            state.n_bytes -= self.batch.iter().map(UploadRow::n_bytes).sum::<usize>();
        }
        !self.batch.is_empty()
    }

    /// Returns the wait before the next attempt. Warns of the first failure in a series.
    fn after_failure(&mut self, reason: &str, retry_after: Option<Duration>) -> Duration {
        if self.n_failures == 0 {
            tracing::warn!("{}: {reason}; the run continues, and the upload is tried again", self.server);
        }
        let UploadTimes { min_backoff, max_backoff, .. } = self.times;
        let backoff = min_backoff.saturating_mul(1 << self.n_failures.min(16)).min(max_backoff);
        self.n_failures += 1;
        retry_after.unwrap_or(backoff)
    }

    fn end(&self, phase: UploadPhase) {
        self.queue.lock().end(phase);
        self.queue.changed.notify_all();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;
    use crate::metrics::plan::Console;

    /// A server that responds as the test says, and reports the rows that it received.
    struct Scripted {
        responses: Receiver<Result<(), UploadError>>,
        received: Sender<Vec<usize>>,
    }

    impl UploadRow for usize {
        fn n_bytes(&self) -> usize {
            MAX_QUEUED / 10_000
        }
    }

    impl RemoteRun for Scripted {
        type Row = usize;

        fn open(&mut self) -> Result<String, UploadError> {
            Ok("http://host/run".to_owned())
        }

        fn send(&mut self, rows: &[usize]) -> Result<(), UploadError> {
            self.responses.recv().unwrap()?;
            self.received.send(rows.to_vec()).map_err(|_| UploadError::unexpected("test"))
        }

        fn close(&mut self, _code: ExitCode) -> Result<(), UploadError> {
            self.responses.recv().unwrap()
        }
    }

    struct Test {
        uploader: Uploader<usize>,
        respond: Sender<Result<(), UploadError>>,
        received: Receiver<Vec<usize>>,
    }

    impl Test {
        fn start() -> Self {
            Self::start_with_finish(Duration::from_secs(60))
        }

        /// Starts an upload that waits this long for the server at its end.
        fn start_with_finish(finish: Duration) -> Self {
            let ((respond, responses), (sender, received)) = (channel(), channel());
            let brief = Duration::from_millis(1);
            let times = UploadTimes { interval: brief, min_backoff: brief, max_backoff: brief, finish };
            let terminal = Terminal::new(Console::Quiet, 0, 1);
            let remote = Scripted { responses, received: sender };
            let uploader = Uploader::start_with(times, "test", remote, terminal, "no advice".to_owned()).unwrap();
            Self { uploader, respond, received }
        }

        fn respond(&self, response: Result<(), UploadError>) {
            self.respond.send(response).unwrap();
        }

        fn phase(&self) -> UploadPhase {
            self.uploader.queue.lock().phase
        }

        fn rows(&self) -> Vec<usize> {
            self.received.try_iter().flatten().collect()
        }
    }

    fn temporary() -> Result<(), UploadError> {
        Err(UploadError::Temporary { reason: "HTTP 500".to_owned(), retry_after: None })
    }

    #[test]
    fn rows_arrive_once_and_in_order_after_failures() {
        let test = Test::start();
        for row in 0..MAX_BATCH + 10 {
            test.uploader.push(row);
        }
        (0..3).for_each(|_| test.respond(temporary()));
        (0..2000).for_each(|_| test.respond(Ok(())));
        test.uploader.finish(ExitCode::Ok);
        test.uploader.wait();
        assert_eq!(test.phase(), UploadPhase::Complete);
        assert_eq!(test.rows(), (0..MAX_BATCH + 10).collect::<Vec<_>>());
    }

    #[test]
    fn a_server_without_a_response_is_waited_for_up_to_the_limit() {
        let test = Test::start_with_finish(Duration::from_millis(200));
        test.uploader.push(1);
        let started = Instant::now();
        test.uploader.finish(ExitCode::Ok);
        test.uploader.wait();
        assert_eq!(test.phase(), UploadPhase::Stopped);
        assert!(started.elapsed() >= test.uploader.times.finish);
        test.respond(temporary());
    }

    #[test]
    fn a_refusal_ends_the_upload() {
        let test = Test::start();
        test.respond(Err(UploadError::Refused { status: 401, reason: "HTTP 401".to_owned() }));
        test.uploader.finish(ExitCode::Ok);
        test.uploader.wait();
        assert_eq!(test.phase(), UploadPhase::Stopped);
        test.uploader.push(1);
        assert!(test.uploader.queue.lock().rows.is_empty(), "a row waits for a server that has refused");
    }

    #[test]
    fn a_full_queue_ends_the_upload() {
        let test = Test::start();
        // The thread waits for a response with at most one batch. The limit is a little more than 10,000 rows.
        for row in 0..=10_001 + MAX_BATCH {
            test.uploader.push(row);
        }
        assert_eq!(test.phase(), UploadPhase::Stopped);
        assert!(test.uploader.queue.lock().rows.is_empty(), "the rows of a stopped upload stay in memory");
        test.respond(temporary());
    }
}
