//! Deletes saves: old ones beyond `keep`, and what a killed run left behind.

use std::path::{Path, PathBuf};

use candlewick_model::checkpoint::UNFINISHED_MARKER;

use super::error::CheckpointError;
use super::plan::{CheckpointFormat, CheckpointPlan, Tag};
use super::scores::Scores;
use super::state::RunState;
use super::storage::{LocalDisk, Storage};

/// The checkpoints of one run in one folder, of which `keep` stay.
#[derive(Clone, Copy, Debug)]
pub struct Retention<'a> {
    /// Their format.
    pub format: CheckpointFormat,
    /// Their folder.
    pub output_dir: &'a Path,
    /// The start of the run; nothing that another run wrote is deleted.
    pub run_start: u64,
    /// The number of the newest that stay.
    pub save_total_limit: usize,
    /// The evaluations that name the best one, which stays as well.
    pub scores: &'a Scores,
}

impl CheckpointPlan {
    /// Returns what decides which of this run's checkpoints stay.
    pub(crate) fn retention<'a>(&'a self, save_total_limit: usize, run: &'a RunState) -> Retention<'a> {
        Retention {
            format: self.format,
            output_dir: &self.output_dir,
            run_start: run.run_start,
            save_total_limit,
            scores: &run.scores,
        }
    }
}

impl Retention<'_> {
    /// Deletes all but the newest and the best of this run's checkpoints up to `newest`, and returns the folders deleted.
    pub fn prune(&self, newest: Tag) -> Result<Vec<PathBuf>, CheckpointError> {
        self.prune_with(&LocalDisk, newest)
    }

    pub(crate) fn prune_with(&self, storage: &dyn Storage, newest: Tag) -> Result<Vec<PathBuf>, CheckpointError> {
        let Self { format, output_dir, run_start, save_total_limit, scores } = *self;
        let mut checkpoints = format.list(output_dir).map_err(CheckpointError::io("list", output_dir))?;
        checkpoints.retain(|(tag, dir)| tag.step <= newest.step && format.written_by(dir) == Some(run_start));
        let steps: Vec<usize> = checkpoints.iter().map(|(tag, _)| tag.step).collect();
        let best = scores.best_of(&steps);
        let older = checkpoints.into_iter().filter(|(tag, _)| tag.step < newest.step);
        let mut removed = Vec::new();
        for (_, dir) in older.skip(save_total_limit.saturating_sub(1)).filter(|(tag, _)| Some(tag.step) != best) {
            // Under a dotted name first: a half-deleted save must not look like a damaged one.
            let temporary = output_dir.join(temporary_name(&Tag::name_of(&dir)));
            storage.remove_dir(&temporary).map_err(CheckpointError::io("remove", &temporary))?;
            storage.mark(&dir).map_err(CheckpointError::io("mark", &dir))?;
            storage.rename(&dir, &temporary).map_err(CheckpointError::io("rename", &dir))?;
            storage.remove_dir(&temporary).map_err(CheckpointError::io("remove", &temporary))?;
            removed.push(dir);
        }
        Ok(removed)
    }
}

/// Removes unfinished saves of an earlier run, and puts back a save that was about to be replaced.
/// Returns one line for each.
///
/// # Errors
/// If something else has the name of an unfinished save, or the file system refuses.
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
        if let Some(save) = name.strip_prefix('.').and_then(|name| name.strip_suffix(".old")).filter(is_checkpoint_name)
        {
            done.push(restore_or_remove_old(&path, &output_dir.join(save))?);
        }
    }
    Ok(done)
}

/// The name under which a save is written or deleted.
pub(crate) fn temporary_name(name: &str) -> String {
    format!(".{name}.tmp")
}

/// The name under which a save waits for its replacement.
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
    storage.rename(old, dir).and_then(|()| storage.unmark(dir)).map_err(CheckpointError::io("rename", old))?;
    Ok(format!("put back {name}, whose replacement was not finished"))
}

fn is_checkpoint_name(name: &&str) -> bool {
    [CheckpointFormat::Sharded, CheckpointFormat::HuggingFace]
        .iter()
        .any(|format| format.parse_dir_name(name).is_some())
}
