//! Retention: deletes checkpoints beyond `save_total_limit`, and unfinished ones of a killed run. It keeps the newest, the
//! best, and every one of `save_retain_interval`.

use std::path::{Path, PathBuf};

use candlewick_model::checkpoint::UNFINISHED_MARKER;

use super::error::CheckpointError;
use super::latest::remove_dangling_link;
use super::plan::{CheckpointFormat, CheckpointPlan, Tag};
use super::scores::Scores;
use super::state::RunState;
use super::storage::{LocalDisk, Storage};

/// The checkpoints of one run in one folder, and the number of them to keep.
#[derive(Clone, Copy, Debug)]
pub struct Retention<'a> {
    /// Their entry of the plan.
    pub plan: &'a CheckpointPlan,
    /// The start of the run. Checkpoints of other runs are never deleted.
    pub run_start: u64,
    /// The number of the newest to keep.
    pub save_total_limit: usize,
    /// The evaluations that select the best checkpoint, which is also kept.
    pub scores: &'a Scores,
}

impl CheckpointPlan {
    /// Returns the retention policy of this run's checkpoints.
    pub(crate) fn retention<'a>(&'a self, save_total_limit: usize, run: &'a RunState) -> Retention<'a> {
        Retention { plan: self, run_start: run.run_start, save_total_limit, scores: &run.scores }
    }
}

impl Retention<'_> {
    /// Deletes this run's checkpoints up to `newest`, except the newest, the best and the retained ones. Returns the deleted
    /// folders.
    pub fn prune(&self, newest: Tag) -> Result<Vec<PathBuf>, CheckpointError> {
        self.prune_with(&LocalDisk, newest)
    }

    pub(crate) fn prune_with(&self, storage: &dyn Storage, newest: Tag) -> Result<Vec<PathBuf>, CheckpointError> {
        let removed = self.checkpoints_to_delete(newest)?;
        for dir in &removed {
            remove(storage, dir, || self.plan.format.failpoint("removing", newest.step))?;
        }
        Ok(removed)
    }

    /// Returns the checkpoints that a prune deletes.
    pub(super) fn checkpoints_to_delete(&self, newest: Tag) -> Result<Vec<PathBuf>, CheckpointError> {
        let Self { plan, run_start, save_total_limit, scores } = *self;
        let CheckpointPlan { format, output_dir, .. } = plan;
        let mut checkpoints = format.list(output_dir).map_err(CheckpointError::io("list", output_dir))?;
        checkpoints.retain(|(tag, dir)| tag.step <= newest.step && format.written_by(dir) == Some(run_start));
        let steps: Vec<usize> = checkpoints.iter().map(|(tag, _)| tag.step).collect();
        let best = scores.best_of(&steps);
        let older = checkpoints.into_iter().filter(|(tag, _)| tag.step < newest.step);
        let is_kept = |step: usize| Some(step) == best || plan.is_retained(step);
        let surplus = older.skip(save_total_limit.saturating_sub(1)).filter(|(tag, _)| !is_kept(tag.step));
        Ok(surplus.map(|(_, dir)| dir).collect())
    }
}

/// Deletes a checkpoint. `renamed` is called when it has no longer its name.
pub(super) fn remove(storage: &dyn Storage, dir: &Path, renamed: impl FnOnce()) -> Result<(), CheckpointError> {
    // Rename first: otherwise a kill during deletion would leave a damaged checkpoint.
    let temporary = dir.with_file_name(temporary_name(&Tag::name_of(dir)));
    storage.remove_dir(&temporary).map_err(CheckpointError::io("remove", &temporary))?;
    storage.mark_unfinished(dir).map_err(CheckpointError::io("mark", dir))?;
    storage.rename(dir, &temporary).map_err(CheckpointError::io("rename", dir))?;
    renamed();
    storage.remove_dir(&temporary).map_err(CheckpointError::io("remove", &temporary))
}

/// Deletes all complete checkpoints of a run in an entry's folder, and the folder if nothing else is in it. Returns true if
/// there were any.
pub(crate) fn remove_all(plan: &CheckpointPlan, run_start: u64) -> Result<bool, CheckpointError> {
    let CheckpointPlan { format, output_dir, .. } = plan;
    remove_unfinished_checkpoints(output_dir)?;
    let mut checkpoints = format.list(output_dir).map_err(CheckpointError::io("list", output_dir))?;
    checkpoints.retain(|(_, dir)| format.written_by(dir) == Some(run_start));
    for (tag, dir) in &checkpoints {
        remove(&LocalDisk, dir, || format.failpoint("removing", tag.step))?;
    }
    remove_dangling_link(output_dir).map_err(CheckpointError::io("remove the link `latest` of", output_dir))?;
    // It fails if the folder is missing, or has files of another origin.
    let _ = std::fs::remove_dir(output_dir);
    Ok(!checkpoints.is_empty())
}

/// Removes unfinished checkpoints, and restores a checkpoint whose replacement was not finished. Returns one line for
/// each.
///
/// # Errors
/// If an entry of another origin has the name of an unfinished checkpoint, or the file system reports an error.
pub fn remove_unfinished_checkpoints(output_dir: &Path) -> Result<Vec<String>, CheckpointError> {
    let entries = match std::fs::read_dir(output_dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(CheckpointError::io("list", output_dir))?,
    };
    let mut done = Vec::new();
    for entry in entries {
        let path = entry.map_err(CheckpointError::io("list", output_dir))?.path();
        let name = Tag::name_of(&path);
        let unfinished = name.strip_prefix('.').and_then(|name| name.strip_suffix(".tmp")).filter(is_checkpoint_name);
        if let Some(save) = unfinished {
            LocalDisk.remove_dir(&path).map_err(CheckpointError::io("remove", &path))?;
            done.push(format!("removed an unfinished {save}"));
        }
        if name
            .strip_prefix('.')
            .and_then(|name| name.strip_suffix(".lock"))
            .is_some_and(|name| is_checkpoint_name(&name))
        {
            // The lock of an export that was killed.
            std::fs::remove_file(&path).map_err(CheckpointError::io("remove", &path))?;
        }
        if let Some(save) = name.strip_prefix('.').and_then(|name| name.strip_suffix(".old")).filter(is_checkpoint_name)
        {
            done.push(restore_or_remove_old(&path, &output_dir.join(save))?);
        }
    }
    Ok(done)
}

/// Returns the name of a checkpoint while it is written or deleted.
pub(crate) fn temporary_name(name: &str) -> String {
    format!(".{name}.tmp")
}

/// Returns the name of a checkpoint while it is being replaced.
pub(crate) fn old_name(name: &str) -> String {
    format!(".{name}.old")
}

fn restore_or_remove_old(old: &Path, dir: &Path) -> Result<String, CheckpointError> {
    let name = Tag::name_of(dir);
    if dir.exists() || !old.join(UNFINISHED_MARKER).is_file() {
        LocalDisk.remove_dir(old).map_err(CheckpointError::io("remove", old))?;
        return Ok(format!("removed the replaced {name}"));
    }
    let storage: &dyn Storage = &LocalDisk;
    storage.rename(old, dir).and_then(|()| storage.unmark_finished(dir)).map_err(CheckpointError::io("rename", old))?;
    Ok(format!("restored {name}, whose replacement was not finished"))
}

pub(super) fn is_checkpoint_name(name: &&str) -> bool {
    [CheckpointFormat::Sharded, CheckpointFormat::HuggingFace]
        .iter()
        .any(|format| format.parse_dir_name(name).is_some())
}
