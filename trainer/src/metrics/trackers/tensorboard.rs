//! TensorBoard's event files.
//!
//! A run that resumes after step N writes a new file, whose first event lets TensorBoard discard the earlier events of later
//! steps.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use candlewick_runtime::exit::ExitCode;
use crc_fast::CrcAlgorithm::Crc32Iscsi;
use prost::Message;

use super::event::{
    EVENT_FILE_VERSION, EventSummary, PluginData, SESSION_START, STRING_TENSOR, SessionLog, SummaryMetadata,
    SummaryValue, TensorBoardEvent, TensorProto, TensorShape,
};
use crate::metrics::description::RunDescription;
use crate::metrics::host::HostInfo;
use crate::metrics::tracker::{MetricsRecord, RunStart, Tracker};

/// Writes the metrics of a run into an event file.
#[derive(Debug)]
pub(super) struct TensorBoard {
    folder: PathBuf,
    file: Option<File>,
}

impl TensorBoard {
    /// Returns a tracker that writes into `folder`.
    pub(super) fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), file: None }
    }

    fn write(&mut self, event: &TensorBoardEvent) -> io::Result<()> {
        self.file.as_mut().map_or(Ok(()), |file| file.write_all(&tfrecord(&event.encode_to_vec())))
    }
}

impl Tracker for TensorBoard {
    fn destination(&self) -> PathBuf {
        self.folder.clone()
    }

    fn describe(&mut self, start: RunStart, run: &RunDescription) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        self.file = Some(File::create_new(self.folder.join(file_name(&self.folder)?))?);
        let version = TensorBoardEvent { file_version: Some(EVENT_FILE_VERSION.to_owned()), ..now(0) };
        self.write(&version)?;
        if let RunStart::Resumed(step) = start {
            let log = SessionLog { status: SESSION_START };
            self.write(&TensorBoardEvent { session_log: Some(log), ..now(step + 1) })?;
        }
        let summary = EventSummary { value: vec![text("run", &markdown(run))] };
        self.write(&TensorBoardEvent { summary: Some(summary), ..now(start.step()) })
    }

    fn log(&mut self, record: &MetricsRecord) -> io::Result<()> {
        let scalar = |(tag, value)| SummaryValue { tag, simple_value: Some(value as f32), ..SummaryValue::default() };
        let texts = record.texts();
        let texts = texts.iter().map(|(tag, value)| text(tag, value));
        let summary = EventSummary { value: record.scalars().into_iter().map(scalar).chain(texts).collect() };
        if summary.value.is_empty() {
            return Ok(());
        }
        let wall_time = record.time.as_millisecond() as f64 / 1e3;
        self.write(&TensorBoardEvent { summary: Some(summary), wall_time, ..now(record.step) })
    }

    fn finish(&mut self, _code: ExitCode) -> io::Result<()> {
        self.file.take().map_or(Ok(()), |file| file.sync_all())
    }
}

/// Returns an event of `step` with the current time and no contents.
fn now(step: usize) -> TensorBoardEvent {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    TensorBoardEvent { wall_time: since.as_secs_f64(), step: step as i64, ..TensorBoardEvent::default() }
}

/// Returns the name of a new event file, which sorts after those in `folder`: TensorBoard reads the files in the order of
/// their names.
fn file_name(folder: &Path) -> io::Result<String> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let second = |name: &str| name.strip_prefix(PREFIX)?.split('.').next()?.parse::<u64>().ok();
    let names = fs::read_dir(folder)?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let last = names.filter_map(|name| second(&name)).max().unwrap_or(0);
    let host = HostInfo::this().name.unwrap_or_else(|| "localhost".to_owned()).replace('/', "-");
    Ok(format!("{PREFIX}{:010}.{host}.{}", since.max(last + 1), std::process::id()))
}

const PREFIX: &str = "events.out.tfevents.";

