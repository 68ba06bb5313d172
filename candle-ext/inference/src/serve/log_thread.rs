//! Thread that writes the log of requests, so that no request waits for a disk or a pipe.
//!
//! A bounded number of lines wait for it. More are dropped and counted.

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Line of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RequestLogLine {
    /// Error on stderr, about a failed request.
    Failure(String),
    /// Warning on stderr, about a refused request or a late schema.
    Warning(String),
    /// Information on stderr, about an answered request.
    Information(String),
    /// JSON object in the file of `--request-log`.
    Record(String),
}

/// Thread that writes the lines.
pub(super) struct LogThread {
    /// `None` after the end.
    queue: Mutex<Option<SyncSender<RequestLogLine>>>,
    /// Closed by the thread's end.
    end: Mutex<Receiver<()>>,
    n_lost: Arc<AtomicU64>,
    has_file: bool,
}

/// File of the records. After a failure it continues with the next line.
struct RecordFile<W> {
    out: W,
    /// The last line has no end.
    is_torn: bool,
    /// Lines that could not be written since the last one that was.
    n_failed: u64,
}

/// Largest number of waiting lines.
const MAX_WAITING: usize = 4096;

/// Time in which the waiting lines are written at the end.
const END_DEADLINE: Duration = Duration::from_secs(2);

impl LogThread {
    /// Starts the thread, with the file of the records if there is one.
    pub(super) fn start(file: Option<impl Write + Send + 'static>) -> Self {
        let (queue, lines) = sync_channel(MAX_WAITING);
        let (ended, end) = channel();
        let (n_lost, has_file) = (Arc::new(AtomicU64::new(0)), file.is_some());
        let of_thread = Arc::clone(&n_lost);
        let write = move || {
            write_lines(&lines, file, &of_thread);
            drop(ended);
        };
        if let Err(error) = thread::Builder::new().name("request-log".to_owned()).spawn(write) {
            tracing::warn!("failed to start the thread of the request log, nothing is logged: {error}");
        }
        Self { queue: Mutex::new(Some(queue)), end: Mutex::new(end), n_lost, has_file }
    }

