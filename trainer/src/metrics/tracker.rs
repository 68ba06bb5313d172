//! The interface of trackers, and the records that they receive.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::io;
use std::path::PathBuf;

use candlewick_runtime::exit::ExitCode;
use candlewick_runtime::timestamp::utc_timestamp;
use jiff::Timestamp;
use serde::Serialize;
use serde_json::{Map, Value};

use super::description::{RunDescription, leaves};

/// A destination of a run's metrics.
///
/// Its methods run in the training loop. An error of a local file closes the tracker, and a run that succeeds otherwise
/// fails at its end. The failure of a remote server is no error: the tracker warns.
pub(super) trait Tracker: Debug {
    /// Returns the file or folder that errors name.
    fn destination(&self) -> PathBuf;

    /// Records the description of the run, before anything else.
    fn describe(&mut self, start: RunStart, run: &RunDescription) -> io::Result<()>;

    /// Records metrics of a step.
    fn log(&mut self, record: &MetricsRecord) -> io::Result<()>;

    /// Records the end of the run.
    fn finish(&mut self, code: ExitCode) -> io::Result<()>;

    /// Waits until a remote server has received everything, at most for a fixed time after `finish`.
    fn wait(&mut self) {}
}

/// The start of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunStart {
    /// At the first step.
    Fresh,
    /// After this many steps.
    Resumed(usize),
}

impl RunStart {
    /// Returns the number of steps before the start.
    pub fn step(self) -> usize {
        match self {
            Self::Fresh => 0,
            Self::Resumed(step) => step,
        }
    }
}

/// The event that a record describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RecordKind {
    /// A finished optimizer step.
    Step,
    /// A checkpoint on disk.
    Checkpoint,
    /// An evaluation: the eval loss, or the scores of tasks.
    Evaluation,
    /// Sample generations, which are texts.
    Samples,
    /// Anything else: statistics of FP8, a loss spike, a resume.
    Other,
}

impl RecordKind {
    /// Returns the kind of a record with these fields.
    fn of_fields(fields: &Map<String, Value>) -> Self {
        let has = |name: &str| fields.contains_key(name);
        match () {
            () if has("saved") => Self::Checkpoint,
            () if has("samples") => Self::Samples,
            () if has("loss") => Self::Step,
            () if fields.keys().any(|name| name == "loss/eval" || name.starts_with("eval/")) => Self::Evaluation,
            () => Self::Other,
        }
    }
}

/// A record as trackers receive it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MetricsRecord {
    /// The event.
    pub(super) kind: RecordKind,
    /// Optimizer steps done.
    pub(super) step: usize,
    /// The time of the event.
    pub(super) time: Timestamp,
    /// The fields of the record's JSON, `time` and `iter` included, in order.
    pub(super) fields: Map<String, Value>,
}

/// The field with the time of a record, in UTC.
const TIME: &str = "time";

impl MetricsRecord {
    /// Returns a record of this moment with the fields of `record`, a struct with an `iter`.
    pub(super) fn of(kind: RecordKind, record: &impl Serialize) -> io::Result<Self> {
        let time = Timestamp::now();
        let mut fields = Map::from_iter([(TIME.to_owned(), utc_timestamp(time).into())]);
        match serde_json::to_value(record)? {
            Value::Object(own) => fields.extend(own),
            other => drop(fields.insert("value".to_owned(), other)),
        }
        let step = fields.get("iter").and_then(Value::as_u64).unwrap_or_default();
        Ok(Self { kind, step: step as usize, time, fields })
    }

    /// Parses a line of a metrics file; `None` if it is no record. A record without a time has the current one.
    pub(super) fn parse(line: &[u8]) -> Option<Self> {
        let mut fields: Map<String, Value> = serde_json::from_slice(line).ok()?;
        let step = fields.get("iter")?.as_u64()? as usize;
        name_as_evaluation(&mut fields);
        let time = fields.get(TIME).and_then(|time| time.as_str()?.parse().ok()).unwrap_or_else(Timestamp::now);
        Some(Self { kind: RecordKind::of_fields(&fields), step, time, fields })
    }

    /// Returns true if the records have equal fields, without times and durations.
    pub(super) fn is_repeated_by(&self, other: &Self) -> bool {
        let is_result = |name: &&String| !name.ends_with(TIME);
        let fields = |record: &Self| record.fields.keys().filter(is_result).cloned().collect::<BTreeSet<_>>();
        let names = fields(self);
        names == fields(other) && names.iter().all(|name| self.fields[name] == other.fields[name])
    }

    /// Returns the texts of sample generations, by name: `samples/0`, `samples/1`, ...
    pub(super) fn texts(&self) -> Vec<(String, String)> {
        let samples = self.fields.get("samples").and_then(Value::as_array);
        let samples = samples.filter(|_| self.kind == RecordKind::Samples).into_iter().flatten();
        let text = |sample: &Value, name: &str| sample[name].as_str().unwrap_or_default().to_owned();
        let of_sample = |(idx, sample): (usize, &Value)| {
            let (prompt, reply) = (text(sample, "prompt"), text(sample, "text"));
            (format!("samples/{idx}"), format!("temperature {}\n\n> {prompt}\n\n{reply}", sample["temperature"]))
        };
        samples.enumerate().map(of_sample).collect()
    }

