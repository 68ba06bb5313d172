//! The output of workers: stdout and stderr go to the console line by line, to a log file byte by byte, or to both. With
//! `--interactive`, local rank 0 writes to the console itself.
//!
//! The last lines of stderr are kept for the failure report.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, PipeReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use rustix::event::{PollFd, PollFlags, poll};

use crate::console;
use crate::line_splitter::LineSplitter;
use crate::log_dir::AttemptLogDir;
use crate::plan::OutputPlan;
use crate::streams::StdStream;

/// The file of the filtered lines of a stream of all workers.
pub type Filtered = Arc<Mutex<File>>;

/// The destinations of the output of an attempt's workers.
#[derive(Debug)]
pub struct WorkerOutputs {
    plan: OutputPlan,
    logs: AttemptLogDir,
    filtered: [Option<Filtered>; 2],
}

/// The destination of one stream of one worker.
#[derive(Debug)]
pub struct StreamOutput {
    /// The worker's end: a pipe, a log file, or the console.
    pub stdio: Stdio,
    /// The reader of the pipe; `None` if the worker writes to a log file or to the console.
    pub reader: Option<OutputReader>,
}

/// Copies a stream from a pipe to the console, the log file and the filtered file.
#[derive(Debug)]
pub struct OutputReader {
    lines: LineSplitter,
    file: Option<File>,
    sink: LineSink,
}

/// The destination of whole lines.
#[derive(Debug)]
struct LineSink {
    stream: StdStream,
    prefix: String,
    is_on_console: bool,
    filter: Option<(Vec<String>, Filtered)>,
    tail: LineTail,
}

/// The last lines of a stream.
#[derive(Clone, Debug, Default)]
pub struct LineTail(Arc<Mutex<VecDeque<String>>>);

impl WorkerOutputs {
    /// Opens the files that all workers of an attempt share.
    pub fn open(plan: &OutputPlan, logs: &AttemptLogDir) -> io::Result<Self> {
        let file = |stream, is_wanted: bool| {
            let file = is_wanted.then(|| File::create(logs.filtered_file(stream))).transpose()?;
            Ok::<_, io::Error>(file.map(|file| Arc::new(Mutex::new(file))))
        };
        let filtered = [
            file(StdStream::Out, !plan.stdout_filters.0.is_empty())?,
            file(StdStream::Err, !plan.stderr_filters.0.is_empty())?,
        ];
        Ok(Self { plan: plan.clone(), logs: logs.clone(), filtered })
    }

    /// Opens one stream of one worker. `tail` receives its last lines.
    pub fn open_stream(
        &self,
        local_rank: usize,
        stream: StdStream,
        prefix: &str,
        tail: LineTail,
    ) -> io::Result<StreamOutput> {
        if self.plan.is_interactive && local_rank == 0 {
            return Ok(StreamOutput { stdio: Stdio::inherit(), reader: None });
        }
        let is_teed = self.plan.tee.of(local_rank).has(stream);
        let is_redirected = self.plan.redirects.of(local_rank).has(stream);
        let file = || File::create(self.logs.stream_file(local_rank, stream));
        if is_redirected && !is_teed {
            return Ok(StreamOutput { stdio: file()?.into(), reader: None });
        }
        let words = match stream {
            StdStream::Out => &self.plan.stdout_filters.0,
            StdStream::Err => &self.plan.stderr_filters.0,
        };
        let filtered = self.filtered[stream as usize].clone().filter(|_| is_teed);
        let sink = LineSink {
            stream,
            prefix: prefix.to_owned(),
            is_on_console: self.plan.local_ranks_filter.as_ref().is_none_or(|ranks| ranks.0.contains(&local_rank)),
            filter: filtered.map(|file| (words.clone(), file)),
            tail,
        };
        let reader = OutputReader { lines: LineSplitter::default(), file: is_teed.then(file).transpose()?, sink };
        Ok(StreamOutput { stdio: Stdio::piped(), reader: Some(reader) })
    }
}

