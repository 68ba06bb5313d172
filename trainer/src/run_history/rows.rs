//! The metrics of a run by name and step.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Map, Value};

use crate::metrics::{CheckpointRecord, ExpertLoad, ResumeRecord, name_as_evaluation};

/// Value of a metric at a step. A loss that is not finite is NaN.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MetricPoint {
    /// Optimizer steps done.
    pub step: u64,
    /// Value.
    pub value: f64,
}

/// Tokens and seconds of training up to each recorded step. A step that is not recorded counts as the next recorded one.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RunAxis {
    /// Recorded steps.
    pub steps: Vec<u64>,
    /// Tokens without padding, from the start of the run.
    pub tokens: Vec<f64>,
    /// Seconds of all steps, without evaluations and checkpoints.
    pub seconds: Vec<f64>,
}

impl RunAxis {
    /// Returns the tokens at a step. Between recorded steps they are linear.
    pub fn tokens_at(&self, step: u64) -> f64 {
        self.interpolate(&self.tokens, step)
    }

    /// Returns the seconds of training at a step. Between recorded steps they are linear.
    pub fn seconds_at(&self, step: u64) -> f64 {
        self.interpolate(&self.seconds, step)
    }

    fn interpolate(&self, values: &[f64], step: u64) -> f64 {
        let idx = self.steps.partition_point(|other| *other < step);
        let Some(after) = self.steps.get(idx) else { return values.last().copied().unwrap_or(0.0) };
        let (before, value) = if idx > 0 { (self.steps[idx - 1], values[idx - 1]) } else { (0, 0.0) };
        let part = (step - before) as f64 / (after - before).max(1) as f64;
        value + part * (values[idx] - value)
    }
}

/// Records of a metrics file.
#[derive(Clone, Debug, Default)]
pub struct MetricRows {
    series: BTreeMap<String, Vec<MetricPoint>>,
    checkpoints: Vec<CheckpointRecord>,
    resumes: Vec<ResumeRecord>,
    /// Load of the experts at the last step.
    expert_load: Option<Value>,
    n_lines: usize,
    /// Numbers of the lines that are no records, from 1.
    malformed: Vec<usize>,
}

impl MetricRows {
    /// Adds a line of a metrics file. It replaces an earlier record of the same step, and a resume discards later steps.
    pub fn push(&mut self, line: &[u8]) {
        self.n_lines += 1;
        if line.trim_ascii().is_empty() {
            return;
        }
        let fields = serde_json::from_slice(line).ok().and_then(|value| match value {
            Value::Object(fields) => Some(fields),
            _ => None,
        });
        let step = fields.as_ref().and_then(|fields: &Map<String, Value>| fields.get("iter")?.as_u64());
        match fields.zip(step) {
            Some((fields, step)) => self.add(step, fields),
            None => self.malformed.push(self.n_lines),
        }
    }

    fn add(&mut self, step: u64, mut fields: Map<String, Value>) {
        if fields.contains_key("resumed_from") {
            self.discard_after(step);
            self.resumes.extend(serde_json::from_value::<ResumeRecord>(Value::Object(fields)).ok());
        } else if fields.contains_key("saved") {
            if let Ok(record) = serde_json::from_value::<CheckpointRecord>(Value::Object(fields)) {
                self.checkpoints.retain(|other| other.saved != record.saved);
                self.checkpoints.push(record);
            }
        } else if fields.contains_key("loss") {
            self.add_step(step, fields);
        } else if !fields.contains_key("fp8") {
            name_as_evaluation(&mut fields);
            self.insert_all(step, fields.iter().filter(|(name, _)| !["iter", "epoch"].contains(&name.as_str())));
        }
    }

    fn add_step(&mut self, step: u64, mut fields: Map<String, Value>) {
        let groups = ["auxiliary_losses", "objective", "lr_groups", "expert_load"];
        let groups = groups.map(|group| (group, fields.remove(group)));
        self.insert_all(step, fields.iter().filter(|(name, _)| *name != "iter"));
        for (group, values) in &groups {
            let values = values.as_ref().and_then(Value::as_object).into_iter().flatten();
            let named: Vec<_> = values.map(|(name, value)| (format!("{group}/{name}"), value)).collect();
            self.insert_all(step, named.iter().map(|(name, value)| (name, *value)));
        }
        let [.., (_, load)] = groups;
        if load.is_some() {
            self.expert_load = load;
        }
    }

