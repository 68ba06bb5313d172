//! The files of earlier runs in an output folder.
//!
//! A new run renames all files of the earlier one to the same number: run.1.json, metrics.1.jsonl, samples.1.jsonl. So no file
//! of an earlier run seems to be of the new one, and the files of a run are found together.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::plan::LogPlan;

/// The folder of kept batches, in the output folder of a run.
pub const KEPT_BATCHES: &str = "kept_batches";

/// The files and folders that a run with any settings may have in its output folder, except run.json.
const NAMES: [&str; 4] = ["metrics.jsonl", "samples.jsonl", "tensorboard", KEPT_BATCHES];

/// Returns the files and folders of earlier runs in an output folder, with their numbers.
pub(crate) fn numbered_files(folder: &Path) -> Vec<(usize, PathBuf)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut found: Vec<(usize, PathBuf)> = entries.filter_map(|path| Some((number_of(&path)?, path))).collect();
    found.sort();
    found
}

/// Returns the number in the path of a file or folder of an earlier run. A link is of another origin.
fn number_of(path: &Path) -> Option<usize> {
    let name = path.file_name()?.to_str()?;
    let n = name.split('.').find_map(|part| part.parse().ok())?;
    let original = NAMES.iter().chain(&["run.json"]).find(|own| numbered(&path.with_file_name(own), n) == path)?;
    let found = fs::symlink_metadata(path).ok()?;
    (found.is_dir() != original.contains('.') && !found.is_symlink()).then_some(n)
}

/// Renames the files of an earlier run, except run.json, to the first number that none of them has.
pub(super) fn rename_earlier_files(log: &LogPlan) -> io::Result<()> {
    let n = number(log);
    files(log).iter().filter(|path| is_renamed(path)).try_for_each(|path| fs::rename(path, numbered(path, n)))
}

/// Returns the name of run.json that belongs to the other files of the earlier run.
pub(super) fn earlier_run_json(log: &LogPlan, run_json: &Path) -> PathBuf {
    numbered(run_json, number(log))
}

/// Returns true if an earlier run has files other than run.json.
pub(super) fn exist(log: &LogPlan) -> bool {
    files(log).iter().any(|path| is_renamed(path))
}

/// Returns the first unused name of `<name>.1.<ending>`, `.2`, and so on.
pub(super) fn unused_name(path: &Path) -> PathBuf {
    (1..).map(|n| numbered(path, n)).find(|candidate| !candidate.exists()).expect("some number is unused")
}

fn number(log: &LogPlan) -> usize {
    let files = files(log);
    (1..).find(|n| !files.iter().any(|path| numbered(path, *n).exists())).expect("some number is unused")
}

/// Returns the files and folders that a run with any settings may have, except run.json.
fn files(log: &LogPlan) -> Vec<PathBuf> {
    let in_folder = log.output_dir.iter().flat_map(|dir| NAMES.map(|name| dir.join(name)));
    let mut files: Vec<PathBuf> =
        in_folder.chain(log.metrics_path.clone()).chain(log.tracking.tensorboard.clone()).collect();
    files.sort();
    files.dedup();
    files
}

/// Returns true for a file or a folder. A pipe or a device, such as `/dev/stdout`, is written to as it is.
fn is_renamed(path: &Path) -> bool {
    path.is_file() || path.is_dir()
}

fn numbered(path: &Path, n: usize) -> PathBuf {
    let extension = path.extension().map_or(String::new(), |e| format!(".{}", e.to_string_lossy()));
    let stem = path.file_stem().map_or(String::new(), |stem| stem.to_string_lossy().into_owned());
    path.with_file_name(format!("{stem}.{n}{extension}"))
}
