//! Writes a checkpoint atomically: at any time the old checkpoints are complete, and the new one is absent or complete.

use std::path::{Path, PathBuf};

use anyhow::{Error, Result};
use candlewick_runtime::process_group::ProcessGroup;
use candlewick_runtime::progress::{ProgressUnit, WorkProgress};
use serde::{Deserialize, Serialize};

use super::error::CheckpointError;
use super::hash::HashedFile;
use super::manifest::{FileEntry, MANIFEST, Manifest, STATE, TensorEntry};
use super::owner::refuse_unowned;
use super::plan::{CheckpointPlan, Tag};
use super::retention::{old_name, temporary_name};
use super::shard::write_shard;
use super::state::{RunState, TensorChunk, TrainState};
use super::storage::{LocalDisk, Storage};

/// The bytes of tensors after which a new shard file begins.
const SHARD_BYTES: usize = 2 << 30;

/// A checkpoint on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenCheckpoint {
    /// Its folder.
    pub dir: PathBuf,
    /// Its size.
    pub n_bytes: u64,
    /// Older checkpoints that retention deleted.
    pub removed: Vec<PathBuf>,
}

/// Writes the state after `run.step` steps under the tag of that step, then deletes checkpoints beyond
/// `save_total_limit`.
///
/// Replaces an existing checkpoint with this tag. After an error, the earlier checkpoints are unchanged. Each rank of
/// `process` writes its [chunks](TrainState::chunks_to_write), and the first one completes the checkpoint. All ranks
/// call this.
pub fn save(
    plan: &CheckpointPlan,
    run: &RunState,
    state: &dyn TrainState,
    process: &ProcessGroup,
) -> Result<WrittenCheckpoint> {
    save_with(&LocalDisk, SHARD_BYTES, plan, run, state, process)
}

pub(crate) fn save_with(
    storage: &dyn Storage,
    shard_bytes: usize,
    plan: &CheckpointPlan,
    run: &RunState,
    state: &dyn TrainState,
    process: &ProcessGroup,
) -> Result<WrittenCheckpoint> {
    let tag = run.tag();
    let dir = plan.dir(tag);
    let temporary = plan.output_dir.join(temporary_name(&plan.format.dir_name(tag)));
    let begin = || {
        refuse_unowned(plan.format, &dir, run.run_start)?;
        Ok(start(storage, &plan.output_dir, &temporary).map_err(|error| error.in_save(&dir))?)
    };
    let written = process
        .on_first_rank(begin)
        .and_then(|_| {
            let rank = process.rank();
            let write = || write_rank_files(storage, shard_bytes, &temporary, state, rank);
            exchange_rank_manifests(
                process,
                process.keep_alive().during(write).map_err(|error| error.in_rank_write(&dir, rank)),
            )
        })
        .and_then(|rank_manifests| {
            let rank_manifests = rank_manifests
                .iter()
                .map(|bytes| RankManifest::of_bytes(bytes, &dir))
                .collect::<Result<Vec<_>, _>>()?;
            process.on_first_rank(|| {
                let n_bytes = write_manifest(storage, &temporary, run, rank_manifests)
                    .inspect(|_| plan.format.failpoint("written", run.step))
                    .and_then(|n_bytes| publish(storage, &temporary, &dir).map(|()| n_bytes))
                    .map_err(|error| error.in_save(&dir))?;
                plan.format.failpoint("renamed", run.step);
                Ok((n_bytes, plan.finish_save(storage, tag, run)?))
            })
        });
    if written.is_err() && process.is_first() {
        // Keep the first error. The next start removes an unfinished folder.
        let _ = storage.remove_dir(&temporary);
    }
    let (n_bytes, removed) = written?.unwrap_or_default();
    Ok(WrittenCheckpoint { dir, n_bytes, removed })
}

/// The files and tensors that one rank wrote.
#[derive(Default, Serialize, Deserialize)]
struct RankManifest {
    files: Vec<FileEntry>,
    tensors: Vec<TensorEntry>,
}

impl RankManifest {
    fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("names and numbers are JSON")
    }

    fn of_bytes(bytes: &[u8], dir: &Path) -> Result<Self, CheckpointError> {
        let malformed = |error| CheckpointError::damaged(dir, format!("another rank's manifest is malformed: {error}"));
        serde_json::from_slice(bytes).map_err(malformed)
    }
}

/// Gathers the manifests of all ranks on every rank. If the group failed and removed the folder, returns the group's
/// failure.
fn exchange_rank_manifests(process: &ProcessGroup, own: Result<RankManifest, CheckpointError>) -> Result<Vec<Vec<u8>>> {
    match own {
        Err(removed @ CheckpointError::NotShared { .. }) => {
            process.exchange_payloads(Err(removed.to_string()))?;
            Err(removed.into())
        }
        own => process.exchange(own.map(|rank_manifest| rank_manifest.to_bytes()).map_err(Error::from)),
    }
}

