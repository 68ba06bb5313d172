//! The run that wrote a checkpoint folder. Retention deletes, and saving replaces, only checkpoints of the same run.

use std::ffi::OsStr;
use std::fs;
use std::iter;
use std::path::{Path, PathBuf};

use candlewick_text::files::{MAX_CONFIG_FILE_BYTES, read_regular_file};
use serde::{Deserialize, Serialize};

use super::error::CheckpointError;
use super::latest::remove_dangling_link;
use super::manifest::{MANIFEST, STATE};
use super::plan::{CheckpointFormat, Tag};

/// The file in an exported folder that identifies its run.
pub const EXPORT_MARK: &str = ".candlewick.json";

/// The contents of [`EXPORT_MARK`]. A `sharded` checkpoint has both numbers in its manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportMark {
    /// The start of the run, in milliseconds since 1970. A resumed run keeps it.
    #[serde(rename = "began")]
    pub run_start: u64,
    /// Optimizer steps done.
    pub step: usize,
}

impl ExportMark {
    /// Returns the text of the file.
    pub fn to_json(self) -> String {
        serde_json::to_string(&self).expect("two numbers are JSON") + "\n"
    }
}

/// The start of a run, a field of both manifests and export marks.
#[derive(Deserialize)]
struct RunStartField {
    #[serde(rename = "began")]
    run_start: u64,
}

impl CheckpointFormat {
    /// Returns the start of the run that wrote `dir`, and 0 for a damaged checkpoint. Returns `None` for a link, a
    /// file, or a folder without a mark.
    pub fn written_by(self, dir: &Path) -> Option<u64> {
        let is_folder = fs::symlink_metadata(dir).is_ok_and(|metadata| metadata.is_dir());
        let mark = dir.join(match self {
            CheckpointFormat::Sharded => MANIFEST,
            CheckpointFormat::HuggingFace => EXPORT_MARK,
        });
        let run_start =
            |bytes: Vec<u8>| serde_json::from_slice(&bytes).ok().map(|RunStartField { run_start }| run_start);
        let is_damaged = || self == CheckpointFormat::Sharded && dir.join(STATE).is_file();
        read_regular_file(&mark, MAX_CONFIG_FILE_BYTES)
            .ok()
            .and_then(run_start)
            .or_else(|| is_damaged().then_some(0))
            .filter(|_| is_folder)
    }

    /// Returns the checkpoint of `output_dir` that contains `folder`, or that `folder` or one of its files links to.
    pub fn checkpoint_in_use(self, output_dir: &Path, folder: &Path) -> Option<PathBuf> {
        let output_dir = output_dir.canonicalize().ok()?;
        let files = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
        let is_checkpoint = |dir: &&Path| {
            let name = dir.file_name().and_then(OsStr::to_str).unwrap_or_default();
            dir.parent() == Some(&output_dir) && self.parse_dir_name(name).is_some()
        };
        let checkpoint = |path: PathBuf| path.canonicalize().ok()?.ancestors().find(is_checkpoint).map(Path::to_owned);
        iter::once(folder.to_owned()).chain(files).find_map(checkpoint)
    }

    /// Lists all files, folders and links in a folder that have the name of a checkpoint.
    fn named_like_checkpoints(self, output_dir: &Path) -> Result<Vec<(Tag, PathBuf)>, CheckpointError> {
        let entries = match fs::read_dir(output_dir) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(CheckpointError::io("list", output_dir))?,
        };
        let mut names = Vec::new();
        for entry in entries {
            let path = entry.map_err(CheckpointError::io("list", output_dir))?.path();
            let tag = path.file_name().and_then(OsStr::to_str).and_then(|name| self.parse_dir_name(name));
            names.extend(tag.map(|tag| (tag, path)));
        }
        names.sort();
        Ok(names)
    }
}

/// Moves the checkpoints of other runs after `step` into `output_dir/run.N`, so that none looks newer than this run's.
/// Returns that folder and their number, or `None` if there are none.
pub fn move_aside(
    format: CheckpointFormat,
    output_dir: &Path,
    run_start: u64,
    step: usize,
) -> Result<Option<(PathBuf, usize)>, CheckpointError> {
    let names = format.named_like_checkpoints(output_dir)?.into_iter().filter(|(tag, _)| tag.step > step);
    let others: Vec<PathBuf> = names
        .map(|(_, dir)| dir)
        .filter(|dir| format.written_by(dir).is_some_and(|other| other != run_start))
        .collect();
    if others.is_empty() {
        return Ok(None);
    }
    let unused = (1..).map(|n| output_dir.join(format!("run.{n}"))).find(|folder| !folder.exists());
    let folder = unused.expect("some number is unused");
    fs::create_dir(&folder).map_err(CheckpointError::io("create", &folder))?;
    for dir in &others {
        let to = folder.join(dir.file_name().unwrap_or_default());
        fs::rename(dir, to).map_err(CheckpointError::io("move aside", dir))?;
    }
    remove_dangling_link(output_dir).map_err(CheckpointError::io("remove the link `latest` of", output_dir))?;
    Ok(Some((folder, others.len())))
}

/// Fails if an entry of another origin has the name of a checkpoint that this run will write.
pub fn refuse_occupied(
    format: CheckpointFormat,
    output_dir: &Path,
    run_start: u64,
    is_due: impl Fn(usize) -> bool,
) -> Result<(), CheckpointError> {
    let is_due = format.named_like_checkpoints(output_dir)?.into_iter().filter(|(tag, _)| is_due(tag.step));
    is_due.map(|(_, dir)| dir).try_for_each(|dir| refuse_unowned(format, &dir, run_start))
}

/// Fails if `dir` exists and this run did not write it.
pub fn refuse_unowned(format: CheckpointFormat, dir: &Path, run_start: u64) -> Result<(), CheckpointError> {
    let Ok(found) = fs::symlink_metadata(dir) else { return Ok(()) };
    let is_empty = || fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_none());
    if format.written_by(dir) == Some(run_start) || found.is_dir() && is_empty() {
        return Ok(());
    }
    let what = match (found.is_dir(), found.is_symlink()) {
        (true, _) => "a folder that this run did not write",
        (_, true) => "a link",
        _ => "a file",
    };
    Err(CheckpointError::Occupied { dir: dir.to_owned(), what })
}
