//! Resumes a run from its newest complete checkpoint.
//!
//! If the hashes of a checkpoint differ, it is skipped with a warning and the one before it is tried. Training is
//! deterministic, so an earlier start costs time but does not change the result. If there are checkpoints but none is
//! complete, the run fails: it never restarts from scratch on its own.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Error, Result};
use candlewick_runtime::process_group::ProcessGroup;
use candlewick_runtime::progress::{ProgressUnit, WorkProgress};
use candlewick_text::files::{MAX_GENERATED_FILE_BYTES, read_regular_file};

use super::error::CheckpointError;
use super::find::{CompleteCheckpoint, FoundCheckpoints, SkippedCheckpoint, is_checkpoint, open, search};
use super::fingerprint::Fingerprint;
use super::hash::hash_differs;
use super::manifest::{Manifest, STATE};
use super::plan::{CheckpointPlan, Tag};
use super::retention::remove_unfinished_checkpoints;
use super::shard::{ChunkRead, read_shard};
use super::state::{RunState, TensorChunk, TensorMeta, TrainState};

/// The state from which a run resumes.
#[derive(Clone, Debug, PartialEq)]
pub struct Resumed {
    /// The training loop's state in the checkpoint.
    pub run: RunState,
    /// The checkpoint folder.
    pub dir: PathBuf,
    /// Newer checkpoints that were skipped.
    pub skipped: Vec<SkippedCheckpoint>,
}

/// Loads the newest complete checkpoint of `plan.output_dir` into `state`. Returns `None` if there are no checkpoints.
///
/// Fails if the checkpoint's fingerprint differs from `fingerprint`, that of the current plan. Each rank verifies some
/// of the files and loads the tensors that it needs. All ranks of `process` call this, and all must see the same
/// checkpoints.
pub fn resume(
    plan: &CheckpointPlan,
    fingerprint: &Fingerprint,
    state: &mut dyn TrainState,
    process: &ProcessGroup,
) -> Result<Option<Resumed>> {
    let cleared = process.on_first_rank(|| Ok(remove_unfinished_checkpoints(&plan.output_dir)?))?;
    for line in cleared.into_iter().flatten() {
        tracing::info!("{line} in {}", plan.output_dir.display());
    }
    let found = search_on_all_ranks(plan, process)?;
    let mut skipped = found.skipped;
    for complete in found.complete {
        match verify(&complete, process)? {
            Ok(run) => {
                check_compatible(&complete, &run, fingerprint, &state.tensors())?;
                process.keep_alive().during(|| load_tensors(&complete, state))?;
                skipped.iter().for_each(SkippedCheckpoint::warn);
                return Ok(Some(Resumed { run, dir: complete.dir, skipped }));
            }
            Err(reason) => skipped.push(SkippedCheckpoint { dir: complete.dir, reason }),
        }
    }
    if skipped.is_empty() {
        return Ok(None);
    }
    let reasons = skipped.iter().map(|s| format!("{}: {}", s.dir.display(), s.reason)).collect();
    Err(CheckpointError::NoneComplete { output_dir: plan.output_dir.clone(), reasons }.into())
}

/// Loads the checkpoint in `dir` into `state`. All ranks of `process` call this. Fails like [`resume`].
pub fn resume_from(
    dir: &Path,
    fingerprint: &Fingerprint,
    state: &mut dyn TrainState,
    process: &ProcessGroup,
) -> Result<Resumed> {
    let complete = process.all_ok(open_given(dir).map_err(Into::into))?;
    let run = verify(&complete, process)?.map_err(|reason| CheckpointError::damaged(dir, reason))?;
    check_compatible(&complete, &run, fingerprint, &state.tensors())?;
    process.keep_alive().during(|| load_tensors(&complete, state))?;
    Ok(Resumed { run, dir: dir.to_path_buf(), skipped: Vec::new() })
}

/// Opens the checkpoint of `resume_from_checkpoint`. The error names the checkpoints near a folder that is none.
pub(crate) fn open_given(dir: &Path) -> Result<CompleteCheckpoint, CheckpointError> {
    open(dir).map_err(|error| {
        if !dir.exists() {
            let near = dir.ancestors().skip(1).take(2).map(checkpoints_of_run).find(|found| !found.is_empty());
            return CheckpointError::NoSuchCheckpoint { dir: dir.to_owned(), near: near.unwrap_or_default() };
        }
        match checkpoints_of_run(dir).into_iter().next().filter(|_| !is_checkpoint(dir)) {
            Some(newest) => CheckpointError::NotACheckpoint { dir: dir.to_owned(), newest },
            None => error,
        }
    })
}

