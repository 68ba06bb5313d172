//! The run folder that `wandb sync` uploads.
//!
//! All processes of a run write into one folder: a resumed run continues the `.wandb` file of the process before, after it
//! removes the rows of later steps. So the file holds each step of a run once.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use candlewick_runtime::exit::ExitCode;
use candlewick_text::files::{MAX_GENERATED_FILE_BYTES, read_regular_file, write_durably};
use prost::Message;
use serde_json::{Map, Value};

use super::records::{
    WandbExit, WandbFooter, WandbHeader, WandbHistory, WandbItem, WandbItems, WandbPreempting, WandbRecord,
    WandbRunRecord, WandbStep, WandbVersionInfo,
};
use super::transaction_log::{FILE_HEADER, decode, encode};

/// The metrics of a step, `_step`, `_timestamp` and `_runtime` included.
pub(super) type FileFields = Map<String, Value>;

/// A run folder: `run-DATE_TIME-ID`, or `offline-run-DATE_TIME-ID`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WandbFolder {
    /// The run folder.
    pub(super) path: PathBuf,
    /// The id of the W&B run.
    pub(super) run_id: String,
}

impl WandbFolder {
    /// Returns the newest run folder in `parent` whose id `matches`, if there is one. A name with a dot is that of a replaced
    /// folder.
    pub(super) fn find(parent: &Path, matches: impl Fn(&str) -> bool) -> Option<Self> {
        let entries = fs::read_dir(parent).ok()?;
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let found = names.filter_map(|name| {
            let (_, run_id) = name.strip_prefix("offline-").unwrap_or(&name).strip_prefix("run-")?.split_once('-')?;
            (!run_id.contains('.') && matches(run_id))
                .then(|| Self { path: parent.join(&name), run_id: run_id.to_owned() })
        });
        found.max_by(|a, b| a.path.cmp(&b.path))
    }

    /// Returns the path of the `.wandb` file.
    pub(super) fn file(&self) -> PathBuf {
        self.path.join(format!("run-{}.wandb", self.run_id))
    }

    /// Returns the rows of the `.wandb` file with steps up to `last_step`; none if there is no file.
    pub(super) fn rows(&self, last_step: i64) -> Vec<FileFields> {
        let bytes = read_regular_file(&self.file(), MAX_GENERATED_FILE_BYTES).unwrap_or_default();
        let records = decode(&bytes).into_iter().filter_map(|record| WandbRecord::decode(&record[..]).ok());
        let rows = records.filter_map(|record| Some(fields(&record.history?)));
        rows.filter(|row| step_of(row).is_some_and(|step| step <= last_step)).collect()
    }
}

/// Returns the step of a row.
pub(super) fn step_of(row: &FileFields) -> Option<i64> {
    row.get("_step")?.as_i64()
}

/// The number of records between summaries.
const SUMMARY_INTERVAL: i64 = 50;

/// Writes a `.wandb` file.
#[derive(Debug)]
pub(super) struct WandbFile {
    file: File,
    file_len: usize,
    n_records: i64,
}

impl WandbFile {
    /// Creates or replaces the file of `folder`, with the description of the run and the rows of earlier processes.
    pub(super) fn create(folder: &WandbFolder, run: &WandbRunRecord, rows: &[FileFields]) -> io::Result<Self> {
        fs::create_dir_all(folder.path.join("files"))?;
        let path = folder.file();
        // The marker of `wandb sync`, which would skip the folder.
        let marker = path.with_extension("wandb.synced");
        if marker.exists() {
            fs::remove_file(marker)?;
        }
        let version = WandbVersionInfo { producer: env!("CARGO_PKG_VERSION").to_owned(), min_consumer: String::new() };
        let header = WandbHeader { version_info: Some(version) };
        let mut contents = FILE_HEADER.to_vec();
        let mut n_records = 0;
        let first = [
            WandbRecord { header: Some(header), ..WandbRecord::default() },
            WandbRecord { run: Some(run.clone()), ..WandbRecord::default() },
        ];
        for record in first.into_iter().chain(rows.iter().map(history)) {
            n_records += 1;
            let bytes = encode(contents.len(), &WandbRecord { num: n_records, ..record }.encode_to_vec());
            contents.extend(bytes);
        }
        write_durably(&path, |file| file.write_all(&contents))?;
        let file = OpenOptions::new().append(true).open(&path)?;
        Ok(Self { file, file_len: contents.len(), n_records })
    }

    /// Appends the metrics of a step, and at intervals the summary of the run. The summary of a killed run is as old.
    pub(super) fn append_row(&mut self, row: &FileFields, summary: &FileFields) -> io::Result<()> {
        self.append(history(row))?;
        if self.n_records % SUMMARY_INTERVAL == 0 { self.append_summary(summary) } else { Ok(()) }
    }

