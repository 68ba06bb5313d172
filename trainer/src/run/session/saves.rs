//! The checkpoints that a session saves: those due after a step, missing ones, and those of a run that ends.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use candlewick_ops::span;

use crate::checkpoint::{CheckpointFormat, CheckpointPlan, Moment, Tag};
use crate::data::Cursor;
use crate::metrics::CheckpointRecord;
use crate::run::async_save::FinishedAsyncSave;
use crate::run::checkpointer::{SaveOutcome, SavedCheckpoint};
use crate::run::context::Progress;
use crate::step_error::AllStepsSkipped;

use super::Session;

/// The saved state of a run that was stopped by a signal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::run) enum StopResult {
    /// A checkpoint from which the same command resumes, and its folder.
    Resumable(PathBuf),
    /// A checkpoint, but the recipe does not set `auto_resume`.
    Saved(PathBuf),
    /// Exported weights.
    Exported,
    /// Nothing: the recipe has no checkpoint.
    Lost,
}

impl Session<'_> {
    /// Reports the asynchronous checkpoint if it is finished. With `wait`, waits for it.
    pub(in crate::run) fn finish_async_save(&mut self, wait: bool) -> Result<()> {
        if let Some(FinishedAsyncSave { tag, dir, removed, save_time }) = self.checkpointer.finish_async_save(wait)? {
            let (epoch, iter, save_time) = (tag.epoch, tag.step, Some(save_time.as_secs_f64()));
            self.log_saved(&CheckpointRecord { epoch, iter, saved: dir, save_time, time: None }, &removed);
        }
        Ok(())
    }

    fn log_saved(&mut self, record: &CheckpointRecord, removed: &[PathBuf]) {
        self.reporter.log_checkpoint(record);
        self.log_removed(removed);
    }

    fn log_removed(&self, removed: &[PathBuf]) {
        removed
            .iter()
            .for_each(|dir| self.reporter.terminal().line(&format!("deleted {} (save_total_limit)", dir.display())));
    }

    /// Saves every checkpoint that is due after this step.
    pub(in crate::run) fn save_due(&mut self) -> Result<()> {
        self.finish_async_save(false)?;
        let moment = self.moment();
        if moment.end_of_training {
            self.refuse_untrained()?;
        }
        if !self.run.plan.checkpoints.iter().any(|checkpoint| checkpoint.is_due(moment)) {
            return Ok(());
        }
        let is_trained = self.is_trained()?;
        self.save_all(|plan| plan.is_due(moment) && (is_trained || plan.format == CheckpointFormat::Sharded)).map(drop)
    }

    /// Returns true if a step was applied, or if there was no step yet.
    fn is_trained(&mut self) -> Result<bool> {
        self.drain(0)?;
        let n_steps = self.stream.cursor().step;
        Ok(n_steps == 0 || self.progress.n_skipped < n_steps)
    }

    /// Fails if every step so far was skipped, because the weights are the initial ones.
    fn refuse_untrained(&mut self) -> Result<()> {
        let n_steps = self.stream.cursor().step;
        let dtype = self.run.engine.store().compute_dtype();
        if self.is_trained()? { Ok(()) } else { Err(AllStepsSkipped { n_steps, dtype }.into()) }
    }

    pub(in crate::run) fn moment(&self) -> Moment {
        let Cursor { step, epoch, step_in_epoch, .. } = *self.stream.cursor();
        let finished_epoch = (step_in_epoch == 0).then_some(epoch);
        Moment { step, finished_epoch, end_of_training: step >= self.stream.total_steps() }
    }

    /// Completes the saves during which an earlier process of this run was killed, and saves the checkpoints of this step
    /// that it did not reach.
    pub(in crate::run) fn finish_earlier_saves(&mut self) -> Result<()> {
        for (tag, SavedCheckpoint { dir, removed }) in
            self.checkpointer.finish_saves(&self.stream, self.progress.clone())?
        {
            if self.reporter.lacks_checkpoint(&dir) {
                let record =
                    CheckpointRecord { epoch: tag.epoch, iter: tag.step, saved: dir, save_time: None, time: None };
                self.log_saved(&record, &removed);
            } else {
                self.log_removed(&removed);
            }
        }
        self.save_due()
    }

    /// Saves every checkpoint of the plan if the run has ended and none was due, so that no training is lost.
    ///
    /// An earlier process may have been killed between two of these checkpoints.
    pub(in crate::run) fn save_last_step(&mut self) -> Result<()> {
        let (moment, plans) = (self.moment(), &self.run.plan.checkpoints);
        let was_due = self.checkpointer.newest_step().is_some_and(|newest| newest < moment.step)
            || plans.iter().any(|plan| plan.is_due(moment));
        let is_saved = plans.iter().all(|plan| self.checkpointer.is_saved(plan, moment.step));
        if was_due || is_saved || moment.step == 0 {
            return Ok(());
        }
        self.refuse_untrained()?;
        self.reporter.terminal().line("no checkpoint was due in this run: saving the last step");
        self.save_all(|_| true)?;
        self.finish_async_save(true)
    }

    /// Saves the checkpoints of a run that ends early: those to resume from, and those due at the end of training.
    pub(in crate::run) fn save_early_end(&mut self) -> Result<usize> {
        self.refuse_untrained()?;
        let n_checkpoints =
            self.save_all(|plan| plan.format == CheckpointFormat::Sharded || plan.save_end_of_training)?;
        self.finish_async_save(true)?;
        Ok(n_checkpoints)
    }

    /// Replaces the checkpoint of an earlier stop, so that the same command does not train the steps since then again. A failure
    /// is a warning: the older one is intact.
    pub(in crate::run) fn renew_stop_checkpoint(&mut self) {
        let is_there = self.checkpointer.writes_stop_checkpoint() && self.checkpointer.has_stop_checkpoint();
        if let Some(stop) = self.run.plan.stop_checkpoint.as_ref().filter(|_| is_there)
            && let Err(error) = self.save_one(stop)
        {
            tracing::warn!("{}", crate::exit::report(&error).trim_end());
        }
    }

    /// Saves the checkpoints to resume from: the `sharded` entries, or the stop checkpoint. If that fails, exports the weights.
    pub(in crate::run) fn save_to_resume(&mut self) -> Result<StopResult> {
        let plan = self.run.plan;
        self.save_all(|plan| plan.format == CheckpointFormat::Sharded)?;
        self.finish_async_save(true)?;
        let sharded = || plan.checkpoints.iter().filter(|plan| plan.format == CheckpointFormat::Sharded);
        let Cursor { epoch, step, .. } = *self.stream.cursor();
        let tag = Tag { step, epoch };
        if let Some(saved) = sharded().find(|plan| plan.auto_resume) {
            return Ok(StopResult::Resumable(saved.dir(tag)));
        }
        if let Some(saved) = sharded().next() {
            return Ok(StopResult::Saved(saved.dir(tag)));
        }
        if let Some(stop) = &plan.stop_checkpoint {
            match self.save_one(stop) {
                Ok(()) => return Ok(StopResult::Resumable(stop.dir(tag))),
                Err(error) => tracing::warn!("{}", crate::exit::report(&error).trim_end()),
            }
        }
        Ok(if self.save_all(|_| true)? == 0 { StopResult::Lost } else { StopResult::Exported })
    }

    /// Saves the `wanted` checkpoints and returns their number, existing ones included.
    fn save_all(&mut self, wanted: impl Fn(&CheckpointPlan) -> bool) -> Result<usize> {
        let mut n_checkpoints = 0;
        for checkpoint in self.run.plan.checkpoints.iter().filter(|checkpoint| wanted(checkpoint)) {
            self.save_one(checkpoint)?;
            n_checkpoints += 1;
        }
        Ok(n_checkpoints)
    }

    /// Saves a checkpoint to resume from after a failed export, if no entry of the plan does. Returns the error with its folder.
    fn save_after(&mut self, error: anyhow::Error) -> anyhow::Error {
        let stop = self.run.plan.stop_checkpoint.as_ref().filter(|_| self.checkpointer.writes_stop_checkpoint());
        let Some(stop) = stop else { return error };
        if let Err(second) = self.save_one(stop) {
            tracing::warn!("{}", crate::exit::report(&second).trim_end());
            return error;
        }
        let Cursor { epoch, step, .. } = *self.stream.cursor();
        let dir = stop.dir(Tag { step, epoch });
        error.context(format!(
            "failed to export the model; a checkpoint is saved in {}, and the same command continues from it",
            dir.display()
        ))
    }

    /// Saves a checkpoint, unless it exists.
    fn save_one(&mut self, checkpoint: &CheckpointPlan) -> Result<()> {
        self.drain(0)?;
        self.finish_async_save(true)?;
        let _span = span("save", "");
        let before = self.progress.before + self.started.elapsed();
        let progress = Progress { before, ..self.progress.clone() };
        let started = Instant::now();
        let outcome = match self.checkpointer.save(checkpoint, &self.stream, progress) {
            Err(error) if checkpoint.format == CheckpointFormat::HuggingFace => return Err(self.save_after(error)),
            outcome => outcome?,
        };
        if let SaveOutcome::Saved(SavedCheckpoint { dir: saved, removed }) = outcome {
            let Cursor { epoch, step: iter, .. } = *self.stream.cursor();
            let save_time = Some(started.elapsed().as_secs_f64());
            self.log_saved(&CheckpointRecord { epoch, iter, saved, save_time, time: None }, &removed);
            checkpoint.format.failpoint("recorded", iter);
        }
        Ok(())
    }
}
