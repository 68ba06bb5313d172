//! Evaluation during training: the eval loss and the tasks.

use std::time::Instant;

use anyhow::{Context, Result};
use candlewick_inference::eval_loss::{EvalLoss, EvalLossSum};
use candlewick_inference::lm::LmHandle;
use candlewick_ops::span;
use candlewick_runtime::exit::ExitCode;
use serde_json::json;

use crate::data::{Batch, Cursor, EvalLoader};
use crate::metrics::{EvalRecord, TasksRecord};
use crate::plan::{EVAL_LOSS, EvalPlan};

use super::context::{EndReason, TrainingRun};
use super::rank_info::RankInfo;
use super::session::Session;
use super::step;
use super::tasks::ScoresByMetric;

/// The evaluations that are due.
#[derive(Clone, Copy, Debug)]
struct Due {
    eval_loss: bool,
    tasks: bool,
}

/// The result of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EvalStatus {
    Complete,
    /// Stopped by a stop request.
    Stopped,
}

impl Session<'_> {
    /// Returns the reason to end the run if early stopping is due. All ranks return the same.
    pub(super) fn early_stopping(&self) -> Option<EndReason> {
        let (state, plan) = (&self.progress.early_stopping, self.run.plan.early_stopping.as_ref()?);
        (state.n_without_improvement >= plan.patience).then(|| EndReason::EarlyStopping(state.clone()))
    }

    /// Evaluates before the first step of a fresh run, if the plan sets `on_start`.
    pub(super) fn evaluate_first(&mut self) -> Result<()> {
        self.evaluate_as(|plan| plan.on_start)
    }

    /// Runs the evaluations that are due after this step, unless they were done before the run was resumed.
    pub(super) fn evaluate(&mut self) -> Result<()> {
        let moment = self.moment();
        if self.is_evaluation_due() { self.evaluate_as(|plan| plan.is_due(moment)) } else { Ok(()) }
    }

    /// Returns true if an evaluation is due after this step and was not completed.
    pub(super) fn is_evaluation_due(&self) -> bool {
        let (moment, plan) = (self.moment(), self.run.plan);
        let mut whens = plan.eval.iter().chain(plan.tasks.iter().map(|tasks| &tasks.when));
        self.progress.evaluated != Some(moment.step) && whens.any(|when| when.is_due(moment))
    }

    fn evaluate_as(&mut self, is_due: impl Fn(&EvalPlan) -> bool) -> Result<()> {
        let plan = self.run.plan;
        let is_due = Due {
            eval_loss: plan.eval.as_ref().is_some_and(&is_due),
            tasks: plan.tasks.as_ref().is_some_and(|tasks| is_due(&tasks.when)),
        };
        if is_due.eval_loss && self.eval_loss()? == EvalStatus::Stopped
            || is_due.tasks && self.evaluate_tasks()? == EvalStatus::Stopped
        {
            return Ok(());
        }
        if is_due.eval_loss || is_due.tasks {
            self.sample_after_evaluation()?;
            self.progress.evaluated = Some(self.stream.cursor().step);
        }
        Ok(())
    }

    /// Computes the eval loss. A stop request ends it without a result.
    fn eval_loss(&mut self) -> Result<EvalStatus> {
        self.drain(0)?;
        let Some(eval) = &self.run.prepared.eval else { return Ok(EvalStatus::Complete) };
        let _span = span("evaluate", "");
        let started = Instant::now();
        let TrainingRun { plan, engine, ranks, .. } = self.run;
        let RankInfo { data_rank, data_world } = ranks.rank_info;
        let mut stream = EvalLoader::new(eval.clone(), &plan.data);
        // Every rank computes the same number of micro-batches, because each one is a collective. A rank without a
        // batch computes a filler.
        let n_batches = stream.n_batches();
        let n_rounds = n_batches.div_ceil(data_world);
        let mut sums = EvalLossSum::default();
        let progress = self.reporter.terminal().progress("eval loss", "micro-batches");
        for round in 0..n_rounds {
            progress.set(round * data_world, n_batches);
            if self.stop_request()?.is_some() {
                return Ok(EvalStatus::Stopped);
            }
            let batches: Vec<Batch> = stream.by_ref().take(data_world).collect();
            let own = batches.into_iter().nth(data_rank).unwrap_or_else(Batch::filler);
            let n_targets = if ranks.counts_tokens() { own.n_targets } else { 0 };
            sums.add(engine, &step::micro(&own, engine)?, n_targets)?;
        }
        let EvalLoss { loss, n_targets } = sums.over_ranks(engine.group())?;
        drop(progress);
        let Cursor { epoch, step: iter, .. } = *self.stream.cursor();
        let eval_time = started.elapsed().as_secs_f64();
        let record = EvalRecord { epoch, iter, loss, n_targets: n_targets as u64, eval_time };
        self.reporter.log_eval(&record);
        self.record_score(&ScoresByMetric::from([(EVAL_LOSS.to_owned(), loss)]));
        self.update_run_json(|report| report.metrics["eval"] = json!(record));
        Ok(EvalStatus::Complete)
    }

    /// Evaluates the tasks. A stop request ends it without a result.
    fn evaluate_tasks(&mut self) -> Result<EvalStatus> {
        self.drain(0)?;
        let Some(tasks) = self.run.tasks else { return Ok(EvalStatus::Complete) };
        let _span = span("tasks", "");
        let started = Instant::now();
        let TrainingRun { assets, engine, ranks, scores, early_stopping, stop, .. } = self.run;
        let folders = [Some(assets.tokenizer.directory()), assets.model_folder.as_deref()];
        let lm_handle = LmHandle::new(engine, &assets.tokenizer, folders.into_iter().flatten());
        let progress = self.reporter.terminal().progress("eval.tasks", "requests");
        let values =
            tasks.evaluate(lm_handle, ranks, stop, &progress).context("failed to evaluate the tasks of eval.tasks")?;
        drop(progress);
        let Some(values) = values else { return Ok(EvalStatus::Stopped) };
        check_measured("metric_for_best_model", &scores.metric, &values)?;
        check_measured("early_stopping.metric", &early_stopping.metric, &values)?;
        self.record_score(&values);
        let Cursor { epoch, step: iter, .. } = *self.stream.cursor();
        let scores = values.into_iter().map(|(name, value)| (format!("eval/{name}"), value)).collect();
        let record = TasksRecord { epoch, iter, scores, tasks_time: started.elapsed().as_secs_f64() };
        self.reporter.log_tasks(&record);
        self.update_run_json(|report| report.metrics["tasks"] = json!(record));
        Ok(EvalStatus::Complete)
    }

    /// Records the values of the metrics of early stopping and of the best checkpoint, if they are among these.
    fn record_score(&mut self, values: &ScoresByMetric) {
        let stopping = &mut self.progress.early_stopping;
        if let (Some(plan), Some(value)) = (&self.run.plan.early_stopping, values.get(&stopping.metric)) {
            stopping.add(self.stream.cursor().step, *value, plan.min_delta);
        }
        let Some(value) = values.get(&self.progress.scores.metric) else { return };
        self.progress.scores.add(self.stream.cursor().step, *value);
        self.report_best();
    }

    /// Writes the best step so far into run.json.
    pub(super) fn report_best(&mut self) {
        if let Some((step, value)) = self.progress.scores.best() {
            let metric = self.progress.scores.metric.clone();
            self.update_run_json(|report| {
                report.metrics["best"] = json!({"iter": step, "metric": metric, "value": value})
            });
        }
    }
}

/// Fails if the tasks did not measure the metric of `key`. The eval loss, and a metric that is not set, are no scores of
/// tasks.
fn check_measured(key: &str, metric: &str, values: &ScoresByMetric) -> Result<()> {
    if ["", EVAL_LOSS].contains(&metric) || values.contains_key(metric) {
        return Ok(());
    }
    let known = values.keys().cloned().collect::<Vec<_>>().join(", ");
    Err(anyhow::anyhow!("failed to find the {key} `{metric}` among {known}").context(ExitCode::Usage))
}
