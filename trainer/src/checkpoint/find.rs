//! Finds checkpoints whose files have the sizes in the manifest. Loading verifies the hashes.

use std::path::{Path, PathBuf};

use candlewick_text::files::{MAX_GENERATED_FILE_BYTES, read_regular_file};
use candlewick_text::quantity::counted;

use super::error::CheckpointError;
use super::manifest::{MANIFEST, Manifest, STATE};
use super::plan::{CheckpointFormat, Tag};
use super::state::CheckpointId;

/// A checkpoint whose files all exist and have the right sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompleteCheckpoint {
    /// Its folder.
    pub dir: PathBuf,
    /// Its manifest.
    pub manifest: Manifest,
}

/// A checkpoint that cannot be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkippedCheckpoint {
    /// Its folder.
    pub dir: PathBuf,
    /// The reason.
    pub reason: String,
}

/// The checkpoints in a folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FoundCheckpoints {
    /// Newest first: first by the start of the run, then by steps.
    pub complete: Vec<CompleteCheckpoint>,
    /// Newest first.
    pub skipped: Vec<SkippedCheckpoint>,
}

/// Sorts the `sharded` checkpoints of a folder into complete and damaged ones. Ignores unfinished ones, whose names
/// begin with a dot. Treats a missing folder as empty.
pub fn search(output_dir: &Path) -> Result<FoundCheckpoints, CheckpointError> {
    let checkpoints = CheckpointFormat::Sharded.list(output_dir).map_err(CheckpointError::io("list", output_dir))?;
    let mut search = FoundCheckpoints::default();
    for (tag, dir) in checkpoints {
        match check_sizes(&dir, tag) {
            Ok(manifest) => search.complete.push(CompleteCheckpoint { dir, manifest }),
            Err(reason) => search.skipped.push(SkippedCheckpoint { dir, reason }),
        }
    }
    search.complete.sort_by_key(|save| std::cmp::Reverse((save.manifest.run_start, save.manifest.tag())));
    Ok(search)
}

/// Returns the newest complete checkpoint, and warns about the damaged ones.
pub fn newest_complete(output_dir: &Path) -> Result<Option<CompleteCheckpoint>, CheckpointError> {
    let search = search(output_dir)?;
    let newest = search.complete.into_iter().next();
    search.skipped.iter().for_each(SkippedCheckpoint::warn);
    Ok(newest)
}

/// Returns true if a folder is a `sharded` checkpoint: it has the manifest of one.
pub fn is_checkpoint(dir: &Path) -> bool {
    dir.join(MANIFEST).is_file() && dir.join(STATE).is_file()
}

/// Opens a checkpoint folder of any name. Its files have the sizes in the manifest; the hashes are not verified.
pub(crate) fn open(dir: &Path) -> Result<CompleteCheckpoint, CheckpointError> {
    let manifest = read_manifest(dir).map_err(|reason| CheckpointError::damaged(dir, reason))?;
    Ok(CompleteCheckpoint { dir: dir.to_path_buf(), manifest })
}

impl CompleteCheckpoint {
    /// Returns the identity in the manifest.
    pub fn id(&self) -> CheckpointId {
        CheckpointId { run_start: self.manifest.run_start, step: self.manifest.step }
    }
}

impl SkippedCheckpoint {
    pub(crate) fn warn(&self) {
        tracing::warn!("the checkpoint {} is skipped: {}", self.dir.display(), self.reason);
    }
}

impl Tag {
    /// Returns the last component of a path, as text.
    pub(crate) fn name_of(dir: &Path) -> String {
        dir.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }
}

fn check_sizes(dir: &Path, tag: Tag) -> Result<Manifest, String> {
    let manifest = read_manifest(dir)?;
    if manifest.tag() != tag {
        return Err(format!("its manifest says step {}, epoch {}", manifest.step, manifest.epoch));
    }
    Ok(manifest)
}

/// Reads the manifest and compares the sizes of the files with it. The error is the reason why the checkpoint is damaged.
fn read_manifest(dir: &Path) -> Result<Manifest, String> {
    let bytes = read_regular_file(&dir.join(MANIFEST), MAX_GENERATED_FILE_BYTES)
        .map_err(|error| format!("no {MANIFEST}: incomplete, or written by another program ({error})"))?;
    let manifest = Manifest::parse(&bytes)?;
    for file in &manifest.files {
        let metadata = std::fs::metadata(dir.join(&file.name)).map_err(|error| format!("{}: {error}", file.name))?;
        if metadata.len() != file.size {
            return Err(format!("{} has {}, not {}", file.name, counted(metadata.len(), "byte"), file.size));
        }
    }
    Ok(manifest)
}
