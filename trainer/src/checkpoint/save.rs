//! Writes a save so that at every instant the old ones are whole and the new one is absent or whole.

use std::path::{Path, PathBuf};

use anyhow::{Error, Result};
use candlewick_runtime::process_group::ProcessGroup;
use serde::{Deserialize, Serialize};

use super::error::CheckpointError;
use super::hash::HashedFile;
use super::latest::update_latest_link;
use super::manifest::{FileEntry, MANIFEST, Manifest, STATE, TensorEntry};
use super::owner::refuse_foreign;
use super::plan::{CheckpointPlan, Tag};
use super::retention::{old_name, temporary_name};
use super::shard::write_shard;
use super::state::{Piece, RunState, TrainState};
use super::storage::{Drive, Storage};
use crate::failpoint::failpoint;

/// Bytes of tensors after which the next one begins another file.
const SHARD_BYTES: usize = 2 << 30;

/// Describes a finished save.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    /// Its folder.
    pub dir: PathBuf,
    /// Its size.
    pub n_bytes: u64,
    /// Older saves that `keep` deleted.
    pub removed: Vec<PathBuf>,
}

/// Writes the state after `run.step` steps under the tag of that step, then deletes what `keep`
/// says. A save of the same tag is replaced. After an error the earlier saves are as they were.
///
/// Each rank of `process` writes its [pieces](TrainState::written); the first one completes the checkpoint. All call it.
pub fn save(plan: &CheckpointPlan, run: &RunState, state: &dyn TrainState, process: &ProcessGroup) -> Result<Saved> {
    save_with(&Drive, SHARD_BYTES, plan, run, state, process)
}

pub(crate) fn save_with(
    storage: &dyn Storage,
    shard_bytes: usize,
    plan: &CheckpointPlan,
    run: &RunState,
    state: &dyn TrainState,
    process: &ProcessGroup,
) -> Result<Saved> {
    let tag = run.tag();
    let dir = plan.dir(tag);
    let temporary = plan.output_dir.join(temporary_name(&plan.kind.dir_name(tag)));
    let begin = || {
        refuse_foreign(plan.kind, &dir, run.began)?;
        Ok(start(storage, &plan.output_dir, &temporary).map_err(|error| error.in_save(&dir))?)
    };
    let written = process
        .on_first_rank(begin)
        .and_then(|_| {
            let rank = process.rank();
            let write = || write_share(storage, shard_bytes, &temporary, state, rank);
            exchange_shares(process, process.keep_alive().during(write).map_err(|error| error.in_share(&dir, rank)))
        })
        .and_then(|shares| {
            let shares = shares.iter().map(|bytes| Share::of_bytes(bytes, &dir)).collect::<Result<Vec<_>, _>>()?;
            process.on_first_rank(|| {
                let n_bytes = finish(storage, &temporary, run, shares)
                    .inspect(|_| failpoint("checkpoint_written", run.step))
                    .and_then(|n_bytes| publish(storage, &temporary, &dir).map(|()| n_bytes))
                    .map_err(|error| error.in_save(&dir))?;
                failpoint("checkpoint_published", run.step);
                update_latest_link(&dir);
                let prune = |keep| plan.retention(keep, run).prune_with(storage, tag);
                Ok((n_bytes, plan.keep.map_or(Ok(Vec::new()), prune)?))
            })
        });
    if written.is_err() && process.is_first() {
        // The first error is the one to report; what stays behind is cleared by the next start.
        let _ = storage.remove_dir(&temporary);
    }
    let (n_bytes, removed) = written?.unwrap_or_default();
    Ok(Saved { dir, n_bytes, removed })
}

/// What one rank has written.
#[derive(Default, Serialize, Deserialize)]
struct Share {
    files: Vec<FileEntry>,
    tensors: Vec<TensorEntry>,
}

impl Share {
    fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("names and numbers are JSON")
    }

    fn of_bytes(bytes: &[u8], dir: &Path) -> Result<Self, CheckpointError> {
        let malformed = |error| CheckpointError::damaged(dir, format!("what another rank says of its part: {error}"));
        serde_json::from_slice(bytes).map_err(malformed)
    }
}

