//! Sends each record to the trackers and the terminal.

use std::io;
use std::path::{Path, PathBuf, absolute};

use candlewick_runtime::exit::ExitCode;
use serde::Serialize;

use super::console::{Terminal, tasks_line};
use super::description::RunDescription;
use super::earlier_files;
use super::format::duration;
use super::jsonl::{records_until, saved_checkpoints};
use super::plan::LogPlan;
use super::record::{
    CheckpointRecord, EvalRecord, Fp8Record, LossSpikeRecord, ResumeRecord, SamplesRecord, StepRecord, TasksRecord,
};
use super::tracker::{MetricsRecord, RecordKind, RunStart, Tracker};
use super::trackers;

/// Reports the steps and evaluations of a run.
#[derive(Debug)]
pub struct Reporter {
    plan: LogPlan,
    total_steps: usize,
    trackers: Vec<Box<dyn Tracker>>,
    terminal: Terminal,
    n_evals: usize,
    /// True if the metrics file had records before this start.
    had_records: bool,
    /// The evaluations and samples of the step at which the run resumed: an interrupted evaluation starts again.
    evaluated: Vec<MetricsRecord>,
    failure: Option<TrackerFailure>,
}

/// The error that closed a tracker.
#[derive(Debug)]
pub struct TrackerFailure {
    /// The file or folder.
    pub path: PathBuf,
    /// The error.
    pub source: io::Error,
}

impl Reporter {
    /// Opens the trackers and the terminal for the run `run`, which continues after `done` steps. A fresh run renames the files
    /// of the earlier one; it may continue after a step of another run.
    pub fn open(plan: &LogPlan, start: RunStart, done: usize, run: &RunDescription) -> io::Result<Self> {
        let total_steps = run.total_steps;
        let terminal = Terminal::new(plan.console, done, total_steps);
        if start == RunStart::Fresh {
            earlier_files::rename_earlier_files(plan)?;
        }
        let trackers = trackers::open(plan, start, &terminal)?;
        let metrics_file = plan.metrics_path.as_deref().filter(|path| path.is_file());
        let had_records = metrics_file.and_then(|path| path.metadata().ok()).is_some_and(|found| found.len() > 0);
        let evaluated = evaluations_at(plan, start);
        let mut reporter = Self {
            plan: plan.clone(),
            total_steps,
            trackers,
            terminal,
            n_evals: 0,
            had_records,
            evaluated,
            failure: None,
        };
        reporter.for_each_tracker(|tracker| tracker.describe(start, run));
        Ok(reporter)
    }

    /// Reports a step.
    pub fn log_step(&mut self, record: &StepRecord) {
        let LogPlan { train_log_iter_interval, loss_log_interval, .. } = self.plan;
        let is_recorded = is_due(train_log_iter_interval, record.iter);
        if is_recorded {
            self.record(RecordKind::Step, record);
        }
        if is_recorded || is_due(loss_log_interval, record.iter) {
            self.terminal.step_line(record);
        }
        self.terminal.advance_to(record.iter, record.loss);
    }

    /// Reports an evaluation.
    pub fn log_eval(&mut self, record: &EvalRecord) {
        self.n_evals += 1;
        if is_due(self.plan.eval_log_iter_interval, self.n_evals) {
            self.record(RecordKind::Evaluation, record);
            self.terminal.eval_line(record);
        }
    }

    /// Writes the statistics of FP8 tensors.
    pub fn log_fp8(&mut self, record: &Fp8Record) {
        self.record(RecordKind::Other, record);
    }

    /// Writes a loss spike.
    pub fn log_loss_spike(&mut self, record: &LossSpikeRecord) {
        self.record(RecordKind::Other, record);
    }

    /// Writes sample generations.
    pub fn log_samples(&mut self, record: &SamplesRecord) {
        self.record(RecordKind::Samples, record);
    }

    /// Reports the scores of tasks.
    pub fn log_tasks(&mut self, record: &TasksRecord) {
        self.record(RecordKind::Evaluation, record);
        self.terminal.line(&tasks_line(record, self.total_steps));
    }