impl OutputReader {
    /// Reads the stream to its end on a new thread.
    ///
    /// A process outside the process group may hold the pipe open. After the write end of `drain_rx` is closed, the
    /// thread reads what the pipe contains and ends.
    pub fn start(mut self, mut from: impl Read + AsFd + Send + 'static, drain_rx: Arc<PipeReader>) -> JoinHandle<()> {
        thread::spawn(move || {
            let mut bytes = vec![0; 1 << 16];
            let mut n_left = MAX_PIPE_BYTES;
            while let Some(state) = wait_readable(from.as_fd(), drain_rx.as_fd()).filter(|_| n_left > 0) {
                match from.read(&mut bytes) {
                    Ok(0) => break,
                    Ok(n) => {
                        self.write(&bytes[..n]);
                        n_left -= if state == PipeState::Draining { n.min(n_left) } else { 0 };
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(_) => break,
                }
            }
            self.lines.finish(|line| self.sink.write_lines(&[line.to_vec()]));
        })
    }

    /// Writes the bytes of one read. All complete lines go out in one write. Errors are ignored: a full disk does not
    /// stop the worker.
    fn write(&mut self, bytes: &[u8]) {
        if let Some(file) = &mut self.file {
            let _ = file.write_all(bytes);
        }
        let mut lines = Vec::new();
        self.lines.push(bytes, |line| lines.push(line.to_vec()));
        self.sink.write_lines(&lines);
    }
}

/// The largest pipe that the kernel grants an unprivileged process.
const MAX_PIPE_BYTES: usize = 1 << 20;

/// The state of a readable pipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PipeState {
    /// The worker may write more.
    Open,
    /// The remaining bytes are read.
    Draining,
}

/// Waits until the pipe is readable. Returns `None` if it is empty and no more output is expected.
fn wait_readable(from: BorrowedFd, drain_rx: BorrowedFd) -> Option<PipeState> {
    loop {
        let mut both =
            [PollFd::from_borrowed_fd(from, PollFlags::IN), PollFd::from_borrowed_fd(drain_rx, PollFlags::IN)];
        match poll(&mut both, None) {
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return None,
            Ok(_) => {
                let [is_readable, is_draining] = both.map(|fd| !fd.revents().is_empty());
                return is_readable.then_some(if is_draining { PipeState::Draining } else { PipeState::Open });
            }
        }
    }
}

impl LineSink {
    fn write_lines(&self, lines: &[Vec<u8>]) {
        let prefix = self.prefix.as_bytes();
        if self.is_on_console {
            let all: Vec<u8> = lines.iter().flat_map(|line| [prefix, line.as_slice()].concat()).collect();
            console::write(self.stream, &all);
        }
        for line in lines {
            let text = String::from_utf8_lossy(line);
            if let Some((words, file)) = &self.filter
                && words.iter().any(|word| text.contains(word.as_str()))
            {
                let line = [prefix, line.as_slice()].concat();
                let _ = file.lock().unwrap_or_else(PoisonError::into_inner).write_all(&line);
            }
            self.tail.push(&text);
        }
    }
}

impl LineTail {
    const MAX_LINES: usize = 20;
    const MAX_LINE_CHARS: usize = 2000;

    /// Returns the lines, oldest first.
    pub fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    fn push(&self, line: &str) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == Self::MAX_LINES {
            lines.pop_front();
        }
        lines.push_back(line.trim_end().chars().take(Self::MAX_LINE_CHARS).collect());
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::pipe;

    use super::*;

    fn start(prefix: &str, from: PipeReader, drain_rx: PipeReader) -> (LineTail, JoinHandle<()>) {
        let tail = LineTail::default();
        let sink = LineSink {
            stream: StdStream::Out,
            prefix: prefix.into(),
            is_on_console: false,
            filter: None,
            tail: tail.clone(),
        };
        (tail, OutputReader { lines: LineSplitter::default(), file: None, sink }.start(from, Arc::new(drain_rx)))
    }

    #[test]
    fn the_rest_of_a_pipe_is_read_while_another_process_holds_it_open() {
        let ((from, mut to), (drain_rx, drain_tx)) = (pipe().unwrap(), pipe().unwrap());
        to.write_all(b"one\nlast words").unwrap();
        let (tail, reader) = start("", from, drain_rx);
        drop(drain_tx);
        reader.join().unwrap();
        assert_eq!(tail.lines(), ["one", "last words"]);
        drop(to);
    }

    #[test]
    fn a_prefix_may_contain_newlines() {
        let ((from, mut to), (drain_rx, _drain_tx)) = (pipe().unwrap(), pipe().unwrap());
        let (tail, reader) = start("x\ny: ", from, drain_rx);
        to.write_all("aäöü\n".as_bytes()).unwrap();
        drop(to);
        reader.join().unwrap();
        assert_eq!(tail.lines(), ["aäöü"]);
    }
}
