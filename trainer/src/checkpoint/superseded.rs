//! Checkpoints that newer ones of the same folder replace. `trainer clean` removes them.

use std::fs;
use std::path::{Path, PathBuf};

use super::error::CheckpointError;
use super::find::search;
use super::plan::{CheckpointFormat, Tag};
use super::retention::temporary_name;

const FORMATS: [CheckpointFormat; 2] = [CheckpointFormat::Sharded, CheckpointFormat::HuggingFace];

/// Returns true for a folder that has checkpoints, or those of earlier runs.
pub fn has_checkpoints(output_dir: &Path) -> bool {
    FORMATS.iter().any(|format| format.list(output_dir).is_ok_and(|found| !found.is_empty()))
        || earlier_runs(output_dir).is_ok_and(|found| !found.is_empty())
}

/// Returns the folders `run.N` into which later runs moved the checkpoints of earlier ones. A folder with anything else is
/// left out.
pub fn earlier_runs(output_dir: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let mut folders = folders_in(output_dir)?;
    folders.retain(|folder| {
        let is_numbered = Tag::name_of(folder).strip_prefix("run.").is_some_and(|n| n.parse::<u32>().is_ok());
        is_numbered && folders_in(folder).is_ok_and(|inside| !inside.is_empty()) && has_only_checkpoints(folder)
    });
    folders.sort();
    Ok(folders)
}

fn has_only_checkpoints(folder: &Path) -> bool {
    let is_checkpoint = |path: &Path| {
        let named = |format: &CheckpointFormat| format.parse_dir_name(&Tag::name_of(path)).is_some();
        FORMATS.iter().any(|format| named(format) && format.written_by(path).is_some())
    };
    fs::read_dir(folder).is_ok_and(|mut entries| entries.all(|it| it.is_ok_and(|it| is_checkpoint(&it.path()))))
}

/// Returns the checkpoints of the newest run in a folder that are older than its newest complete one. The one of the step
/// `best` and those that a link names are left out, as are those of other runs.
pub fn older_checkpoints(output_dir: &Path, best: Option<usize>) -> Result<Vec<PathBuf>, CheckpointError> {
    let linked: Vec<PathBuf> = match fs::read_dir(output_dir) {
        Err(_) => Vec::new(),
        Ok(entries) => entries.flatten().filter_map(|entry| fs::read_link(entry.path()).ok()).collect(),
    };
    let is_linked = |dir: &Path| linked.iter().any(|target| target.file_name() == dir.file_name());
    let mut older = Vec::new();
    for format in FORMATS {
        let Some((run_start, newest)) = newest_complete_of(format, output_dir)? else { continue };
        let found = format.list(output_dir).map_err(CheckpointError::io("list", output_dir))?;
        older.extend(found.into_iter().filter_map(|(tag, dir)| {
            let is_older = tag < newest && format.written_by(&dir) == Some(run_start);
            (is_older && Some(tag.step) != best && !is_linked(&dir)).then_some(dir)
        }));
    }
    Ok(older)
}

/// Returns the start of the newest run, and the tag of its newest complete checkpoint.
fn newest_complete_of(format: CheckpointFormat, output_dir: &Path) -> Result<Option<(u64, Tag)>, CheckpointError> {
    if format == CheckpointFormat::Sharded {
        let newest = search(output_dir)?.complete.into_iter().next();
        return Ok(newest.map(|save| (save.manifest.run_start, save.manifest.tag())));
    }
    let found = format.list(output_dir).map_err(CheckpointError::io("list", output_dir))?;
    Ok(found.into_iter().filter_map(|(tag, dir)| Some((format.written_by(&dir)?, tag))).max())
}

/// Removes a folder of a checkpoint. It is renamed first: an interrupted removal leaves no damaged checkpoint.
pub fn remove_checkpoint(dir: &Path) -> Result<(), CheckpointError> {
    let temporary = dir.with_file_name(temporary_name(&Tag::name_of(dir)));
    fs::rename(dir, &temporary).map_err(CheckpointError::io("rename", dir))?;
    fs::remove_dir_all(&temporary).map_err(CheckpointError::io("remove", &temporary))
}

fn folders_in(folder: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(CheckpointError::io("list", folder))?,
    };
    let is_folder = |path: &PathBuf| fs::symlink_metadata(path).is_ok_and(|found| found.is_dir());
    Ok(entries.flatten().map(|entry| entry.path()).filter(is_folder).collect())
}