fn start(storage: &dyn Storage, output_dir: &Path, temporary: &Path) -> Result<(), CheckpointError> {
    storage.remove_dir(temporary).map_err(CheckpointError::io("remove", temporary))?;
    storage.create_dir(output_dir).map_err(CheckpointError::io("create", output_dir))?;
    storage.create_dir(temporary).map_err(CheckpointError::io("create", temporary))?;
    storage.mark_unfinished(temporary).map_err(CheckpointError::io("mark", temporary))
}

/// Writes this rank's chunks. A rank without chunks writes no file.
fn write_rank_files(
    storage: &dyn Storage,
    shard_bytes: usize,
    dir: &Path,
    state: &dyn TrainState,
    rank: usize,
) -> Result<RankManifest, CheckpointError> {
    let mut rank_manifest = RankManifest::default();
    let n_bytes: usize = state.chunks_to_write().iter().map(|chunk| 4 * chunk.range.len()).sum();
    let progress = WorkProgress::start("save checkpoint", ProgressUnit::Bytes, n_bytes);
    for (i, chunks) in split(state.chunks_to_write(), shard_bytes).into_iter().enumerate() {
        let name = format!("shard_{rank:05}_{:05}.safetensors", i + 1);
        rank_manifest.files.push(write_shard(storage, dir, &name, &chunks, state)?);
        progress.add(chunks.iter().map(|chunk| 4 * chunk.range.len()).sum());
        rank_manifest.tensors.extend(chunks.into_iter().map(|chunk| TensorEntry::new(chunk, &name)));
    }
    Ok(rank_manifest)
}

/// Writes the loop's state, then the manifest of all ranks' files. Returns the total bytes.
fn write_manifest(
    storage: &dyn Storage,
    dir: &Path,
    run: &RunState,
    rank_manifests: Vec<RankManifest>,
) -> Result<u64, CheckpointError> {
    let (mut files, mut tensors) = (Vec::new(), Vec::new());
    for rank_manifest in rank_manifests {
        files.extend(rank_manifest.files);
        tensors.extend(rank_manifest.tensors);
    }
    files.push(write_json(storage, dir, STATE, run)?);
    let manifest = Manifest::new(run.tag(), run.run_start, files, tensors);
    let written = write_json(storage, dir, MANIFEST, &manifest)?;
    storage.sync_dir(dir).map_err(CheckpointError::io("sync", dir))?;
    Ok(manifest.n_bytes() + written.size)
}

fn split(chunks: Vec<TensorChunk>, shard_bytes: usize) -> Vec<Vec<TensorChunk>> {
    let mut shards: Vec<Vec<TensorChunk>> = Vec::new();
    let mut free_bytes = 0;
    for chunk in chunks {
        let n_bytes = 4 * chunk.range.len();
        match shards.last_mut().filter(|_| n_bytes <= free_bytes) {
            Some(shard) => shard.push(chunk),
            None => {
                shards.push(vec![chunk]);
                free_bytes = shard_bytes;
            }
        }
        free_bytes = free_bytes.saturating_sub(n_bytes);
    }
    shards
}

fn write_json(
    storage: &dyn Storage,
    dir: &Path,
    name: &str,
    value: &impl serde::Serialize,
) -> Result<FileEntry, CheckpointError> {
    let path = dir.join(name);
    let json = serde_json::to_vec_pretty(value).expect("string keys and plain values are JSON");
    let mut file = HashedFile::create(storage, &path).map_err(CheckpointError::io("create", &path))?;
    file.write(&json).map_err(CheckpointError::io("write", &path))?;
    file.finish(name).map_err(CheckpointError::io("sync", &path))
}

/// Renames the finished folder to its final name. Renames an existing folder with that name first; if the process dies
/// between the two renames, the next start restores it. [`CheckpointPlan::finish_save`] removes it.
fn publish(storage: &dyn Storage, temporary: &Path, dir: &Path) -> Result<(), CheckpointError> {
    let parent = dir.parent().expect("a checkpoint folder has a parent");
    let old = parent.join(old_name(&Tag::name_of(dir)));
    if dir.exists() {
        storage.remove_dir(&old).map_err(CheckpointError::io("remove", &old))?;
        storage.mark_unfinished(dir).map_err(CheckpointError::io("mark", dir))?;
        storage.rename(dir, &old).map_err(CheckpointError::io("rename", dir))?;
    }
    if let Err(error) = storage.rename(temporary, dir) {
        let _ = storage.rename(&old, dir).and_then(|()| storage.unmark_finished(dir));
        return Err(CheckpointError::io("rename", temporary)(error));
    }
    Ok(())
}
