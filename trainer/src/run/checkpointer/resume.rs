//! The resume of a checkpoint.

use std::path::Path;

use anyhow::{Context, Result};
use candlewick_text::files::without_links;

use crate::checkpoint::{
    CheckpointError, CheckpointFormat, CheckpointPlan, CompleteCheckpoint, Resumed, RunOrigin, RunState, Tag,
    open_given, read_state, resume, resume_from, search,
};

use super::super::state::EngineState;
use super::Checkpointer;
use super::resumable::{candidates, order_to_resume};

impl Checkpointer<'_> {
    /// Loads the newest complete checkpoint of this run, or that of `resume_from_checkpoint`, if there is one.
    pub(in crate::run) fn resume(&mut self) -> Result<Option<Resumed>> {
        let plan = self.run.plan;
        let process = &self.run.ranks.process;
        let order = process.broadcast_from_first(|| Ok(serde_json::to_vec(&order_to_resume(plan)?)?))?;
        let order: Vec<usize> = serde_json::from_slice(&order).context("failed to read the first rank's order")?;
        let entries: Vec<&CheckpointPlan> = candidates(plan).collect();
        for entry in order.into_iter().map(|idx| entries[idx]) {
            self.run.ranks.process.on_first_rank(|| self.check_origin(entry))?;
            if let Some(resumed) = self.load(entry)? {
                let is_given = plan
                    .resume_from_checkpoint
                    .as_ref()
                    .is_some_and(|dir| without_links(dir) == without_links(&resumed.dir));
                self.started_from =
                    if is_given { RunOrigin::Checkpoint(resumed.run.id()) } else { resumed.run.started_from };
                return Ok(Some(resumed));
            }
        }
        let Some(dir) = &plan.resume_from_checkpoint else { return Ok(None) };
        let mut state = EngineState::of(self.run.engine)?;
        let resumed = resume_from(dir, &self.fingerprint, &mut state, &self.run.ranks.process)?;
        self.run.engine.store().refresh()?;
        self.resumed_scores.clone_from(&resumed.run.scores);
        self.started_from = RunOrigin::Checkpoint(resumed.run.id());
        Ok(Some(resumed))
    }

    /// Returns true if the run starts from a checkpoint that is in no folder of its own.
    pub(in crate::run) fn is_of_other_run(&self, resumed: &Resumed) -> bool {
        !self.newest.values().any(|(_, dir)| *dir == resumed.dir)
    }

    /// Loads the newest complete checkpoint of an entry, if there is one.
    pub(super) fn load(&mut self, checkpoint: &CheckpointPlan) -> Result<Option<Resumed>> {
        let mut state = EngineState::of(self.run.engine)?;
        let resumed = resume(checkpoint, &self.fingerprint, &mut state, &self.run.ranks.process)?;
        if let Some(resumed) = &resumed {
            self.run.engine.store().refresh()?;
            let newest = (resumed.run.step, resumed.dir.clone());
            self.newest.insert((checkpoint.format, checkpoint.output_dir.clone()), newest);
            self.resumed_scores.clone_from(&resumed.run.scores);
        }
        Ok(resumed)
    }

    /// Fails if the newest checkpoint of an entry is of a run with another `output_dir`, or does not continue the one that the
    /// recipe names.
    ///
    /// The recipe of a stopped run must also have the same settings, unless it names the checkpoint.
    fn check_origin(&self, entry: &CheckpointPlan) -> Result<()> {
        let plan = self.run.plan;
        let Some(CompleteCheckpoint { dir, manifest }) = search(&entry.output_dir)?.complete.into_iter().next() else {
            return Ok(());
        };
        let Ok(state) = read_state(&CompleteCheckpoint { dir: dir.clone(), manifest }) else { return Ok(()) };
        let given = plan.resume_from_checkpoint.as_deref();
        if given.is_some_and(|given| without_links(given) == without_links(&dir)) {
            return Ok(());
        }
        if let Some(output_dir) = &plan.log.output_dir
            && let Some(written_by) = state.other_output_dir(&dir, output_dir)
        {
            let (written_by, output_dir) = (written_by.to_owned(), output_dir.clone());
            return Err(CheckpointError::OtherRun { dir, written_by, output_dir }.into());
        }
        given.map_or(Ok(()), |given| check_continues(given, &dir, &state))?;
        let differences = self.changed_settings(&state);
        if plan.stop_checkpoint.as_ref() == Some(entry) && !differences.is_empty() {
            return Err(CheckpointError::ChangedSettings { dir, differences }.into());
        }
        Ok(())
    }
}

/// Fails unless the checkpoint in `newest` continues the one of `resume_from_checkpoint`. That one may be gone: later saves
/// replace it. A checkpoint that does not record the start of its run is accepted.
fn check_continues(given: &Path, newest: &Path, state: &RunState) -> Result<(), CheckpointError> {
    let was_given = || {
        let tag = CheckpointFormat::Sharded.parse_dir_name(&Tag::name_of(given));
        tag.is_some_and(|tag| matches!(state.started_from, RunOrigin::Checkpoint(from) if from.step == tag.step))
    };
    match open_given(given) {
        Ok(found) if state.started_from == RunOrigin::Checkpoint(found.id()) => Ok(()),
        Ok(_) if state.started_from == RunOrigin::Unknown => {
            tracing::warn!(
                "resume from {}: it is older than this program's record of the start of a run; nothing shows that it continues {}",
                newest.display(),
                given.display()
            );
            Ok(())
        }
        Err(_) if was_given() => Ok(()),
        Ok(_) => Err(CheckpointError::NewerCheckpoint { given: given.to_owned(), newest: newest.to_owned() }),
        Err(error) => Err(error),
    }
}