    /// Inserts the numbers among the fields. JSON has null for a number that is not finite.
    fn insert_all<'a>(&mut self, step: u64, fields: impl Iterator<Item = (&'a String, &'a Value)>) {
        for (name, value) in fields {
            let value = if value.is_null() { Some(f64::NAN) } else { value.as_f64() };
            if let Some(value) = value {
                self.insert(name, MetricPoint { step, value });
            }
        }
    }

    fn insert(&mut self, name: &str, point: MetricPoint) {
        match self.series.get_mut(name) {
            Some(points) => put(points, point),
            None => drop(self.series.insert(name.to_owned(), vec![point])),
        }
    }

    fn discard_after(&mut self, step: u64) {
        self.series.values_mut().for_each(|points| points.retain(|point| point.step <= step));
        self.checkpoints.retain(|record| record.iter as u64 <= step);
    }

    /// Returns the points of a metric by step.
    pub fn series(&self, name: &str) -> &[MetricPoint] {
        self.series.get(name).map_or(&[], Vec::as_slice)
    }

    /// Returns the names of all metrics with points.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.series.iter().filter(|(_, points)| !points.is_empty()).map(|(name, _)| name.as_str())
    }

    /// Returns the last recorded step of training.
    pub fn last_step(&self) -> Option<u64> {
        self.series("loss").last().map(|point| point.step)
    }

    /// Returns the checkpoints, in the order of the file.
    pub fn checkpoints(&self) -> &[CheckpointRecord] {
        &self.checkpoints
    }

    /// Returns the resumes, in the order of the file.
    pub fn resumes(&self) -> &[ResumeRecord] {
        &self.resumes
    }

    /// Returns the load of the experts at the last recorded step.
    pub fn expert_load(&self) -> Option<ExpertLoad> {
        serde_json::from_value(self.expert_load.clone()?).ok()
    }

    /// Returns the numbers of the lines that are no records.
    pub fn malformed(&self) -> &[usize] {
        &self.malformed
    }

    /// Returns true if no line was added.
    pub fn is_empty(&self) -> bool {
        self.n_lines == 0
    }

    /// Returns the value of a metric at a step.
    pub fn value_at(&self, name: &str, step: u64) -> Option<f64> {
        let points = self.series(name);
        points.binary_search_by_key(&step, |point| point.step).ok().map(|idx| points[idx].value)
    }

    /// Returns the tokens and seconds up to each recorded step.
    pub fn axis(&self) -> RunAxis {
        let finite = |name: &str, step: u64| self.value_at(name, step).filter(|value| value.is_finite()).unwrap_or(0.0);
        let mut axis = RunAxis::default();
        let (mut before, mut tokens, mut seconds) = (0, 0.0, 0.0);
        for MetricPoint { step, .. } in self.series("loss") {
            let n_steps = step.saturating_sub(before) as f64;
            tokens += n_steps * finite("tokens", *step);
            seconds += n_steps * finite("step_time", *step);
            before = *step;
            axis.steps.push(*step);
            axis.tokens.push(tokens);
            axis.seconds.push(seconds);
        }
        axis
    }
}

