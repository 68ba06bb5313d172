//! Reading of a metrics file that grows.

use std::io::{self, BufRead, BufReader, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use candlewick_text::files::open_regular_file;

use super::rows::MetricRows;

/// Position in a metrics file.
#[derive(Clone, Debug, Default)]
pub(super) struct MetricsTail {
    /// Device and inode of the file. A resumed run replaces the file.
    identity: Option<(u64, u64)>,
    /// Bytes of complete lines that were read.
    offset: u64,
}

/// Last line of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LastLine {
    /// It may be incomplete, because a run is writing it: a line without a line break is read later.
    Growing,
    /// No more is written: a line without a line break is read too.
    Final,
}

impl MetricsTail {
    /// Adds the lines that are new since the last call. Returns true if `rows` has changed. A replaced or truncated file
    /// is read from its start.
    pub(super) fn read_into(&mut self, path: &Path, rows: &mut MetricRows, last: LastLine) -> io::Result<bool> {
        let file = match open_regular_file(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(self.restart(None, rows)),
            Err(error) => return Err(error),
        };
        let metadata = file.metadata()?;
        let identity = Some((metadata.dev(), metadata.ino()));
        let is_other = self.identity != identity || metadata.len() < self.offset;
        let mut has_changed = is_other && self.restart(identity, rows);
        let mut reader = BufReader::new(file);
        reader.seek(SeekFrom::Start(self.offset))?;
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line)? > 0 {
            let is_complete = line.ends_with(b"\n");
            if !is_complete && (last == LastLine::Growing || !is_json(&line)) {
                break;
            }
            self.offset += line.len() as u64;
            rows.push(&line);
            has_changed = true;
            line.clear();
        }
        Ok(has_changed)
    }

    fn restart(&mut self, identity: Option<(u64, u64)>, rows: &mut MetricRows) -> bool {
        let had_rows = !rows.is_empty();
        *self = Self { identity, offset: 0 };
        *rows = MetricRows::default();
        had_rows
    }
}

/// Returns true for a whole JSON value. The last line of a run that was killed may be incomplete.
fn is_json(line: &[u8]) -> bool {
    serde_json::from_slice::<serde::de::IgnoredAny>(line).is_ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::fs;

    fn steps(rows: &MetricRows) -> Vec<u64> {
        rows.series("loss").iter().map(|point| point.step).collect()
    }

    #[test]
    fn new_lines_are_read_when_they_are_complete() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let (mut tail, mut rows) = (MetricsTail::default(), MetricRows::default());
        let mut check = |text: &str, last: LastLine, has_changed: bool, want: &[u64]| {
            fs::OpenOptions::new().create(true).append(true).open(&path).unwrap();
            let old = fs::read_to_string(&path).unwrap();
            let mut file = fs::OpenOptions::new().append(true).open(&path).unwrap();
            io::Write::write_all(&mut file, text.as_bytes()).unwrap();
            assert_eq!(tail.read_into(&path, &mut rows, last).unwrap(), has_changed, "{old}{text}");
            assert_eq!((steps(&rows), rows.malformed()), (want.to_vec(), &[][..]), "{old}{text}");
        };
        check("{\"iter\":1,\"loss\":1.0}\n{\"iter\":2,\"lo", LastLine::Growing, true, &[1]);
        check("", LastLine::Final, false, &[1]);
        check("ss\":1.0}", LastLine::Growing, false, &[1]);
        check("", LastLine::Final, true, &[1, 2]);
        check("\n{\"iter\":3,\"loss\":1.0}\n", LastLine::Growing, true, &[1, 2, 3]);
        check("", LastLine::Growing, false, &[1, 2, 3]);
    }

    #[test]
    fn a_file_that_a_resumed_run_replaces_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let (mut tail, mut rows) = (MetricsTail::default(), MetricRows::default());
        let mut read = |rows: &mut MetricRows| tail.read_into(&path, rows, LastLine::Growing).unwrap();
        assert!(!read(&mut rows), "no file yet");
        fs::write(&path, "{\"iter\":1,\"loss\":1.0}\n{\"iter\":2,\"loss\":1.0}\n").unwrap();
        assert!(read(&mut rows));
        let other = dir.path().join("other");
        fs::write(&other, "{\"iter\":1,\"loss\":1.0}\n{\"iter\":5,\"loss\":1.0}\n{\"iter\":6,\"loss\":1.0}\n").unwrap();
        fs::rename(&other, &path).unwrap();
        assert!(read(&mut rows));
        assert_eq!(steps(&rows), [1, 5, 6]);
        fs::write(&path, "").unwrap();
        assert!(read(&mut rows));
        assert_eq!(steps(&rows), [0; 0]);
    }

    #[test]
    fn a_device_is_no_metrics_file() {
        let (mut tail, mut rows) = (MetricsTail::default(), MetricRows::default());
        assert!(tail.read_into(Path::new("/dev/zero"), &mut rows, LastLine::Final).is_err());
    }
}
