//! metrics.jsonl: one JSON object per line.
//!
//! A run that starts at step 0 creates a new file; [`super::earlier_files`] renames an existing one. A run that resumes after
//! step N appends to the file, after it removes the lines of later steps and an incomplete last line. So a file holds each
//! step of a run once, in order.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use candlewick_runtime::exit::ExitCode;
use candlewick_text::files::{MAX_GENERATED_FILE_BYTES, open_regular_file, read_regular_file, write_durably};
use serde::Serialize;
use serde_json::Value;

use super::description::RunDescription;
use super::record::CheckpointRecord;
use super::tracker::{MetricsRecord, RecordKind, RunStart, Tracker};

/// Appends records to a metrics file.
#[derive(Debug)]
pub(super) struct MetricsFile {
    path: PathBuf,
    file: File,
}

/// Appends sample generations to `samples.jsonl`, with the rules of a metrics file.
#[derive(Debug)]
pub(super) struct SamplesFile(MetricsFile);

impl SamplesFile {
    /// Opens the file for a run that begins at `start`.
    pub(super) fn open(path: &Path, start: RunStart) -> io::Result<Self> {
        MetricsFile::open(path, start).map(Self)
    }
}

impl Tracker for SamplesFile {
    fn destination(&self) -> PathBuf {
        self.0.destination()
    }

    /// Writes nothing.
    fn describe(&mut self, _start: RunStart, _run: &RunDescription) -> io::Result<()> {
        Ok(())
    }

    fn log(&mut self, record: &MetricsRecord) -> io::Result<()> {
        if record.kind == RecordKind::Samples { self.0.append(&record.fields) } else { Ok(()) }
    }

    fn finish(&mut self, _code: ExitCode) -> io::Result<()> {
        Ok(())
    }
}

impl MetricsFile {
    /// Opens the file for a run that begins at `start`.
    pub(super) fn open(path: &Path, start: RunStart) -> io::Result<Self> {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        match start {
            _ if !path.exists() => {}
            // A pipe or a device is opened as it is. The open of a pipe would wait for its reader.
            _ if !path.is_file() => require_reader(path)?,
            RunStart::Fresh => {}
            RunStart::Resumed(step) => cut_after(path, step)?,
        }
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(Self { path: path.to_owned(), file })
    }

    /// Writes one line with a single call.
    fn append(&mut self, record: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(record)?;
        line.push(b'\n');
        self.file.write_all(&line)
    }
}

impl Tracker for MetricsFile {
    fn destination(&self) -> PathBuf {
        self.path.clone()
    }

    /// Writes nothing: run.json has the description.
    fn describe(&mut self, _start: RunStart, _run: &RunDescription) -> io::Result<()> {
        Ok(())
    }

    /// Sample generations have a file of their own.
    fn log(&mut self, record: &MetricsRecord) -> io::Result<()> {
        if record.kind == RecordKind::Samples { Ok(()) } else { self.append(&record.fields) }
    }

    fn finish(&mut self, _code: ExitCode) -> io::Result<()> {
        Ok(())
    }
}

/// Fails for a pipe that no process reads.
fn require_reader(path: &Path) -> io::Result<()> {
    let opened = OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(path);
    match opened {
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => {
            Err(io::Error::other("it is a pipe that no process reads"))
        }
        opened => opened.map(drop),
    }
}

/// Returns the records of a metrics file up to a step; none if there is no such file.
pub(super) fn records_until(path: &Path, last_step: usize) -> Vec<MetricsRecord> {
    let text = read_regular_file(path, MAX_GENERATED_FILE_BYTES).unwrap_or_default();
    let records = text.split(|byte| *byte == b'\n').filter_map(MetricsRecord::parse);
    records.filter(|record| record.step <= last_step).collect()
}

/// Returns the checkpoint folders that a metrics file records.
pub(super) fn saved_checkpoints(path: &Path) -> Vec<PathBuf> {
    let text = read_regular_file(path, MAX_GENERATED_FILE_BYTES).unwrap_or_default();
    // Most lines are of steps, and are not parsed.
    let lines = text.split(|byte| *byte == b'\n').filter(|line| line.windows(8).any(|part| part == b"\"saved\":"));
    let record = |line| serde_json::from_slice::<CheckpointRecord>(line).ok();
    lines.filter_map(record).map(|record| record.saved).collect()
}

/// Rewrites the file without lines after `step` and without malformed lines.
fn cut_after(path: &Path, step: usize) -> io::Result<()> {
    let mut reader = BufReader::new(open_regular_file(path)?);
    write_durably(path, |kept| {
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line)? > 0 {
            let record: Option<Value> = serde_json::from_slice(&line).ok();
            let iter = record.as_ref().and_then(|record| record.get("iter")?.as_u64());
            if line.ends_with(b"\n") && iter.is_some_and(|iter| iter <= step as u64) {
                kept.write_all(&line)?;
            }
            line.clear();
        }
        Ok(())
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    fn record(path: &Path, start: RunStart, steps: impl IntoIterator<Item = usize>) {
        let mut file = MetricsFile::open(path, start).unwrap();
        steps.into_iter().for_each(|step| file.append(&json!({"iter": step})).unwrap());
    }

    #[track_caller]
    fn check(path: &Path, want: &[usize]) {
        let text = fs::read_to_string(path).unwrap();
        let steps: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(steps, want.iter().map(|step| json!({"iter": step})).collect::<Vec<_>>());
    }

    #[test]
    fn a_resumed_run_replaces_the_lines_after_its_step() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/er/metrics.jsonl");
        record(&path, RunStart::Fresh, 1..=5);
        record(&path, RunStart::Resumed(3), 4..=6);
        check(&path, &[1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn the_records_of_a_file_are_read_up_to_a_step() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        fs::write(&path, "{\"iter\":1,\"loss\":0.5}\nbroken\n{\"iter\":2,\"loss\":0.25}\n{\"iter\":3}\n{\"it").unwrap();
        let records = records_until(&path, 2);
        let scalars: Vec<_> = records.iter().map(|record| (record.step, record.scalars()[0].1)).collect();
        assert_eq!(scalars, [(1, 0.5), (2, 0.25)]);
        assert_eq!(records_until(&dir.path().join("none"), 2), []);
    }

    #[test]
    fn incomplete_and_malformed_lines_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        fs::write(&path, b"{\"iter\":1}\n{\"iter\":2}\n\xff\xfe\n{\"iter\":3}").unwrap();
        record(&path, RunStart::Resumed(3), [4]);
        check(&path, &[1, 2, 4]);
    }

    #[test]
    fn resuming_without_a_file_creates_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        record(&path, RunStart::Resumed(7), [8]);
        check(&path, &[8]);
    }
}
