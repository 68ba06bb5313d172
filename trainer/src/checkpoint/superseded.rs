//! Checkpoints that newer ones of the same folder replace. `trainer clean` removes them.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use candlewick_model::checkpoint::UNFINISHED_MARKER;

use super::error::CheckpointError;
use super::find::search;
use super::plan::{CheckpointFormat, CheckpointPlan, Tag};
use super::retention::{Retention, is_checkpoint_name, remove};
use super::scores::Scores;
use super::storage::LocalDisk;

const FORMATS: [CheckpointFormat; 2] = [CheckpointFormat::Sharded, CheckpointFormat::HuggingFace];

/// The folder `run.N` into which a later run moved the checkpoints of an earlier one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EarlierRunFolder {
    /// The folder.
    pub folder: PathBuf,
    /// The starts of the runs that wrote the checkpoints.
    pub run_starts: BTreeSet<u64>,
    /// True if no newer run has a complete checkpoint of the same format.
    pub is_newest: bool,
}

/// Returns true for a folder that has checkpoints, or those of earlier runs.
pub fn has_checkpoints(output_dir: &Path) -> bool {
    FORMATS.iter().any(|format| format.list(output_dir).is_ok_and(|found| !found.is_empty()))
        || earlier_runs(output_dir).is_ok_and(|found| !found.is_empty())
}

/// Returns the starts of the runs that wrote the checkpoints directly in a folder.
pub fn run_starts(output_dir: &Path) -> Result<BTreeSet<u64>, CheckpointError> {
    let mut starts = BTreeSet::new();
    for format in FORMATS {
        let found = format.list(output_dir).map_err(CheckpointError::io("list", output_dir))?;
        starts.extend(found.iter().filter_map(|(_, dir)| format.written_by(dir)));
    }
    Ok(starts)
}

/// Returns the start of the run with the newest complete checkpoint in a folder.
pub fn newest_run_start(output_dir: &Path) -> Result<Option<u64>, CheckpointError> {
    let newest = FORMATS.map(|format| newest_complete_of(format, output_dir));
    let newest: Vec<Option<(u64, Tag)>> = newest.into_iter().collect::<Result<_, _>>()?;
    Ok(newest.into_iter().flatten().map(|(run_start, _)| run_start).max())
}

/// Returns the folders `run.N` into which later runs moved the checkpoints of earlier ones, oldest first. A folder with
/// anything else is left out.
pub fn earlier_runs(output_dir: &Path) -> Result<Vec<EarlierRunFolder>, CheckpointError> {
    let mut folders = folders_in(output_dir)?;
    folders.retain(|folder| {
        let is_numbered = Tag::name_of(folder).strip_prefix("run.").is_some_and(|n| n.parse::<u32>().is_ok());
        is_numbered && folders_in(folder).is_ok_and(|inside| !inside.is_empty()) && has_only_checkpoints(folder)
    });
    let earlier = folders
        .into_iter()
        .map(|folder| Ok(EarlierRunFolder { run_starts: run_starts(&folder)?, folder, is_newest: true }));
    let mut earlier = earlier.collect::<Result<Vec<_>, CheckpointError>>()?;
    // A number may be used again, so it says nothing about the age.
    earlier.sort_by_key(|run| (run.run_starts.last().copied(), run.folder.clone()));
    let mut newer = complete_formats(output_dir)?;
    for run in earlier.iter_mut().rev() {
        run.is_newest = !has_formats(&run.folder)?.iter().all(|format| newer.contains(format));
        newer.extend(complete_formats(&run.folder)?);
    }
    Ok(earlier)
}

/// Returns the formats of the checkpoints in a folder.
fn has_formats(output_dir: &Path) -> Result<Vec<CheckpointFormat>, CheckpointError> {
    let mut formats = Vec::new();
    for format in FORMATS {
        let found = format.list(output_dir).map_err(CheckpointError::io("list", output_dir))?;
        formats.extend((!found.is_empty()).then_some(format));
    }
    Ok(formats)
}

