//! Checkpoints that survive a crash at any time, and resuming from the newest complete one.
//!
//! This module decides when, where and how many checkpoints are written. `candlewick-model` writes the folders of
//! exported weights.
//!
//! A `sharded` checkpoint is a folder `<output_dir>/epoch_E_global_step_N/`:
//! ```text
//! shard_RANK_N.safetensors .. f32 tensors by global name, or chunks of them
//! state.json                  step, epoch, data cursor, RNG, token statistics, fingerprint of the plan
//! manifest.json               written last: size and BLAKE3 of each file; name, shape and range of each tensor
//! ```
//! Each rank writes its own shards. The manifest records which file holds which elements of each tensor, so any number
//! of ranks can load the checkpoint. The folder is written under a temporary name, synced and renamed. So a folder with
//! its final name is complete; hashes detect later changes. `owner` identifies the run that wrote a folder.

mod disk;
mod early_stopping;
mod error;
mod find;
mod fingerprint;
mod finish;
mod hash;
mod latest;
mod load;
mod loss_history;
mod manifest;
mod owner;
mod plan;
mod retention;
mod save;
mod scores;
mod shard;
mod state;
mod storage;
mod superseded;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod weights;

pub use disk::{PlannedCheckpoints, bytes_needed, free_bytes, preflight, require_space};
pub(crate) use disk::{ReservedSpace, reserve_space};
pub use early_stopping::EarlyStoppingState;
pub use error::CheckpointError;
pub(crate) use find::open;
pub use find::{CompleteCheckpoint, FoundCheckpoints, SkippedCheckpoint, is_checkpoint, newest_complete, search};
pub(crate) use fingerprint::FROZEN_WEIGHTS;
pub use fingerprint::Fingerprint;
pub(crate) use finish::FinishedSave;
pub use load::{Resumed, resume, resume_from};
pub(crate) use load::{load_checkpoint, open_given, read_state};
pub use loss_history::LossHistory;
pub use manifest::{FileEntry, Manifest, TensorEntry};
pub use owner::{EXPORT_MARK, ExportMark, move_aside, refuse_occupied, refuse_unowned};
pub use plan::{CheckpointFormat, CheckpointPlan, Moment, Tag};
pub(crate) use retention::remove_all;
pub use retention::{Retention, remove_unfinished_checkpoints};
pub use save::{WrittenCheckpoint, save};
pub use scores::Scores;
pub(crate) use shard::VALUES_PER_BLOCK;
pub(crate) use state::{BUFFER, FP8_STATE, MASTER, optimizer_part};
pub use state::{CheckpointId, RunOrigin, RunState, StateError, TensorChunk, TensorMeta, TrainState};
pub(crate) use storage::LocalDisk;
pub use superseded::{
    EarlierRunFolder, earlier_runs, has_checkpoints, newest_run_start, older_checkpoints, remove_checkpoint,
    remove_earlier_run, run_starts,
};
pub use weights::CheckpointWeights;