/// Lists the complete checkpoints in a folder, and in the default folders of a run in it, newest first.
fn checkpoints_of_run(dir: &Path) -> Vec<PathBuf> {
    let folders = [dir.to_owned(), dir.join("checkpoints"), dir.join("stop_checkpoint")];
    let found = folders.iter().filter_map(|folder| search(folder).ok());
    found.flat_map(|found| found.complete).map(|complete| complete.dir).collect()
}

/// Loads the tensors of the checkpoint in `dir` into the state of one rank, and returns the loop's state. Any plan may load
/// it whose model has the same tensors.
pub(crate) fn load_checkpoint(dir: &Path, state: &mut dyn TrainState) -> Result<RunState, CheckpointError> {
    let damaged = |reason| CheckpointError::damaged(dir, reason);
    let complete = open(dir)?;
    verify_rank_files(&complete, (0, 1)).map_err(damaged)?;
    let run = read_state(&complete).map_err(damaged)?;
    check_compatible(&complete, &run, &run.fingerprint, &state.tensors())?;
    load_tensors(&complete, state)?;
    Ok(run)
}

/// Searches on every rank. Fails unless all ranks find the same checkpoints.
fn search_on_all_ranks(plan: &CheckpointPlan, process: &ProcessGroup) -> Result<FoundCheckpoints> {
    let (found, own) = match search(&plan.output_dir) {
        Ok(found) => (found.clone(), Ok(names(&found).into_bytes())),
        Err(error) => (FoundCheckpoints::default(), Err(error)),
    };
    let all = process.exchange(own.map_err(Error::from))?;
    let Some(rank) = all.iter().position(|names| *names != all[0]) else { return Ok(found) };
    let [there, here] = [rank, 0].map(|rank| String::from_utf8_lossy(&all[rank]).into_owned());
    Err(CheckpointError::DifferentCheckpoints { output_dir: plan.output_dir.clone(), rank, there, here }.into())
}

/// Names the checkpoints of a folder, for an error message.
fn names(found: &FoundCheckpoints) -> String {
    let complete = found.complete.iter().map(|save| Tag::name_of(&save.dir));
    let skipped = found.skipped.iter().map(|save| Tag::name_of(&save.dir) + " (incomplete)");
    let names: Vec<String> = complete.chain(skipped).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

/// Verifies every hash and reads the loop's state. All ranks return the same reason if the checkpoint is damaged.
fn verify(complete: &CompleteCheckpoint, process: &ProcessGroup) -> Result<Result<RunState, String>> {
    let own = process.keep_alive().during(|| verify_rank_files(complete, (process.rank(), process.size())));
    let all = process.exchange_payloads(own.map(|()| Vec::new()))?;
    match all.into_iter().find_map(Result::err) {
        Some(reason) => Ok(Err(reason)),
        None => Ok(read_state(complete)),
    }
}

/// Verifies the hashes of this rank's share of the files. The error is the reason why the checkpoint is damaged.
pub(super) fn verify_rank_files(complete: &CompleteCheckpoint, (rank, n_ranks): (usize, usize)) -> Result<(), String> {
    let files = || complete.manifest.files.iter().skip(rank).step_by(n_ranks);
    let n_bytes = files().map(|file| file.size as usize).sum();
    let progress = WorkProgress::start("verify checkpoint", ProgressUnit::Bytes, n_bytes);
    for file in files() {
        if hash_differs(&complete.dir, file).map_err(|error| format!("{}: {error}", file.name))? {
            return Err(format!("{} has changed since it was written (its hash differs)", file.name));
        }
        progress.add(file.size as usize);
    }
    Ok(())
}

/// Reads the loop's state. The error is the reason why the checkpoint is damaged.
pub(crate) fn read_state(complete: &CompleteCheckpoint) -> Result<RunState, String> {
    let bytes = read_regular_file(&complete.dir.join(STATE), MAX_GENERATED_FILE_BYTES)
        .map_err(|error| format!("{STATE}: {error}"))?;
    let run: RunState = serde_json::from_slice(&bytes).map_err(|error| format!("{STATE}: {error}"))?;
    if run.tag() != complete.manifest.tag() {
        return Err(format!("{STATE} is of step {}, the manifest of step {}", run.step, complete.manifest.step));
    }
    Ok(run)
}

/// Fails if a checkpoint belongs to another plan or model, and names the differences. Optional tensors may differ.
fn check_compatible(
    complete: &CompleteCheckpoint,
    run: &RunState,
    fingerprint: &Fingerprint,
    tensors: &[TensorMeta],
) -> Result<(), CheckpointError> {
    let mut differences = run.fingerprint.differences(fingerprint);
    differences.extend(tensor_differences(&complete.manifest, tensors));
    if differences.is_empty() {
        return Ok(());
    }
    Err(CheckpointError::Different { dir: complete.dir.clone(), differences: shorten(differences) })
}

fn tensor_differences(manifest: &Manifest, tensors: &[TensorMeta]) -> Vec<String> {
    let saved = needed(manifest.tensors.iter().map(|t| (t.name.as_str(), &t.shape)));
    let now = needed(tensors.iter().map(|t| (t.name.as_str(), &t.shape)));
    let removed = saved.keys().filter(|name| !now.contains_key(*name));
    let place = |name: &str| if TensorMeta::is_optimizer_state(name) { "optimizer" } else { "model" };
    let removed = removed.map(|name| format!("tensor {name}: in the checkpoint, not in the {}", place(name)));
    let changed = now.iter().filter_map(|(name, shape)| match saved.get(name) {
        None => Some(format!("tensor {name}: in the {}, not in the checkpoint", place(name))),
        Some(saved) if saved != shape => Some(format!("tensor {name}: {saved:?} in the checkpoint, {shape:?} now")),
        Some(_) => None,
    });
    removed.chain(changed).collect()
}

/// Collects the shapes of tensors by name, without the optional ones.
fn needed<'t>(tensors: impl Iterator<Item = (&'t str, &'t Vec<usize>)>) -> BTreeMap<&'t str, &'t Vec<usize>> {
    tensors.filter(|(name, _)| !TensorMeta::is_optional(name)).collect()
}