/// Frames data as a TFRecord: the length, its masked CRC, the data, their masked CRC, all in little endian.
fn tfrecord(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    [&length, &masked_crc(&length).to_le_bytes()[..], data, &masked_crc(data).to_le_bytes()].concat()
}

/// Returns the CRC-32C of data, rotated and shifted as in TensorFlow's `lib/hash/crc32c.h`.
fn masked_crc(data: &[u8]) -> u32 {
    let crc = crc_fast::checksum(Crc32Iscsi, data) as u32;
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Returns the value of a text in the format of TensorBoard's plugin `text`.
fn text(tag: &str, text: &str) -> SummaryValue {
    let plugin = PluginData { plugin_name: "text".to_owned() };
    let tensor = TensorProto {
        dtype: STRING_TENSOR,
        tensor_shape: Some(TensorShape {}),
        string_val: vec![text.as_bytes().to_vec()],
    };
    SummaryValue {
        tag: tag.to_owned(),
        simple_value: None,
        tensor: Some(tensor),
        metadata: Some(SummaryMetadata { plugin_data: Some(plugin) }),
    }
}

/// Formats the description of a run as a table.
fn markdown(run: &RunDescription) -> String {
    let rows = run.parameters_by_name();
    let text = |value: &serde_json::Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let rows = rows.iter().map(|(name, value)| format!("| {name} | {} |\n", text(value).replace('|', "\\|")));
    format!("| name | value |\n| --- | --- |\n{}", rows.collect::<String>())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::metrics::record::{CheckpointRecord, EvalRecord, StepRecord};
    use crate::metrics::tracker::RecordKind;
    use serde_json::json;

    /// Returns the events of the files in `folder`, after a check of all CRCs.
    fn events(folder: &Path) -> Vec<TensorBoardEvent> {
        let mut paths: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths.iter().flat_map(|path| events_of(&fs::read(path).unwrap())).collect()
    }

    fn events_of(mut bytes: &[u8]) -> Vec<TensorBoardEvent> {
        let mut events = Vec::new();
        while !bytes.is_empty() {
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let data = &bytes[12..12 + length];
            assert_eq!(tfrecord(data), bytes[..length + 16]);
            events.push(TensorBoardEvent::decode(data).unwrap());
            bytes = &bytes[length + 16..];
        }
        events
    }

    fn record(step: usize) -> MetricsRecord {
        MetricsRecord::of(RecordKind::Step, &json!({"iter": step, "loss": step as f64 / 2.0})).unwrap()
    }

    fn run(folder: &Path, start: RunStart, steps: impl IntoIterator<Item = usize>) {
        let mut tracker = TensorBoard::new(folder);
        tracker.describe(start, &RunDescription { parameters: 12, ..RunDescription::default() }).unwrap();
        steps.into_iter().for_each(|step| tracker.log(&record(step)).unwrap());
        tracker.finish(ExitCode::Ok).unwrap();
    }

    /// The checksum of "123456789" is the check value of CRC-32C in the catalogue of CRC algorithms.
    #[test]
    fn the_mask_rotates_and_shifts_the_crc() {
        assert_eq!(crc_fast::checksum(Crc32Iscsi, b"123456789"), 0xe306_9283);
        assert_eq!(masked_crc(b"123456789"), 0xe306_9283_u32.rotate_right(15).wrapping_add(0xa282_ead8));
    }

    #[test]
    fn an_event_file_has_version_description_and_scalars() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("tensorboard");
        run(&folder, RunStart::Fresh, 1..=2);
        let events = events(&folder);
        assert_eq!(events[0].file_version.as_deref(), Some("brain.Event:2"));
        let described = &events[1].summary.as_ref().unwrap().value[0];
        let text = String::from_utf8(described.tensor.as_ref().unwrap().string_val[0].clone()).unwrap();
        assert!(text.contains("| parameters | 12 |"), "{text}");
        let scalars = events[2..].iter().map(|event| (event.step, event.summary.as_ref().unwrap().value[0].clone()));
        let scalars: Vec<_> = scalars.map(|(step, value)| (step, value.tag, value.simple_value.unwrap())).collect();
        assert_eq!(scalars, [(1, "loss".to_owned(), 0.5), (2, "loss".to_owned(), 1.0)]);
    }

    #[test]
    fn the_epoch_is_that_of_steps_and_evaluations_have_their_own() {
        let dir = tempfile::tempdir().unwrap();
        let mut tracker = TensorBoard::new(dir.path());
        tracker.describe(RunStart::Fresh, &RunDescription::default()).unwrap();
        let step = StepRecord { iter: 4, n_targets: 7, ..StepRecord::default() };
        let evaluation = EvalRecord { iter: 4, epoch: 1, n_targets: 9, ..EvalRecord::default() };
        let checkpoint = CheckpointRecord { iter: 4, epoch: 1, ..CheckpointRecord::default() };
        for record in [
            MetricsRecord::of(RecordKind::Step, &step).unwrap(),
            MetricsRecord::of(RecordKind::Evaluation, &evaluation).unwrap(),
            MetricsRecord::of(RecordKind::Checkpoint, &checkpoint).unwrap(),
        ] {
            tracker.log(&record).unwrap();
        }
        let values: Vec<SummaryValue> = events(dir.path())
            .into_iter()
            .filter_map(|event| event.summary)
            .flat_map(|summary| summary.value)
            .collect();
        let of = |tag: &str| {
            values.iter().filter(|value| value.tag == tag).filter_map(|value| value.simple_value).collect::<Vec<_>>()
        };
        assert_eq!(
            [of("epoch"), of("epoch/eval"), of("n_targets"), of("n_targets/eval")],
            [[0.0], [1.0], [7.0], [9.0]]
        );
    }

    /// A run that resumes sends the records of an earlier process.
    #[test]
    fn an_event_has_the_time_of_its_record() {
        let dir = tempfile::tempdir().unwrap();
        let mut tracker = TensorBoard::new(dir.path());
        tracker.describe(RunStart::Fresh, &RunDescription::default()).unwrap();
        let line = br#"{"time":"2026-11-21T02:03:04.050Z","iter":1,"loss":0.5}"#;
        tracker.log(&MetricsRecord::parse(line).unwrap()).unwrap();
        assert_eq!(events(dir.path()).pop().unwrap().wall_time, 1_795_226_584.05);
    }

    #[test]
    fn sample_generations_are_texts() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("tensorboard");
        let mut tracker = TensorBoard::new(&folder);
        tracker.describe(RunStart::Fresh, &RunDescription::default()).unwrap();
        let samples = json!({"iter": 4, "samples": [{"prompt": "Hi", "temperature": 0, "text": "Hello."}]});
        tracker.log(&MetricsRecord::of(RecordKind::Samples, &samples).unwrap()).unwrap();
        let last = events(&folder).pop().unwrap();
        let value = &last.summary.unwrap().value[0];
        let text = String::from_utf8(value.tensor.as_ref().unwrap().string_val[0].clone()).unwrap();
        assert_eq!((last.step, value.tag.as_str()), (4, "samples/0"));
        assert_eq!(value.metadata.as_ref().unwrap().plugin_data.as_ref().unwrap().plugin_name, "text");
        assert!(text.contains("> Hi") && text.contains("Hello."), "{text}");
    }

    #[test]
    fn a_resumed_run_starts_a_session_after_its_step() {
        let dir = tempfile::tempdir().unwrap();
        run(dir.path(), RunStart::Resumed(0), 1..=3);
        run(dir.path(), RunStart::Resumed(1), 2..=3);
        let events = events(dir.path());
        let sessions: Vec<i64> =
            events.iter().filter(|event| event.session_log.is_some()).map(|event| event.step).collect();
        assert_eq!(sessions, [1, 2]);
        assert_eq!(events.iter().map(|event| event.step).collect::<Vec<_>>(), [0, 1, 0, 1, 2, 3, 0, 2, 1, 2, 3]);
    }
}
