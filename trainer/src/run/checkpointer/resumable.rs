//! The checkpoint that a run resumes: its own newest one, else that of `resume_from_checkpoint`.

use std::cmp::Reverse;

use anyhow::Result;
use candlewick_runtime::run_id::RunId;

use crate::checkpoint::{CheckpointPlan, CompleteCheckpoint, RunState, newest_complete, open, read_state, search};
use crate::plan::Plan;

/// Returns the id of a run of `plan`. With `auto_resume` it is that of the run whose checkpoint the run will resume, or of the
/// unfinished run `unfinished` in the same folder, which has no checkpoint yet. Else it is new.
///
/// A run that resumes a copied checkpoint, or that of `resume_from_checkpoint`, is a new run. It keeps the date of the original
/// run, but does not own its checkpoints.
pub(in crate::run) fn run_id(plan: &Plan, unfinished: Option<u64>) -> Result<RunId> {
    let now = RunId::now();
    let resumes = plan.checkpoints.iter().any(|checkpoint| checkpoint.auto_resume);
    let new = unfinished.filter(|_| resumes).unwrap_or(now.run);
    let Some(found) = to_resume(plan)? else { return Ok(RunId { run: new, date: new }) };
    let (run_start, state) = (found.checkpoint.manifest.run_start, read_state(&found.checkpoint).ok());
    let date = state.as_ref().and_then(|state| state.date).unwrap_or(run_start);
    let is_copy = state.is_some_and(|state| state.is_copied_to(&found.checkpoint.dir));
    Ok(RunId { run: if is_copy || !found.is_own { new } else { run_start }, date })
}

/// Reads the state of the checkpoint that a run of `plan` will resume; `None` without one, or if it is damaged.
pub(in crate::run) fn state_to_resume(plan: &Plan) -> Result<Option<RunState>> {
    Ok(to_resume(plan)?.and_then(|found| read_state(&found.checkpoint).ok()))
}

/// The checkpoint to resume.
struct CheckpointToResume {
    checkpoint: CompleteCheckpoint,
    /// True if it is in a folder of this run.
    is_own: bool,
}

fn to_resume(plan: &Plan) -> Result<Option<CheckpointToResume>> {
    for entry in entries_to_resume(plan)? {
        if let Some(checkpoint) = newest_complete(&entry.output_dir)? {
            return Ok(Some(CheckpointToResume { checkpoint, is_own: true }));
        }
    }
    // A folder that is no checkpoint is an error later, with a remedy.
    let given = plan.resume_from_checkpoint.as_deref().and_then(|dir| open(dir).ok());
    Ok(given.map(|checkpoint| CheckpointToResume { checkpoint, is_own: false }))
}

/// Lists the entries with checkpoints of this run to resume from, that with the newest checkpoint first.
fn entries_to_resume(plan: &Plan) -> Result<Vec<&CheckpointPlan>> {
    let entries: Vec<&CheckpointPlan> = candidates(plan).collect();
    Ok(order_to_resume(plan)?.into_iter().map(|idx| entries[idx]).collect())
}

/// Lists the entries from which a run may resume, in the order of the plan.
pub(super) fn candidates(plan: &Plan) -> impl Iterator<Item = &CheckpointPlan> {
    plan.checkpoints.iter().filter(|checkpoint| checkpoint.auto_resume).chain(&plan.stop_checkpoint)
}

/// Returns the indices of [`candidates`], that with the newest checkpoint first: by the start of the run, then by steps.
///
/// An entry with damaged checkpoints only comes before all: its error must not be lost.
pub(super) fn order_to_resume(plan: &Plan) -> Result<Vec<usize>> {
    let mut ages = Vec::new();
    for (idx, entry) in candidates(plan).enumerate() {
        let found = search(&entry.output_dir)?;
        let age = match found.complete.first() {
            Some(newest) => (newest.manifest.run_start, newest.manifest.step),
            None if found.skipped.is_empty() => (0, 0),
            None => (u64::MAX, 0),
        };
        ages.push((Reverse(age), idx));
    }
    ages.sort();
    Ok(ages.into_iter().map(|(_, idx)| idx).collect())
}