    fn append_summary(&mut self, summary: &FileFields) -> io::Result<()> {
        self.append(WandbRecord { summary: Some(items(summary)), ..WandbRecord::default() })
    }

    /// Appends the summary and the end of the run, and syncs the file.
    pub(super) fn finish(&mut self, code: ExitCode, runtime: f64, summary: &FileFields) -> io::Result<()> {
        self.append_summary(summary)?;
        if code == ExitCode::Preempted {
            self.append(WandbRecord { preempting: Some(WandbPreempting {}), ..WandbRecord::default() })?;
        }
        let exit = WandbExit { exit_code: code as i32, runtime: runtime as i32 };
        self.append(WandbRecord { exit: Some(exit), ..WandbRecord::default() })?;
        self.append(WandbRecord { footer: Some(WandbFooter {}), ..WandbRecord::default() })?;
        self.file.sync_all()
    }

    fn append(&mut self, record: WandbRecord) -> io::Result<()> {
        self.n_records += 1;
        let bytes = encode(self.file_len, &WandbRecord { num: self.n_records, ..record }.encode_to_vec());
        self.file_len += bytes.len();
        self.file.write_all(&bytes)
    }
}

/// Returns the items of a map.
pub(super) fn items(fields: &FileFields) -> WandbItems {
    WandbItems { update: fields.iter().map(item).collect() }
}

fn item((key, value): (&String, &Value)) -> WandbItem {
    WandbItem { key: key.clone(), value_json: value.to_string() }
}

fn history(row: &FileFields) -> WandbRecord {
    let step = step_of(row).map(|num| WandbStep { num });
    let history = WandbHistory { item: row.iter().map(item).collect(), step };
    WandbRecord { history: Some(history), ..WandbRecord::default() }
}

fn fields(history: &WandbHistory) -> FileFields {
    let parsed = |item: &WandbItem| Some((item.key.clone(), serde_json::from_str(&item.value_json).ok()?));
    history.item.iter().filter_map(parsed).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    fn row(step: i64) -> FileFields {
        Map::from_iter([("loss".to_owned(), json!(0.5)), ("_step".to_owned(), json!(step))])
    }

    fn folder(parent: &Path, name: &str, run_id: &str) -> WandbFolder {
        WandbFolder { path: parent.join(name), run_id: run_id.to_owned() }
    }

    #[test]
    fn a_resumed_run_replaces_the_rows_of_later_steps() {
        let dir = tempfile::tempdir().unwrap();
        let folder = folder(dir.path(), "offline-run-20260101_000000-abc", "abc");
        let mut file = WandbFile::create(&folder, &WandbRunRecord::default(), &[]).unwrap();
        (1..=5).for_each(|step| file.append_row(&row(step), &row(step)).unwrap());
        file.finish(ExitCode::Failed, 2.0, &row(5)).unwrap();
        fs::write(folder.file().with_extension("wandb.synced"), "").unwrap();

        let rows = folder.rows(3);
        assert_eq!(rows, [row(1), row(2), row(3)]);
        let mut file = WandbFile::create(&folder, &WandbRunRecord::default(), &rows).unwrap();
        file.append_row(&row(4), &row(4)).unwrap();
        let records: Vec<WandbRecord> = decode(&fs::read(folder.file()).unwrap())
            .iter()
            .map(|bytes| WandbRecord::decode(&bytes[..]).unwrap())
            .collect();
        let steps: Vec<i64> =
            records.iter().filter_map(|record| Some(record.history.as_ref()?.step.as_ref()?.num)).collect();
        assert_eq!(steps, [1, 2, 3, 4]);
        assert_eq!(records.iter().map(|record| record.num).collect::<Vec<_>>(), (1..=6).collect::<Vec<_>>());
        assert!(records.iter().all(|record| record.exit.is_none()), "the end of the earlier process is kept");
        assert!(!folder.file().with_extension("wandb.synced").exists(), "`wandb sync` would skip the folder");
    }

    #[test]
    fn a_run_folder_is_found_by_the_id_of_its_run() {
        let dir = tempfile::tempdir().unwrap();
        let names =
            ["offline-run-20260101_000000-abc-12", "run-20260102_000000-abcd", "run-20260102_000000-x.1", "latest-run"];
        names.iter().for_each(|name| fs::create_dir(dir.path().join(name)).unwrap());
        let found = |start| WandbFolder::find(dir.path(), |id| id.starts_with(start)).map(|folder| folder.run_id);
        assert_eq!(found("abc-").as_deref(), Some("abc-12"));
        assert_eq!(found("abcd").as_deref(), Some("abcd"));
        assert_eq!(found("x"), None);
    }
}
