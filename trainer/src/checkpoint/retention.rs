//! Deletes saves: old ones beyond `keep`, and what a killed run left behind.

use std::path::{Path, PathBuf};

use candlewick_model::checkpoint::UNFINISHED_MARKER;

use super::error::CheckpointError;
use super::plan::{CheckpointPlan, Kind, Tag};
use super::scores::Scores;
use super::state::RunState;
use super::storage::{Drive, Storage};

/// The checkpoints of one run in one folder, of which `keep` stay.
#[derive(Clone, Copy, Debug)]
pub struct Retention<'a> {
    /// Their kind.
    pub kind: Kind,
    /// Their folder.
    pub output_dir: &'a Path,
    /// The start of the run; nothing that another run wrote is deleted.
    pub began: u64,
    /// The number of the newest that stay.
    pub keep: usize,
    /// The evaluations that name the best one, which stays as well.
    pub scores: &'a Scores,
}

impl CheckpointPlan {
    /// Returns what decides which of this run's checkpoints stay.
    pub(crate) fn retention<'a>(&'a self, keep: usize, run: &'a RunState) -> Retention<'a> {
        Retention { kind: self.kind, output_dir: &self.output_dir, began: run.began, keep, scores: &run.scores }
    }
}

impl Retention<'_> {
    /// Deletes all but the newest and the best of this run's checkpoints up to `newest`, and returns the folders deleted.
    pub fn prune(&self, newest: Tag) -> Result<Vec<PathBuf>, CheckpointError> {
        self.prune_with(&Drive, newest)
    }

    pub(crate) fn prune_with(&self, storage: &dyn Storage, newest: Tag) -> Result<Vec<PathBuf>, CheckpointError> {
        let Self { kind, output_dir, began, keep, scores } = *self;
        let mut saves = kind.list(output_dir).map_err(CheckpointError::io("list", output_dir))?;
        saves.retain(|(tag, dir)| tag.step <= newest.step && kind.written_by(dir) == Some(began));
        let steps: Vec<usize> = saves.iter().map(|(tag, _)| tag.step).collect();
        let best = scores.best_of(&steps);
        let older = saves.into_iter().filter(|(tag, _)| tag.step < newest.step);
        let mut removed = Vec::new();
        for (_, dir) in older.skip(keep.saturating_sub(1)).filter(|(tag, _)| Some(tag.step) != best) {
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
pub fn clear_leftovers(output_dir: &Path) -> Result<Vec<String>, CheckpointError> {
    let entries = match std::fs::read_dir(output_dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(CheckpointError::io("list", output_dir))?,
    };
    let mut done = Vec::new();
    for entry in entries {
        let path = entry.map_err(CheckpointError::io("list", output_dir))?.path();
        let name = Tag::name_of(&path);
        let unfinished = name.strip_prefix('.').and_then(|name| name.strip_suffix(".tmp")).filter(is_save);
        if let Some(save) = unfinished {
            Drive.remove_dir(&path).map_err(CheckpointError::io("remove", &path))?;
            done.push(format!("removed an unfinished {save}"));
        }
        if let Some(save) = name.strip_prefix('.').and_then(|name| name.strip_suffix(".old")).filter(is_save) {
            done.push(settle_old(&path, &output_dir.join(save))?);
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

fn settle_old(old: &Path, dir: &Path) -> Result<String, CheckpointError> {
    let name = Tag::name_of(dir);
    if dir.exists() || !old.join(UNFINISHED_MARKER).is_file() {
        Drive.remove_dir(old).map_err(CheckpointError::io("remove", old))?;
        return Ok(format!("removed the replaced {name}"));
    }
    let storage: &dyn Storage = &Drive;
    storage.rename(old, dir).and_then(|()| storage.unmark(dir)).map_err(CheckpointError::io("rename", old))?;
    Ok(format!("put back {name}, whose replacement was not finished"))
}

fn is_save(name: &&str) -> bool {
    [Kind::Sharded, Kind::HuggingFace].iter().any(|kind| kind.parse_dir_name(name).is_some())
}
