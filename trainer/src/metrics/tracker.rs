//! The interface of trackers, and the records that they receive.

use std::fmt::Debug;
use std::io;
use std::path::PathBuf;

use candlewick_runtime::exit::ExitCode;
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
    /// Sample generations, which are texts.
    Samples,
    /// Anything else: an evaluation, statistics of FP8, a resume.
    Other,
}

/// A record as trackers receive it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MetricsRecord {
    /// The event.
    pub(super) kind: RecordKind,
    /// Optimizer steps done.
    pub(super) step: usize,
    /// The fields of the record's JSON, `iter` included, in order.
    pub(super) fields: Map<String, Value>,
}

impl MetricsRecord {
    /// Returns a record with the fields of `record`, a struct with an `iter`.
    pub(super) fn of(kind: RecordKind, record: &impl Serialize) -> io::Result<Self> {
        let fields = match serde_json::to_value(record)? {
            Value::Object(fields) => fields,
            other => Map::from_iter([("value".to_owned(), other)]),
        };
        let step = fields.get("iter").and_then(Value::as_u64).unwrap_or_default();
        Ok(Self { kind, step: step as usize, fields })
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

    /// Returns the numbers of the record except `iter`, by name. The parts of a nested name are joined by `/`. Sample
    /// generations have none.
    pub(super) fn scalars(&self) -> Vec<(String, f64)> {
        if self.kind == RecordKind::Samples {
            return Vec::new();
        }
        let fields = self.fields.iter().filter(|(name, _)| *name != "iter");
        let leaves = fields.flat_map(|(name, value)| leaves(name, value));
        leaves.filter_map(|(name, value)| Some((name, value.as_f64()?))).collect()
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