    /// Reports a checkpoint.
    pub fn log_checkpoint(&mut self, record: &CheckpointRecord) {
        self.record(RecordKind::Checkpoint, record);
        let saved = record.saved.display();
        self.terminal.line(&match record.save_time {
            Some(save_time) => format!("saved {saved} in {}", duration(save_time)),
            None => format!("completed {saved}, which a killed process had begun"),
        });
    }

    /// Returns true if the metrics file had records before this start, but none of the checkpoint in `dir`.
    pub fn lacks_checkpoint(&self, dir: &Path) -> bool {
        let is_dir = |saved: &PathBuf| absolute(saved).ok() == absolute(dir).ok();
        let path = self.plan.metrics_path.as_deref().filter(|path| self.had_records && path.is_file());
        path.is_some_and(|path| !saved_checkpoints(path).iter().any(is_dir))
    }

    /// Reports a resume.
    pub fn log_resume(&mut self, record: &ResumeRecord) {
        self.record(RecordKind::Other, record);
        let (dir, time) = (record.resumed_from.display(), duration(record.resume_time));
        self.terminal.line(&format!("resumed after step {} from {dir} in {time}", record.iter));
    }

    /// Reports the end of the run to the trackers. Waits for remote servers at most for a fixed time.
    pub fn finish(&mut self, code: ExitCode) {
        self.for_each_tracker(|tracker| tracker.finish(code));
        self.trackers.iter_mut().for_each(|tracker| tracker.wait());
        self.trackers.clear();
    }

    /// Returns the first error that closed a tracker, if there was one.
    pub fn take_failure(&mut self) -> Option<TrackerFailure> {
        self.failure.take()
    }

    /// Returns the terminal, for other lines.
    pub fn terminal(&self) -> &Terminal {
        &self.terminal
    }

    fn record(&mut self, kind: RecordKind, record: &impl Serialize) {
        let record = MetricsRecord::of(kind, record);
        if record.as_ref().is_ok_and(|record| self.evaluated.iter().any(|earlier| earlier.is_repeated_by(record))) {
            return;
        }
        let log = |tracker: &mut dyn Tracker| match &record {
            Ok(record) => tracker.log(record),
            Err(error) => Err(io::Error::other(error.to_string())),
        };
        self.for_each_tracker(log);
    }

    /// Calls each tracker. Warns of an error and closes its tracker, because the run can still save checkpoints.
    fn for_each_tracker(&mut self, mut call: impl FnMut(&mut dyn Tracker) -> io::Result<()>) {
        self.trackers.retain_mut(|tracker| {
            let Err(source) = call(tracker.as_mut()) else { return true };
            let path = tracker.destination();
            tracing::warn!("metrics are disabled: failed to write {}: {source}", path.display());
            self.failure.get_or_insert(TrackerFailure { path, source });
            false
        });
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        self.terminal.finish();
    }
}

/// Returns the recorded evaluations and samples of the step at which a run resumes.
fn evaluations_at(plan: &LogPlan, start: RunStart) -> Vec<MetricsRecord> {
    let RunStart::Resumed(step) = start else { return Vec::new() };
    let paths = [&plan.metrics_path, &plan.samples_path].into_iter().flatten();
    let records = paths.flat_map(|path| records_until(path, step));
    let is_repeated = |kind| matches!(kind, RecordKind::Evaluation | RecordKind::Samples);
    records.filter(|record| record.step == step && is_repeated(record.kind)).collect()
}

