//! Saves that survive a crash at any instant, and resuming from the newest one that is whole.
//! Weights-only folders are written by `candlewick-model`; here is only when, where and how many.
//!
//! A `sharded` save is a folder `<output_dir>/epoch_E_global_step_N/`:
//! ```text
//! shard_RANK_N.safetensors .. f32 tensors under their global names, or chunks of them
//! state.json                  step, epoch, data cursor, RNG, ledger, the fingerprint of the plan
//! manifest.json               written last: size and BLAKE3 of each file; name, shape, offset of each tensor
//! ```
//! Each rank writes what it has; the manifest says which elements of which tensor lie where, so that any number of ranks
//! can take it up. It is written beside its place under a dotted name, fsynced and renamed, so a folder with the
//! right name is whole unless it was changed later; the hashes show that. `owner` tells which run wrote a folder.

mod disk;
mod error;
mod find;
mod fingerprint;
mod hash;
mod latest;
mod load;
mod manifest;
mod owner;
mod plan;
mod retention;
mod save;
mod scores;
mod shard;
mod state;
mod storage;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

pub use disk::{PlannedCheckpoints, bytes_needed, free_bytes, preflight};
pub use error::CheckpointError;
pub use find::{CompleteCheckpoint, FoundCheckpoints, SkippedCheckpoint, newest_complete, search};
pub use fingerprint::Fingerprint;
pub use latest::update_latest_link;
pub(crate) use load::read_state;
pub use load::{Resumed, resume};
pub use manifest::{FileEntry, Manifest, TensorEntry};
pub use owner::{EXPORT_MARK, ExportMark, move_aside, refuse_occupied, refuse_unowned};
pub use plan::{CheckpointFormat, CheckpointPlan, Moment, Tag};
pub use retention::{Retention, remove_unfinished_checkpoints};
pub use save::{WrittenCheckpoint, save};
pub use scores::Scores;
pub(crate) use shard::VALUES_PER_BLOCK;
pub use state::{RunState, StateError, TensorChunk, TensorMeta, TrainState};
