//! The check of the disk space before the first step, and the reservation of that of the checkpoint of a stopped run.

use anyhow::Result;

use crate::checkpoint::{
    CheckpointError, CheckpointFormat, CheckpointPlan, PlannedCheckpoints, ReservedSpace, TrainState, bytes_needed,
    preflight, reserve_space,
};
use crate::data::TrainSteps;
use crate::estimate::format_bytes;

use super::super::state::EngineState;
use super::Checkpointer;

impl<'a> Checkpointer<'a> {
    /// Checks before the first step that every folder is writable and that all checkpoints fit on disk. Reserves the space of
    /// the checkpoint of a stopped run.
    pub(in crate::run) fn preflight(&mut self, stream: &TrainSteps) -> Result<()> {
        let sharded = bytes_needed(&EngineState::of(self.run.engine)?.tensors());
        let exported = |plan: &CheckpointPlan| self.n_export_bytes(plan);
        let run_start = self.run.run_id.run;
        let ends = stream.epoch_ends();
        let planned = |plan: &'a CheckpointPlan| {
            let (done, total_steps) = (stream.cursor().step, stream.total_steps());
            let n_checkpoints = plan.n_checkpoints(done, total_steps, ends);
            let n_retained = plan.n_retained(done, total_steps, ends);
            let keeps_best = self.run.plan.best.is_some();
            let (bytes_per_checkpoint, n_checkpoints) = match plan.format {
                // A signal may request a checkpoint at any time.
                CheckpointFormat::Sharded => (sharded, n_checkpoints.max(1)),
                CheckpointFormat::HuggingFace => (exported(plan), n_checkpoints),
            };
            PlannedCheckpoints { plan, bytes_per_checkpoint, n_checkpoints, n_retained, run_start, keeps_best }
        };
        let plans = &self.run.plan.checkpoints;
        let stop = self.run.plan.stop_checkpoint.iter().filter(|_| self.writes_stop_checkpoint()).map(planned);
        let planned: Vec<_> = plans.iter().map(planned).collect();
        let with_stop: Vec<_> = planned.iter().copied().chain(stop).collect();
        let mut reserved = None;
        let check = || -> Result<()> {
            preflight(&planned)?;
            if let Some(stop) = with_stop.get(planned.len())
                && has_space(preflight(&with_stop))?
            {
                reserved = reserve(stop);
            }
            let exports = self.run.plan.checkpoints.iter().any(|plan| plan.format == CheckpointFormat::HuggingFace);
            if exports {
                self.auxiliary_files(&self.folders(), &[]).check()?;
            }
            Ok(())
        };
        self.run.ranks.process.on_first_rank(check)?;
        self.reserved = reserved;
        Ok(())
    }
}

/// Returns false if the disk has no space for the checkpoint of a stopped run. That is a warning: the run may never be stopped.
fn has_space(checked: Result<(), CheckpointError>) -> Result<bool> {
    match checked {
        Err(CheckpointError::NotEnoughSpace { needed, free, .. }) => {
            let [needed, free] = [needed, free].map(format_bytes);
            tracing::warn!(
                "a run that is stopped could not be continued: its checkpoint and the exports need {needed}, and {free} is \
                 free"
            );
            Ok(false)
        }
        checked => Ok(checked.map(|()| true)?),
    }
}

/// Reserves the space of a checkpoint, so that a disk that fills up during the run does not prevent it. A failure, as beyond a
/// quota, is a warning.
fn reserve(stop: &PlannedCheckpoints) -> Option<ReservedSpace> {
    let dir = &stop.plan.output_dir;
    reserve_space(dir, stop.bytes_per_checkpoint).unwrap_or_else(|error| {
        let needed = format_bytes(stop.bytes_per_checkpoint);
        tracing::warn!(
            "a run that is stopped may not be continued: failed to reserve {needed} for its checkpoint in {}: {error}",
            dir.display()
        );
        None
    })
}