/// Gives every rank what each has written. A rank that the others gave up finds their folder removed: it returns the group's
/// failure.
fn exchange_shares(process: &ProcessGroup, own: Result<Share, CheckpointError>) -> Result<Vec<Vec<u8>>> {
    match own {
        Err(removed @ CheckpointError::NotShared { .. }) => {
            process.exchange_payloads(Err(removed.to_string()))?;
            Err(removed.into())
        }
        own => process.exchange(own.map(|share| share.to_bytes()).map_err(Error::from)),
    }
}

fn start(storage: &dyn Storage, output_dir: &Path, temporary: &Path) -> Result<(), CheckpointError> {
    storage.remove_dir(temporary).map_err(CheckpointError::io("remove", temporary))?;
    storage.create_dir(output_dir).map_err(CheckpointError::io("create", output_dir))?;
    storage.create_dir(temporary).map_err(CheckpointError::io("create", temporary))?;
    storage.mark(temporary).map_err(CheckpointError::io("mark", temporary))
}

/// Writes the pieces that this rank is to write; a rank without any writes no file.
fn write_share(
    storage: &dyn Storage,
    shard_bytes: usize,
    dir: &Path,
    state: &dyn TrainState,
    rank: usize,
) -> Result<Share, CheckpointError> {
    let mut share = Share::default();
    for (i, pieces) in split(state.written(), shard_bytes).into_iter().enumerate() {
        let name = format!("shard_{rank:05}_{:05}.safetensors", i + 1);
        share.files.push(write_shard(storage, dir, &name, &pieces, state)?);
        share.tensors.extend(pieces.into_iter().map(|piece| TensorEntry::new(piece, &name)));
    }
    Ok(share)
}

/// Writes the state and the manifest of what the ranks have written, in this order, and returns the bytes of all.
fn finish(storage: &dyn Storage, dir: &Path, run: &RunState, shares: Vec<Share>) -> Result<u64, CheckpointError> {
    let (mut files, mut tensors) = (Vec::new(), Vec::new());
    for share in shares {
        files.extend(share.files);
        tensors.extend(share.tensors);
    }
    files.push(write_json(storage, dir, STATE, run)?);
    let manifest = Manifest::new(run.tag(), run.began, files, tensors);
    let written = write_json(storage, dir, MANIFEST, &manifest)?;
    storage.sync_dir(dir).map_err(CheckpointError::io("sync", dir))?;
    Ok(manifest.n_bytes() + written.size)
}

fn split(pieces: Vec<Piece>, shard_bytes: usize) -> Vec<Vec<Piece>> {
    let mut shards: Vec<Vec<Piece>> = Vec::new();
    let mut room = 0;
    for piece in pieces {
        let n_bytes = 4 * piece.range.len();
        match shards.last_mut().filter(|_| n_bytes <= room) {
            Some(shard) => shard.push(piece),
            None => {
                shards.push(vec![piece]);
                room = shard_bytes;
            }
        }
        room = room.saturating_sub(n_bytes);
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

/// Gives the finished folder its name. One that has the name already steps aside first; should
/// the program die between the two renames, the next start puts it back.
fn publish(storage: &dyn Storage, temporary: &Path, dir: &Path) -> Result<(), CheckpointError> {
    let parent = dir.parent().expect("a save lies in its output_dir");
    let old = parent.join(old_name(&Tag::name_of(dir)));
    if dir.exists() {
        storage.remove_dir(&old).map_err(CheckpointError::io("remove", &old))?;
        storage.mark(dir).map_err(CheckpointError::io("mark", dir))?;
        storage.rename(dir, &old).map_err(CheckpointError::io("rename", dir))?;
    }
    if let Err(error) = storage.rename(temporary, dir) {
        let _ = storage.rename(&old, dir).and_then(|()| storage.unmark(dir));
        return Err(CheckpointError::io("rename", temporary)(error));
    }
    storage.unmark(dir).map_err(CheckpointError::io("finish", dir))?;
    storage.sync_dir(parent).map_err(CheckpointError::io("sync", parent))?;
    storage.remove_dir(&old).map_err(CheckpointError::io("remove", &old))
}