fn is_due(interval: usize, count: usize) -> bool {
    interval > 0 && count.is_multiple_of(interval)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::metrics::plan::Console;
    use crate::metrics::tracking_plan::TrackingPlan;

    /// Returns a plan with the intervals of steps and of evaluations.
    fn plan(metrics_path: &Path, [train_log_iter_interval, eval_log_iter_interval]: [usize; 2]) -> LogPlan {
        LogPlan {
            metrics_path: Some(metrics_path.to_owned()),
            samples_path: None,
            output_dir: None,
            loss_log_interval: 1,
            train_log_iter_interval,
            eval_log_iter_interval,
            log_num_zeros_in_grad: false,
            console: Console::Quiet,
            tracking: TrackingPlan::default(),
        }
    }

    /// Checks the `iter` of the lines of a run of 6 steps with an evaluation every second step.
    #[track_caller]
    fn check(train_interval: usize, eval_interval: usize, want: &[u64]) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let plan = plan(&path, [train_interval, eval_interval]);
        let run = RunDescription { total_steps: 6, ..RunDescription::default() };
        let mut reporter = Reporter::open(&plan, RunStart::Fresh, 0, &run).unwrap();
        for iter in 1..=6 {
            reporter.log_step(&StepRecord { iter, ..StepRecord::default() });
            if iter % 2 == 0 {
                reporter.log_eval(&EvalRecord { iter, ..EvalRecord::default() });
            }
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        assert_eq!(lines.map(|line| line["iter"].as_u64().unwrap()).collect::<Vec<_>>(), want);
    }

    #[test]
    fn intervals_of_one_record_every_step_and_evaluation() {
        check(1, 1, &[1, 2, 2, 3, 4, 4, 5, 6, 6]);
    }

    #[test]
    fn intervals_select_steps_and_evaluations() {
        check(3, 2, &[3, 4, 6]);
    }

    #[test]
    fn intervals_of_zero_disable_records() {
        check(0, 0, &[]);
    }

    #[test]
    fn a_checkpoint_is_missing_in_earlier_records_only() {
        let here = std::env::current_dir().unwrap().join("saves/global_step_2");
        let record = r#"{"iter":2,"epoch":0,"saved":"saves/global_step_2","save_time":0.5}"#;
        let cases = [(record, false), (r#"{"iter":1,"loss":2.0}"#, true), ("", false)];
        for (records, want) in cases {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("metrics.jsonl");
            let text = if records.is_empty() { String::new() } else { format!("{records}\n") };
            std::fs::write(&path, text).unwrap();
            let run = RunDescription::default();
            let mut reporter = Reporter::open(&plan(&path, [1, 1]), RunStart::Resumed(2), 2, &run).unwrap();
            reporter.log_eval(&EvalRecord { iter: 2, ..EvalRecord::default() });
            assert_eq!(reporter.lacks_checkpoint(&here), want, "{records}");
        }
    }

    #[test]
    fn a_fresh_run_renames_all_files_of_the_earlier_one_to_one_number() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let plan = LogPlan { output_dir: Some(dir.path().to_owned()), ..plan(&path("metrics.jsonl"), [1, 1]) };
        // The first run has no samples, the second one has all files, the third one has none but metrics.
        for names in [&["metrics.jsonl"][..], &["metrics.jsonl", "samples.jsonl", "tensorboard/x", "kept_batches/x"]] {
            for name in names {
                std::fs::create_dir_all(path(name).parent().unwrap()).unwrap();
                std::fs::write(path(name), "").unwrap();
            }
            Reporter::open(&plan, RunStart::Fresh, 0, &RunDescription::default()).unwrap();
        }
        let entries = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = entries.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        let earlier = ["kept_batches.2", "metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl", "samples.2.jsonl"];
        assert_eq!(names, [&earlier[..], &["tensorboard.2"]].concat());
    }

    #[test]
    fn a_tracker_that_cannot_write_is_closed_and_the_others_continue() {
        let dir = tempfile::tempdir().unwrap();
        let metrics_path = dir.path().join("metrics.jsonl");
        let no_folder = PathBuf::from("/dev/null/tensorboard");
        let plan = LogPlan {
            tracking: TrackingPlan { tensorboard: Some(no_folder.clone()), ..TrackingPlan::default() },
            ..plan(&metrics_path, [1, 1])
        };
        let mut reporter = Reporter::open(&plan, RunStart::Fresh, 0, &RunDescription::default()).unwrap();
        reporter.log_step(&StepRecord { iter: 1, ..StepRecord::default() });
        reporter.finish(ExitCode::Ok);
        assert_eq!(reporter.take_failure().unwrap().path, no_folder);
        assert_eq!(std::fs::read_to_string(&metrics_path).unwrap().lines().count(), 1);
    }
}