/// Truncates a list of differences to one screen.
fn shorten(mut differences: Vec<String>) -> Vec<String> {
    let n_more = differences.len().saturating_sub(12);
    if n_more > 0 {
        differences.truncate(12);
        differences.push(format!("and {n_more} more"));
    }
    differences
}

/// Loads this rank's chunk of each tensor from the files that hold it. An optional tensor that is not there in this shape
/// keeps its values.
pub(super) fn load_tensors(complete: &CompleteCheckpoint, state: &mut dyn TrainState) -> Result<(), CheckpointError> {
    let mut missing: BTreeMap<String, Vec<(TensorChunk, usize)>> = BTreeMap::new();
    let is_saved = |tensor: &TensorMeta| {
        complete.manifest.tensors.iter().any(|saved| saved.name == tensor.name && saved.shape == tensor.shape)
    };
    for chunk in state.chunks() {
        if TensorMeta::is_optional(&chunk.tensor.name) && !is_saved(&chunk.tensor) {
            tracing::info!(
                "{}: {} is not in the checkpoint and starts anew",
                complete.dir.display(),
                chunk.tensor.name
            );
            continue;
        }
        let n = chunk.range.len();
        missing.entry(chunk.tensor.name.clone()).or_default().push((chunk, n));
    }
    let mut by_file: BTreeMap<&str, Vec<ChunkRead>> = BTreeMap::new();
    for entry in &complete.manifest.tensors {
        let chunk = entry.chunk();
        for (wanted, n_left) in missing.get_mut(&entry.name).into_iter().flatten() {
            let overlaps = chunk.overlaps(wanted);
            if !overlaps.is_empty() {
                let n_found: usize = overlaps.iter().map(|overlap| overlap.len).sum();
                *n_left = n_left.saturating_sub(n_found);
                by_file.entry(&entry.file).or_default().push(ChunkRead {
                    chunk: chunk.clone(),
                    old_name: entry.old_name.clone(),
                    overlaps,
                });
            }
        }
    }
    if let Some((name, _)) = missing.iter().find(|(_, chunks)| chunks.iter().any(|(_, n_left)| *n_left > 0)) {
        let reason = format!("no file holds all of the tensor {name:?}");
        return Err(CheckpointError::damaged(&complete.dir, reason));
    }
    let progress = WorkProgress::start("read checkpoint", ProgressUnit::Count("files"), by_file.len());
    by_file.into_iter().try_for_each(|(file, wanted)| {
        read_shard(&complete.dir, file, &wanted, state)?;
        progress.add(1);
        Ok(())
    })
}