    /// Adds a line, or drops it if too many are waiting.
    pub(super) fn add(&self, line: RequestLogLine) {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = queue.as_ref().map(|queue| queue.try_send(line));
        if let Some(Err(TrySendError::Full(_))) = sent {
            self.n_lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns true if there is a file of records.
    pub(super) fn has_file(&self) -> bool {
        self.has_file
    }

    /// Returns the number of lines that were dropped, or not written.
    pub(super) fn n_lost(&self) -> u64 {
        self.n_lost.load(Ordering::Relaxed)
    }

    /// Writes the waiting lines, and ends the thread. Does not wait longer than the deadline.
    pub(super) fn end(&self) {
        drop(self.queue.lock().unwrap_or_else(PoisonError::into_inner).take());
        let _ = self.end.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(END_DEADLINE);
    }
}

fn write_lines(lines: &Receiver<RequestLogLine>, file: Option<impl Write>, n_lost: &AtomicU64) {
    let mut file = file.map(|out| RecordFile { out, is_torn: false, n_failed: 0 });
    let mut n_reported = 0;
    for line in lines {
        match (line, &mut file) {
            (RequestLogLine::Failure(text), _) => tracing::error!("{text}"),
            (RequestLogLine::Warning(text), _) => tracing::warn!("{text}"),
            (RequestLogLine::Information(text), _) => tracing::info!("{text}"),
            (RequestLogLine::Record(text), Some(file)) => {
                let n_failed = u64::from(!file.write(&text));
                n_lost.fetch_add(n_failed, Ordering::Relaxed);
                n_reported += n_failed;
            }
            (RequestLogLine::Record(_), None) => {}
        }
        let n = n_lost.load(Ordering::Relaxed);
        if n > n_reported {
            tracing::warn!("{} lines of the request log were dropped, because writing takes too long", n - n_reported);
            n_reported = n;
        }
    }
}

impl<W: Write> RecordFile<W> {
    /// Appends a line. Returns false if it is not complete; the first failure and the end of failures are logged.
    fn write(&mut self, line: &str) -> bool {
        let text = format!("{}{line}\n", if self.is_torn { "\n" } else { "" });
        let (n_written, result) = write_bytes(&mut self.out, text.as_bytes());
        // A line break alone has ended the torn line.
        self.is_torn = match n_written {
            0 => self.is_torn,
            n => n < text.len() && !(self.is_torn && n == 1),
        };
        match result {
            Ok(()) if self.n_failed > 0 => {
                tracing::warn!("the request log is written again; {} lines are missing", self.n_failed);
                self.n_failed = 0;
            }
            Ok(()) => {}
            Err(error) => {
                if self.n_failed == 0 {
                    tracing::warn!(
                        "failed to write the request log; lines are missing until it can be written: {error}"
                    );
                }
                self.n_failed += 1;
                return false;
            }
        }
        true
    }
}

/// Writes all bytes. Returns the number of written ones.
fn write_bytes(out: &mut impl Write, bytes: &[u8]) -> (usize, std::io::Result<()>) {
    let mut n_written = 0;
    while n_written < bytes.len() {
        match out.write(&bytes[n_written..]) {
            Ok(0) => return (n_written, Err(std::io::ErrorKind::WriteZero.into())),
            Ok(n) => n_written += n,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return (n_written, Err(error)),
        }
    }
    (n_written, out.flush())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io;

    use super::*;

    /// Disk with space for some bytes.
    struct FullDisk {
        written: Vec<u8>,
        n_free: usize,
    }

    impl Write for FullDisk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.n_free == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            let n = bytes.len().min(self.n_free);
            self.written.extend(&bytes[..n]);
            self.n_free -= n;
            Ok(n)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_after_a_full_disk_are_complete() {
        for n_free in 0..20 {
            let out = FullDisk { written: Vec::new(), n_free };
            let mut file = RecordFile { out, is_torn: false, n_failed: 0 };
            let written = [file.write("{\"a\": 1}"), file.write("{\"b\": 2}"), file.write("{\"c\": 3}")];
            assert_eq!(written, [n_free >= 9, n_free >= 18, false], "{n_free}");
            for _ in 0..3 {
                // A byte at a time is free.
                file.out.n_free += 1;
                file.write("{\"d\": 4}");
            }
            file.out.n_free += 100;
            assert!(file.write("{\"e\": 5}") && file.n_failed == 0);
            let text = String::from_utf8(file.out.written).unwrap();
            assert_eq!(text.lines().last(), Some("{\"e\": 5}"), "{text}");
        }
    }

    /// Disk that waits for a permit with each write.
    struct SlowDisk {
        begun: std::sync::mpsc::Sender<()>,
        permits: Receiver<()>,
        written: Arc<Mutex<Vec<u8>>>,
    }

    impl Write for SlowDisk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let _ = self.begun.send(());
            let _ = self.permits.recv();
            self.written.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_that_exceed_the_queue_of_a_slow_disk_are_counted() {
        let ((begun, wait), (permit, permits)) = (channel(), channel());
        let written = Arc::<Mutex<Vec<u8>>>::default();
        let log = LogThread::start(Some(SlowDisk { begun, permits, written: Arc::clone(&written) }));
        let add = |i: usize| log.add(RequestLogLine::Record(i.to_string()));
        add(0);
        wait.recv().unwrap();
        (1..MAX_WAITING + 4).for_each(add);
        assert_eq!(log.n_lost(), 3);
        drop(permit);
        // Each line is written once the queue is closed.
        drop(log.queue.lock().unwrap().take());
        let _ = log.end.lock().unwrap().recv();
        let text = String::from_utf8(written.lock().unwrap().clone()).unwrap();
        assert!(text.lines().map(|line| line.parse::<usize>().unwrap()).eq(0..=MAX_WAITING));
        add(0);
        assert_eq!(log.n_lost(), 3);
    }
}
