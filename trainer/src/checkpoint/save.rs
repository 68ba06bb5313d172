//! Writes a save so that at every instant the old ones are whole and the new one is absent or whole.

use std::path::{Path, PathBuf};

use super::error::CheckpointError;
use super::hash::HashedFile;
use super::manifest::{FileEntry, MANIFEST, Manifest, STATE, TensorEntry};
use super::plan::{CheckpointPlan, Tag};
use super::retention::{old_name, prune_with, temporary_name};
use super::shard::write_shard;
use super::state::{RunState, TensorMeta, TrainState};
use super::storage::{Drive, Storage};

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
pub fn save(plan: &CheckpointPlan, run: &RunState, state: &dyn TrainState) -> Result<Saved, CheckpointError> {
    save_with(&Drive, SHARD_BYTES, plan, run, state)
}

pub(crate) fn save_with(
    storage: &dyn Storage,
    shard_bytes: usize,
    plan: &CheckpointPlan,
    run: &RunState,
    state: &dyn TrainState,
) -> Result<Saved, CheckpointError> {
    let tag = run.tag();
    let dir = plan.dir(tag);
    let temporary = plan.output_dir.join(temporary_name(&plan.kind.dir_name(tag)));
    let written = start(storage, &plan.output_dir, &temporary)
        .and_then(|()| write_all(storage, shard_bytes, &temporary, run, state))
        .and_then(|n_bytes| publish(storage, &temporary, &dir).map(|()| n_bytes));
    let n_bytes = written.map_err(|error| {
        // The first error is the one to report; what stays behind is cleared by the next start.
        let _ = storage.remove_dir(&temporary);
        error.in_save(&dir)
    })?;
    let removed =
        plan.keep.map_or(Ok(Vec::new()), |keep| prune_with(storage, plan.kind, &plan.output_dir, tag, keep))?;
    Ok(Saved { dir, n_bytes, removed })
}

fn start(storage: &dyn Storage, output_dir: &Path, temporary: &Path) -> Result<(), CheckpointError> {
    storage.remove_dir(temporary).map_err(CheckpointError::io("remove", temporary))?;
    storage.create_dir(output_dir).map_err(CheckpointError::io("create", output_dir))?;
    storage.create_dir(temporary).map_err(CheckpointError::io("create", temporary))
}

/// Writes shards, state and manifest, in this order, and returns their bytes.
fn write_all(
    storage: &dyn Storage,
    shard_bytes: usize,
    dir: &Path,
    run: &RunState,
    state: &dyn TrainState,
) -> Result<u64, CheckpointError> {
    let mut files = Vec::new();
    let mut entries = Vec::new();
    for (i, tensors) in split(state.tensors(), shard_bytes).into_iter().enumerate() {
        let name = format!("shard_{:05}.safetensors", i + 1);
        files.push(write_shard(storage, dir, &name, &tensors, state)?);
        entries.extend(tensors.into_iter().map(|tensor| TensorEntry {
            offset: vec![0; tensor.shape.len()],
            name: tensor.name,
            shape: tensor.shape,
            file: name.clone(),
        }));
    }
    files.push(write_json(storage, dir, STATE, run)?);
    let manifest = Manifest::new(run.tag(), run.began, files, entries);
    let written = write_json(storage, dir, MANIFEST, &manifest)?;
    storage.sync_dir(dir).map_err(CheckpointError::io("sync", dir))?;
    Ok(manifest.n_bytes() + written.size)
}

fn split(tensors: Vec<TensorMeta>, shard_bytes: usize) -> Vec<Vec<TensorMeta>> {
    let mut shards: Vec<Vec<TensorMeta>> = Vec::new();
    let mut room = 0;
    for tensor in tensors {
        let n_bytes = 4 * tensor.n_values();
        match shards.last_mut().filter(|_| n_bytes <= room) {
            Some(shard) => shard.push(tensor),
            None => {
                shards.push(vec![tensor]);
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
        storage.rename(dir, &old).map_err(CheckpointError::io("rename", dir))?;
    }
    if let Err(error) = storage.rename(temporary, dir) {
        let _ = storage.rename(&old, dir);
        return Err(CheckpointError::io("rename", temporary)(error));
    }
    storage.sync_dir(parent).map_err(CheckpointError::io("sync", parent))?;
    storage.remove_dir(&old).map_err(CheckpointError::io("remove", &old))
}