    /// Returns the numbers of the record except its position, by name. The parts of a nested name are joined by `/`. Sample
    /// generations have none. The epoch is a metric of steps alone: other records count the epochs after the step.
    pub(super) fn scalars(&self) -> Vec<(String, f64)> {
        if self.kind == RecordKind::Samples {
            return Vec::new();
        }
        let is_position = |name: &str| name == "iter" || name == "epoch" && self.kind != RecordKind::Step;
        let fields = self.fields.iter().filter(|(name, _)| !is_position(name));
        let leaves = fields.flat_map(|(name, value)| leaves(name, value));
        leaves.filter_map(|(name, value)| Some((name, value.as_f64()?))).collect()
    }
}

/// Renames the fields of an evaluation that has the names of earlier versions, which were those of a step.
pub fn name_as_evaluation(fields: &mut Map<String, Value>) {
    const FORMER: [(&str, &str, &str); 4] = [
        ("loss/eval", "epoch", "epoch/eval"),
        ("loss/eval", "n_targets", "n_targets/eval"),
        ("eval/", "epoch", "epoch/tasks"),
        ("eval/", "eval_time", "tasks_time"),
    ];
    for (of, former, current) in FORMER {
        if fields.keys().any(|name| name.starts_with(of))
            && let Some(value) = fields.shift_remove(former)
        {
            fields.insert(current.to_owned(), value);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    #[track_caller]
    fn check(record: Value, want: &[(&str, f64)]) {
        let found = MetricsRecord::of(RecordKind::Other, &record).unwrap().scalars();
        let found: Vec<(&str, f64)> = found.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        assert_eq!(found, want);
    }

    #[test]
    fn scalars_are_the_numbers_of_a_record() {
        check(json!({"iter": 7, "loss": 0.5, "saved": "out/x", "mfu": null}), &[("loss", 0.5)]);
        assert_eq!(MetricsRecord::of(RecordKind::Step, &json!({"iter": 7})).unwrap().step, 7);
    }

    #[test]
    fn a_record_has_the_time_of_its_event_which_is_no_metric() {
        let record = MetricsRecord::of(RecordKind::Step, &json!({"iter": 7, "loss": 0.5})).unwrap();
        let line = serde_json::to_string(&record.fields).unwrap();
        assert!(line.starts_with("{\"time\":\"20"), "{line}");
        let parsed = MetricsRecord::parse(line.as_bytes()).unwrap();
        assert_eq!((parsed.kind, parsed.step, parsed.scalars().len()), (RecordKind::Step, 7, 1));
        assert_eq!(parsed.time.as_millisecond(), record.time.as_millisecond());
        assert_eq!(MetricsRecord::parse(br#"{"loss": 0.5}"#), None);
    }

    #[test]
    fn a_record_is_repeated_by_one_with_equal_results() {
        let record = |value: Value| MetricsRecord::of(RecordKind::Evaluation, &value).unwrap();
        let first = record(json!({"iter": 7, "loss/eval": 0.5, "eval_time": 1.0}));
        assert!(first.is_repeated_by(&record(json!({"iter": 7, "loss/eval": 0.5, "eval_time": 2.0}))));
        for other in [json!({"iter": 8, "loss/eval": 0.5}), json!({"iter": 7, "loss/eval": 0.6}), json!({"iter": 7})] {
            assert!(!first.is_repeated_by(&record(other)));
        }
    }

    #[test]
    fn sample_generations_are_texts_and_no_scalars() {
        let samples = json!([{"prompt": "Hi", "temperature": 0.5, "text": "Hello."}]);
        let record = MetricsRecord::of(RecordKind::Samples, &json!({"iter": 7, "samples": samples})).unwrap();
        assert_eq!(record.scalars(), []);
        let text = "temperature 0.5\n\n> Hi\n\nHello.".to_owned();
        assert_eq!(record.texts(), [("samples/0".to_owned(), text)]);
        assert_eq!(MetricsRecord { kind: RecordKind::Other, ..record }.texts(), []);
    }

    #[test]
    fn nested_names_are_joined_by_a_slash() {
        check(json!({"fp8": {"layers.0.q": {"input": {"amax": 2}}}}), &[("fp8/layers.0.q/input/amax", 2.0)]);
        check(json!({"a": [1, 2]}), &[("a/0", 1.0), ("a/1", 2.0)]);
    }

    #[test]
    fn layers_of_a_list_are_named_by_their_index_in_the_model() {
        let load = json!({"load": {"layers": [{"layer": 3, "entropy": 0.5}, {"layer": 5, "entropy": 0.25}]}});
        check(load, &[("load/layers/3/entropy", 0.5), ("load/layers/5/entropy", 0.25)]);
    }
}
