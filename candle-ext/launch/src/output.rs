//! Where a worker's stream goes: to the console line by line, to a log file byte by byte, or to both. The last lines are
//! kept for the report of a failure.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use crate::lines::Lines;
use crate::logs::AttemptLogs;
use crate::plan::OutputPlan;
use crate::streams::Stream;

/// The lines that were picked out of a stream of all workers.
pub type Filtered = Arc<Mutex<File>>;

/// Where the streams of an attempt's workers go.
#[derive(Debug)]
pub struct Outlets {
    plan: OutputPlan,
    logs: AttemptLogs,
    filtered: [Option<Filtered>; 2],
}

/// What becomes of one stream of one worker.
#[derive(Debug)]
pub struct Outlet {
    /// What the worker is given to write to.
    pub stdio: Stdio,
    /// Takes the other end of a pipe, unless the worker writes to a file itself.
    pub pump: Option<Pump>,
}

/// Carries a stream from a pipe to where it belongs.
#[derive(Debug)]
pub struct Pump {
    stream: Stream,
    lines: Lines,
    /// The length of what stands before a line.
    n_prefix: usize,
    is_shown: bool,
    file: Option<File>,
    filter: Option<(Vec<String>, Filtered)>,
    tail: Tail,
}

/// The last lines of a stream.
#[derive(Clone, Debug, Default)]
pub struct Tail(Arc<Mutex<VecDeque<String>>>);

impl Outlets {
    /// Opens what all workers of an attempt share.
    pub fn open(plan: &OutputPlan, logs: &AttemptLogs) -> io::Result<Self> {
        let file = |stream, is_wanted: bool| {
            let file = is_wanted.then(|| File::create(logs.filtered(stream))).transpose()?;
            Ok::<_, io::Error>(file.map(|file| Arc::new(Mutex::new(file))))
        };
        let filtered = [
            file(Stream::Out, !plan.stdout_filters.0.is_empty())?,
            file(Stream::Err, !plan.stderr_filters.0.is_empty())?,
        ];
        Ok(Self { plan: plan.clone(), logs: logs.clone(), filtered })
    }

    /// Opens one stream of one worker. `tail` gets its last lines.
    pub fn outlet(&self, local_rank: usize, stream: Stream, prefix: &str, tail: Tail) -> io::Result<Outlet> {
        let is_teed = self.plan.tee.of(local_rank).has(stream);
        let is_redirected = self.plan.redirects.of(local_rank).has(stream);
        let file = || File::create(self.logs.stream(local_rank, stream));
        if is_redirected && !is_teed {
            return Ok(Outlet { stdio: file()?.into(), pump: None });
        }
        let words = match stream {
            Stream::Out => &self.plan.stdout_filters.0,
            Stream::Err => &self.plan.stderr_filters.0,
        };
        let filtered = self.filtered[stream as usize].clone().filter(|_| is_teed);
        let pump = Pump {
            stream,
            lines: Lines::new(prefix),
            n_prefix: prefix.len(),
            is_shown: self.plan.shown.as_ref().is_none_or(|shown| shown.0.contains(&local_rank)),
            file: is_teed.then(file).transpose()?,
            filter: filtered.map(|file| (words.clone(), file)),
            tail,
        };
        Ok(Outlet { stdio: Stdio::piped(), pump: Some(pump) })
    }
}

impl Pump {
    /// Reads to the end of the stream on a thread of its own.
    pub fn start(mut self, mut from: impl Read + Send + 'static) -> JoinHandle<()> {
        thread::spawn(move || {
            let mut bytes = vec![0; 1 << 16];
            loop {
                match from.read(&mut bytes) {
                    Ok(0) => break,
                    Ok(n) => self.carry(&bytes[..n]),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(_) => break,
                }
            }
            self.finish();
        })
    }

    /// Whole lines of one read go out in one write. A console or disk that takes no more must not stop the worker.
    fn carry(&mut self, bytes: &[u8]) {
        if let Some(file) = &mut self.file {
            let _ = file.write_all(bytes);
        }
        let mut out = Vec::new();
        self.lines.push(bytes, |line| out.extend_from_slice(line));
        self.show(&out);
    }

    fn finish(&mut self) {
        let mut out = Vec::new();
        self.lines.finish(|line| out.extend_from_slice(line));
        self.show(&out);
    }

    fn show(&self, whole_lines: &[u8]) {
        if self.is_shown {
            let _ = write_to_console(self.stream, whole_lines);
        }
        for line in whole_lines.split_inclusive(|byte| *byte == b'\n') {
            let text = String::from_utf8_lossy(line);
            if let Some((words, file)) = &self.filter
                && words.iter().any(|word| text.contains(word.as_str()))
            {
                let _ = file.lock().unwrap_or_else(PoisonError::into_inner).write_all(line);
            }
            self.tail.push(&text[self.n_prefix.min(text.len())..]);
        }
    }
}

fn write_to_console(stream: Stream, bytes: &[u8]) -> io::Result<()> {
    match stream {
        Stream::Out => {
            let mut out = io::stdout().lock();
            out.write_all(bytes)?;
            out.flush()
        }
        Stream::Err => io::stderr().lock().write_all(bytes),
    }
}

impl Tail {
    const N_LINES: usize = 20;
    const LONGEST: usize = 2000;

    /// Returns the lines, the oldest first.
    pub fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    fn push(&self, line: &str) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == Self::N_LINES {
            lines.pop_front();
        }
        lines.push_back(line.trim_end().chars().take(Self::LONGEST).collect());
    }
}