/// Returns the formats of which a folder has a complete checkpoint.
fn complete_formats(output_dir: &Path) -> Result<Vec<CheckpointFormat>, CheckpointError> {
    let mut formats = Vec::new();
    for format in FORMATS {
        formats.extend(newest_complete_of(format, output_dir)?.map(|_| format));
    }
    Ok(formats)
}

/// Returns true for a folder with checkpoints only. Those whose removal was interrupted count.
fn has_only_checkpoints(folder: &Path) -> bool {
    let is_checkpoint = |path: &Path| {
        let name = Tag::name_of(path);
        let named = |format: &CheckpointFormat| format.parse_dir_name(&name).is_some();
        let is_temporary = name.strip_prefix('.').and_then(|name| name.strip_suffix(".tmp"));
        FORMATS.iter().any(|format| named(format) && format.written_by(path).is_some())
            || is_temporary.is_some_and(|name| is_checkpoint_name(&name)) && is_unfinished(path)
    };
    fs::read_dir(folder).is_ok_and(|mut entries| entries.all(|it| it.is_ok_and(|it| is_checkpoint(&it.path()))))
}

fn is_unfinished(dir: &Path) -> bool {
    dir.join(UNFINISHED_MARKER).is_file() || fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_none())
}

/// Returns the checkpoints of the newest run in an entry's folder that are older than its newest complete one. The best and
/// the retained ones are left out, as are those that a link names and those of other runs.
pub fn older_checkpoints(plan: &CheckpointPlan, scores: &Scores) -> Result<Vec<PathBuf>, CheckpointError> {
    let linked: Vec<PathBuf> = match fs::read_dir(&plan.output_dir) {
        Err(_) => Vec::new(),
        Ok(entries) => entries.flatten().filter_map(|entry| fs::read_link(entry.path()).ok()).collect(),
    };
    let is_linked = |dir: &PathBuf| linked.iter().any(|target| target.file_name() == dir.file_name());
    let Some((run_start, newest)) = newest_complete_of(plan.format, &plan.output_dir)? else { return Ok(Vec::new()) };
    let mut older = Retention { plan, run_start, save_total_limit: 1, scores }.checkpoints_to_delete(newest)?;
    older.retain(|dir| !is_linked(dir));
    Ok(older)
}

/// Returns the start of the newest run, and the tag of its newest complete checkpoint.
fn newest_complete_of(format: CheckpointFormat, output_dir: &Path) -> Result<Option<(u64, Tag)>, CheckpointError> {
    if format == CheckpointFormat::Sharded {
        let newest = search(output_dir)?.complete.into_iter().next();
        return Ok(newest.map(|save| (save.manifest.run_start, save.manifest.tag())));
    }
    let found = format.list(output_dir).map_err(CheckpointError::io("list", output_dir))?;
    let complete = found.into_iter().filter(|(_, dir)| !dir.join(UNFINISHED_MARKER).exists());
    Ok(complete.filter_map(|(tag, dir)| Some((format.written_by(&dir)?, tag))).max())
}

/// Removes the folder of a checkpoint. An interrupted removal leaves no damaged checkpoint.
pub fn remove_checkpoint(dir: &Path) -> Result<(), CheckpointError> {
    remove(&LocalDisk, dir, || ())
}

/// Removes a folder `run.N` of [`earlier_runs`]. An interrupted removal can be repeated.
pub fn remove_earlier_run(folder: &Path) -> Result<(), CheckpointError> {
    super::remove_unfinished_checkpoints(folder)?;
    folders_in(folder)?.iter().try_for_each(|dir| remove_checkpoint(dir))?;
    fs::remove_dir(folder).map_err(CheckpointError::io("remove", folder))
}

fn folders_in(folder: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(CheckpointError::io("list", folder))?,
    };
    let is_folder = |path: &PathBuf| fs::symlink_metadata(path).is_ok_and(|found| found.is_dir());
    Ok(entries.flatten().map(|entry| entry.path()).filter(is_folder).collect())
}
