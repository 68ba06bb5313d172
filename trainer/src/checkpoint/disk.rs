//! Checks before the first step that the disk has space for all checkpoints.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::error::CheckpointError;
use super::plan::{CheckpointPlan, Tag};
use super::retention::remove_unfinished_checkpoints;
use super::state::TensorMeta;

const TEST_FILE: &str = ".candlewick-trial";

/// The checkpoints that one entry of the `checkpoint` list will write.
#[derive(Clone, Copy, Debug)]
pub struct PlannedCheckpoints<'a> {
    /// The entry.
    pub plan: &'a CheckpointPlan,
    /// The size of one checkpoint.
    pub bytes_per_checkpoint: u64,
    /// The number of checkpoints that remain to be written: `CheckpointPlan::n_checkpoints`.
    pub n_checkpoints: usize,
    /// The number of them that retention never deletes: `CheckpointPlan::n_retained`.
    pub n_retained: usize,
    /// The start of the run. Retention deletes only this run's checkpoints.
    pub run_start: u64,
    /// True if retention also keeps the best checkpoint.
    pub keeps_best: bool,
}

/// Returns an upper bound for the bytes of a `sharded` checkpoint of these tensors, with headers and state.
pub fn bytes_needed(tensors: &[TensorMeta]) -> u64 {
    let values: usize = tensors.iter().map(TensorMeta::n_values).sum();
    4 * values as u64 + 512 * tensors.len() as u64 + (1 << 16)
}

/// Creates the folders, removes unfinished checkpoints, writes a test file into each folder, and compares the bytes
/// that the checkpoints need with the free bytes.
pub fn preflight(checkpoints: &[PlannedCheckpoints]) -> Result<(), CheckpointError> {
    let mut needed_on: BTreeMap<u64, u64> = BTreeMap::new();
    for planned in checkpoints.iter().filter(|planned| planned.n_checkpoints > 0) {
        let output_dir = &planned.plan.output_dir;
        fs::create_dir_all(output_dir).map_err(CheckpointError::io("create the folder", output_dir))?;
        for line in remove_unfinished_checkpoints(output_dir)? {
            tracing::info!("{line} in {}", output_dir.display());
        }
        write_test_file(output_dir).map_err(CheckpointError::io("write a test file into", output_dir))?;
        let device = fs::metadata(output_dir).map_err(CheckpointError::io("look at", output_dir))?.dev();
        let needed = needed_on.entry(device).or_default();
        *needed = needed.saturating_add(peak_bytes(planned)?);
        let free = free_bytes(output_dir).map_err(CheckpointError::io("measure the disk of", output_dir))?;
        if *needed > free {
            let output_dir = output_dir.clone();
            return Err(CheckpointError::NotEnoughSpace { output_dir, needed: *needed, free });
        }
    }
    Ok(())
}

/// Checks that the disk of a folder, which may be missing, has `needed` free bytes.
pub fn require_space(dir: &Path, needed: u64) -> Result<(), CheckpointError> {
    let absolute = std::path::absolute(dir).map_err(CheckpointError::io("locate", dir))?;
    let existing = absolute.ancestors().find(|folder| folder.exists()).unwrap_or(dir);
    let free = free_bytes(existing).map_err(CheckpointError::io("measure the disk of", dir))?;
    match needed > free {
        true => Err(CheckpointError::NoSpaceForModel { output_dir: dir.to_owned(), needed, free }),
        false => Ok(()),
    }
}

/// Returns the bytes that this user may still write on the disk of `dir`.
pub fn free_bytes(dir: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(dir)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Space on a disk that no other program can take. A drop, or the end of the process, frees it.
#[derive(Debug)]
pub(crate) struct ReservedSpace {
    /// A file without a name.
    _file: File,
}

/// Reserves space on the disk of `dir`. Returns `None` on a file system that cannot reserve.
pub(crate) fn reserve_space(dir: &Path, n_bytes: u64) -> io::Result<Option<ReservedSpace>> {
    use rustix::fs::{FallocateFlags, fallocate};
    let file = tempfile::tempfile_in(dir)?;
    match fallocate(&file, FallocateFlags::empty(), 0, n_bytes.max(1)) {
        Ok(()) => Ok(Some(ReservedSpace { _file: file })),
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Returns the peak number of bytes by which an entry's checkpoints grow the disk.
///
/// The peak is reached while the newest checkpoint is being written: `save_total_limit` older ones, the retained ones and
/// the best one are still there. Existing checkpoints of this run are subtracted, because retention deletes them.
fn peak_bytes(planned: &PlannedCheckpoints) -> Result<u64, CheckpointError> {
    let CheckpointPlan { format, output_dir, save_total_limit, .. } = planned.plan;
    let present = format.list(output_dir).map_err(CheckpointError::io("list", output_dir))?;
    let is_deleted = |(tag, dir): &&(Tag, PathBuf)| {
        !planned.plan.is_retained(tag.step) && format.written_by(dir) == Some(planned.run_start)
    };
    let present = present.iter().filter(is_deleted).count();
    let n_kept = |save_total_limit: usize| save_total_limit.max(1) + usize::from(planned.keeps_best);
    let n_grown = save_total_limit.map_or(planned.n_checkpoints, |save_total_limit| {
        let n_limited = (n_kept(save_total_limit) + 1).saturating_sub(present).max(1);
        planned.n_checkpoints.min(n_limited + planned.n_retained)
    });
    Ok(planned.bytes_per_checkpoint.saturating_mul(n_grown as u64))
}

fn write_test_file(dir: &Path) -> io::Result<()> {
    let path = dir.join(TEST_FILE);
    let mut file = File::create(&path)?;
    let written = file.write_all(&[0u8; 4096]).and_then(|()| file.sync_all());
    fs::remove_file(&path)?;
    written
}