/// Adds a point, or replaces the one of its step.
fn put(points: &mut Vec<MetricPoint>, point: MetricPoint) {
    if points.last().is_none_or(|last| last.step < point.step) {
        points.push(point);
        return;
    }
    match points.binary_search_by_key(&point.step, |other| other.step) {
        Ok(idx) => points[idx] = point,
        Err(idx) => points.insert(idx, point),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(lines: &[&str]) -> MetricRows {
        let mut rows = MetricRows::default();
        lines.iter().for_each(|line| rows.push(line.as_bytes()));
        rows
    }

    fn points(rows: &MetricRows, name: &str) -> Vec<(u64, f64)> {
        rows.series(name).iter().map(|point| (point.step, point.value)).collect()
    }

    #[test]
    fn a_later_record_replaces_the_earlier_one_of_its_step() {
        let rows = rows(&[r#"{"iter":1,"loss":3.0}"#, r#"{"iter":2,"loss":2.0}"#, r#"{"iter":1,"loss":4.0}"#]);
        assert_eq!(points(&rows, "loss"), [(1, 4.0), (2, 2.0)]);
    }

    #[test]
    fn a_resume_discards_the_steps_after_its_checkpoint() {
        let rows = rows(&[
            r#"{"iter":1,"loss":3.0}"#,
            r#"{"iter":1,"epoch":0,"saved":"a","save_time":0.5}"#,
            r#"{"iter":2,"loss":2.0}"#,
            r#"{"iter":2,"loss/eval":2.5,"n_targets":3,"eval_time":1.0}"#,
            r#"{"iter":2,"epoch":0,"saved":"b","save_time":0.5}"#,
            r#"{"iter":1,"epoch":0,"resumed_from":"a","resume_time":0.1}"#,
            r#"{"iter":3,"loss":1.0}"#,
        ]);
        assert_eq!(points(&rows, "loss"), [(1, 3.0), (3, 1.0)]);
        assert_eq!((rows.series("loss/eval"), rows.checkpoints().len(), rows.resumes().len()), (&[][..], 1, 1));
    }

    #[test]
    fn metrics_of_every_kind_of_record_are_named_as_in_the_file() {
        let rows = rows(&[
            r#"{"iter":1,"epoch":0,"loss":3.0,"tokens":10,"auxiliary_losses":{"z_loss":0.5},"lr_groups":{"embeddings":0.25},
                "expert_load":{"max_over_mean":2.0,"entropy":0.9,"unused":0.0,"dropped":0.0,"layers":[{"layer":3}]}}"#,
            r#"{"iter":1,"epoch/eval":1,"loss/eval":2.5,"n_targets/eval":3,"eval_time":1.0}"#,
            r#"{"iter":1,"epoch/tasks":1,"eval/a/acc":0.5,"tasks_time":9.0}"#,
            r#"{"iter":1,"fp8":{"layer":{"input":{"amax":2.0}}}}"#,
        ]);
        for (name, want) in [
            ("auxiliary_losses/z_loss", 0.5),
            ("expert_load/max_over_mean", 2.0),
            ("lr_groups/embeddings", 0.25),
            ("loss/eval", 2.5),
            ("epoch/eval", 1.0),
            ("n_targets/eval", 3.0),
            ("eval_time", 1.0),
            ("eval/a/acc", 0.5),
            ("tasks_time", 9.0),
            ("epoch", 0.0),
        ] {
            assert_eq!(points(&rows, name), [(1, want)], "{name}");
        }
        assert_eq!((points(&rows, "n_targets"), rows.malformed()), (Vec::new(), &[][..]));
        assert_eq!(rows.expert_load().map(|load| load.layers[0].layer), Some(3));
    }

    /// Versions until November 2026 named these fields as those of a step.
    #[test]
    fn evaluations_of_earlier_versions_have_the_current_names() {
        let rows = rows(&[
            r#"{"epoch":0,"iter":1,"loss":3.0,"n_targets":7}"#,
            r#"{"epoch":1,"iter":1,"loss/eval":2.5,"n_targets":3,"eval_time":1.0}"#,
            r#"{"epoch":1,"iter":1,"eval/a/acc":0.5,"eval_time":9.0}"#,
        ]);
        for (name, want) in [
            ("n_targets", 7.0),
            ("n_targets/eval", 3.0),
            ("epoch", 0.0),
            ("epoch/eval", 1.0),
            ("epoch/tasks", 1.0),
            ("eval_time", 1.0),
            ("tasks_time", 9.0),
        ] {
            assert_eq!(points(&rows, name), [(1, want)], "{name}");
        }
    }

    #[test]
    fn a_loss_that_is_not_finite_is_nan() {
        let rows = rows(&[r#"{"iter":1,"loss":null,"grad_norm":null}"#]);
        assert!(rows.series("loss")[0].value.is_nan() && rows.series("grad_norm")[0].value.is_nan());
    }

    #[test]
    fn lines_that_are_no_records_are_counted() {
        let rows = rows(&["broken", "", "[1]", r#"{"loss":1.0}"#, r#"{"iter":1,"loss":1.0}"#]);
        assert_eq!((rows.malformed(), points(&rows, "loss")), (&[1, 3, 4][..], vec![(1, 1.0)]));
    }

    #[test]
    fn tokens_and_seconds_of_steps_without_a_record_are_those_of_the_next_one() {
        let line = |step: u64| format!("{{\"iter\":{step},\"loss\":1.0,\"tokens\":100,\"step_time\":0.5}}");
        let rows = rows(&[line(1).as_str(), &line(2), &line(10)]);
        let axis = rows.axis();
        assert_eq!(axis.steps, [1, 2, 10]);
        assert_eq!([0, 2, 6, 10, 12].map(|step| axis.tokens_at(step)), [0.0, 200.0, 600.0, 1000.0, 1000.0]);
        assert_eq!(axis.seconds_at(1), 0.5);
        assert_eq!((axis.tokens, axis.seconds), (vec![100.0, 200.0, 1000.0], vec![0.5, 1.0, 5.0]));
    }
}
