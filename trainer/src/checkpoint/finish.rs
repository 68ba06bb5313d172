//! The last parts of writing a checkpoint, after its folder has its final name.
//!
//! A process may be killed before they are done. A run that resumes therefore repeats them for its newest checkpoints.

use std::path::{Path, PathBuf};

use super::error::CheckpointError;
use super::find::open;
use super::latest::update_latest_link;
use super::plan::{CheckpointFormat, CheckpointPlan, Tag};
use super::retention::{old_name, remove_unfinished_checkpoints};
use super::state::RunState;
use super::storage::{LocalDisk, Storage};
use crate::failpoint::failpoint;

/// The newest checkpoint of a run in a folder, after it was completed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FinishedSave {
    pub(crate) tag: Tag,
    /// Older checkpoints that retention deleted.
    pub(crate) removed: Vec<PathBuf>,
}

impl CheckpointPlan {
    /// Completes the checkpoint with this tag: removes the mark of an unfinished folder and the replaced folder, points `latest` to
    /// the checkpoint, and deletes checkpoints beyond `save_total_limit`. Returns the deleted folders.
    ///
    /// A part that is done already has no effect.
    pub(crate) fn finish_save(
        &self,
        storage: &dyn Storage,
        tag: Tag,
        run: &RunState,
    ) -> Result<Vec<PathBuf>, CheckpointError> {
        self.remove_marks(storage, tag)?;
        update_latest_link(&self.dir(tag));
        self.prune(storage, tag, run)
    }

    fn remove_marks(&self, storage: &dyn Storage, tag: Tag) -> Result<(), CheckpointError> {
        let dir = self.dir(tag);
        let old = self.output_dir.join(old_name(&self.format.dir_name(tag)));
        let remove_marks = || {
            storage.unmark_finished(&dir).map_err(CheckpointError::io("finish", &dir))?;
            storage.sync_dir(&self.output_dir).map_err(CheckpointError::io("sync", &self.output_dir))?;
            storage.remove_dir(&old).map_err(CheckpointError::io("remove", &old))
        };
        remove_marks().map_err(|error| error.in_save(&dir))?;
        self.format.failpoint("published", tag.step);
        Ok(())
    }

    fn prune(&self, storage: &dyn Storage, tag: Tag, run: &RunState) -> Result<Vec<PathBuf>, CheckpointError> {
        self.format.failpoint("linked", tag.step);
        let prune = |save_total_limit| self.retention(save_total_limit, run).prune_with(storage, tag);
        let removed = self.save_total_limit.map_or(Ok(Vec::new()), prune)?;
        self.format.failpoint("pruned", tag.step);
        Ok(removed)
    }

    /// Completes the newest checkpoint of `run` up to its step, and removes unfinished checkpoints. Returns `None` if this run wrote
    /// no checkpoint into the folder.
    ///
    /// The link `latest` stays if the folder has a complete checkpoint of a later step of the run. A resume from another folder
    /// leaves such checkpoints.
    pub(crate) fn finish_newest_save(&self, run: &RunState) -> Result<Option<FinishedSave>, CheckpointError> {
        for line in remove_unfinished_checkpoints(&self.output_dir)? {
            tracing::info!("{line} in {}", self.output_dir.display());
        }
        let mut checkpoints =
            self.format.list(&self.output_dir).map_err(CheckpointError::io("list", &self.output_dir))?;
        checkpoints.retain(|(_, dir)| self.format.written_by(dir) == Some(run.run_start));
        let is_complete = |dir: &Path| self.format != CheckpointFormat::Sharded || open(dir).is_ok();
        let has_later = checkpoints.iter().any(|(tag, dir)| tag.step > run.step && is_complete(dir));
        let Some((tag, dir)) = checkpoints.into_iter().find(|(tag, _)| tag.step <= run.step) else { return Ok(None) };
        self.remove_marks(&LocalDisk, tag)?;
        if !has_later {
            update_latest_link(&dir);
        }
        Ok(Some(FinishedSave { tag, removed: self.prune(&LocalDisk, tag, run)? }))
    }
}

impl CheckpointFormat {
    /// Marks a point of writing a checkpoint at which a test ends the process: `checkpoint_PART` or `export_PART`.
    pub(crate) fn failpoint(self, part: &str, step: usize) {
        let kind = match self {
            CheckpointFormat::Sharded => "checkpoint",
            CheckpointFormat::HuggingFace => "export",
        };
        failpoint(&format!("{kind}_{part}"), step);
    }
}
