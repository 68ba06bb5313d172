//! The content of a checkpoint: tensors that an engine reads and loads in chunks, and the state of the training loop.
//!
//! This module is independent of the optimizer and the dataset.

use std::ops::Range;
use std::path::{Path, PathBuf};

use candlewick_ops::ScalerState;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::early_stopping::EarlyStoppingState;
use super::fingerprint::Fingerprint;
use super::loss_history::LossHistory;
use super::plan::{CheckpointFormat, Tag};
use super::scores::Scores;

/// The reason of an engine's failure.
pub type StateError = Box<dyn std::error::Error + Send + Sync>;

/// An f32 tensor of the training state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMeta {
    /// The global name, equal on every rank: "master/model.norm.weight".
    pub name: String,
    /// The global shape.
    pub shape: Vec<usize>,
}

/// The part of the names of master weights.
pub(crate) const MASTER: &str = "master";

/// The part of the names of buffers, such as expert biases.
pub(crate) const BUFFER: &str = "buffer";

/// The part of the names of FP8 scales and amax histories. A run may start without them, or with another recipe.
pub(crate) const FP8_STATE: &str = "fp8";

/// The beginning of the part of the names of optimizer states, before the name of the slot.
const OPTIMIZER: &str = "optimizer.";

/// Returns the part of the names of an optimizer state.
pub(crate) fn optimizer_part(slot: &str) -> String {
    format!("{OPTIMIZER}{slot}")
}

/// Returns the name of a tensor of an old checkpoint, whose optimizer states had the slot alone before the parameter.
pub(super) fn current_name(old: &str) -> String {
    let part = old.split('/').next().unwrap_or(old);
    if [MASTER, BUFFER, FP8_STATE].contains(&part) { old.to_owned() } else { format!("{OPTIMIZER}{old}") }
}

impl TensorMeta {
    /// Returns true if a run can start without the tensor: with initial FP8 scales.
    pub(crate) fn is_optional(name: &str) -> bool {
        name.split('/').next() == Some(FP8_STATE)
    }

    /// Returns true if the name is that of an optimizer state.
    pub(crate) fn is_optimizer_state(name: &str) -> bool {
        name.starts_with(OPTIMIZER)
    }
}

/// A chunk of a tensor: a range of the elements of some columns, in row-major order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorChunk {
    /// The full tensor.
    pub tensor: TensorMeta,
    /// Elements of a row of the tensor, seen as a matrix: its last dim, or more if the chunk has some rows of every expert.
    pub row_len: usize,
    /// The range of columns of this matrix.
    pub columns: Range<usize>,
    /// The range of elements of these columns.
    pub range: Range<usize>,
}

/// Contiguous elements that two chunks share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overlap {
    /// The start in either chunk's columns.
    pub(crate) starts: [usize; 2],
    /// The number of elements.
    pub(crate) len: usize,
}

/// The tensors of a training run (master weights, optimizer states) that this rank holds.
///
/// Tensors are read and loaded in blocks of bounded size, so that a checkpoint needs no second copy of the state.
/// Row-major indices count the elements of the columns that this rank holds.
pub trait TrainState: Send {
    /// Lists every tensor of the model. All ranks return the same list.
    fn tensors(&self) -> Vec<TensorMeta>;
    /// Lists the chunks that this rank holds, in the same order.
    fn chunks(&self) -> Vec<TensorChunk> {
        self.tensors().into_iter().map(TensorChunk::full).collect()
    }
    /// Lists the chunks that this rank writes: those that no other rank writes.
    fn chunks_to_write(&self) -> Vec<TensorChunk> {
        self.chunks()
    }
    /// Passes `n_values` values from the row-major index `start` on to `take`, without a copy if they are in host
    /// memory.
    fn read(&self, name: &str, start: usize, n_values: usize, take: &mut dyn FnMut(&[f32])) -> Result<(), StateError>;
    /// Replaces the values from the row-major index `start` on.
    fn load(&mut self, name: &str, start: usize, values: Vec<f32>) -> Result<(), StateError>;
}

/// The identity of a checkpoint, also of a copied one: its run and its step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointId {
    /// The start of the run.
    #[serde(rename = "began")]
    pub run_start: u64,
    /// Optimizer steps done.
    pub step: usize,
}

/// The first state of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Option<CheckpointId>", into = "Option<CheckpointId>")]
pub enum RunOrigin {
    /// The state is not recorded.
    #[default]
    Unknown,
    /// The initial weights.
    Beginning,
    /// The last checkpoint of `resume_from_checkpoint` that the run continued from.
    Checkpoint(CheckpointId),
}

impl RunOrigin {
    fn is_unknown(&self) -> bool {
        *self == Self::Unknown
    }
}

impl From<Option<CheckpointId>> for RunOrigin {
    fn from(id: Option<CheckpointId>) -> Self {
        id.map_or(Self::Beginning, Self::Checkpoint)
    }
}

impl From<RunOrigin> for Option<CheckpointId> {
    fn from(origin: RunOrigin) -> Self {
        match origin {
            RunOrigin::Checkpoint(id) => Some(id),
            RunOrigin::Unknown | RunOrigin::Beginning => None,
        }
    }
}

/// The state of the training loop.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunState {
    /// Optimizer steps done: also the position in the learning-rate schedule.
    pub step: usize,
    /// Epochs done.
    pub epoch: usize,
    /// Accumulated micro-batches of the next step. Checkpoints are written between steps, so it is 0.
    pub accumulation_phase: usize,
    /// The position of the data loader.
    pub cursor: Value,
    /// The states of the random number generators.
    pub rng: Value,
    /// Tokens trained on, without padding.
    pub tokens: u64,
    /// Target tokens among them.
    pub target_tokens: u64,
    /// Training time in seconds, earlier runs of a resumed run included.
    pub elapsed_s: f64,
    /// The evaluation results that select the best checkpoint. Old checkpoints have none.
    #[serde(default)]
    pub scores: Scores,
    /// The last step whose evaluations are done.
    #[serde(default)]
    pub evaluated: Option<usize>,
    /// The state of early stopping. Old checkpoints have none.
    #[serde(default)]
    pub early_stopping: EarlyStoppingState,
    /// The last losses and the number of loss spikes. Old checkpoints have none.
    #[serde(default)]
    pub loss_history: LossHistory,
    /// The token statistics.
    #[serde(rename = "ledger")]
    pub token_stats: Value,
    /// The settings that must not change.
    pub fingerprint: Fingerprint,
    /// The start of the run, in milliseconds since 1970. A resumed run keeps it.
    #[serde(rename = "began")]
    pub run_start: u64,
    /// The time whose date the chat template prints, in milliseconds since 1970. Old checkpoints have none.
    #[serde(default)]
    pub date: Option<u64>,
    /// The folder that the checkpoint was written into. Old checkpoints have none.
    #[serde(default)]
    pub home: Option<PathBuf>,
    /// The `output_dir` of the run. Old checkpoints have none.
    #[serde(default)]
    pub output_dir: Option<PathBuf>,
    /// The number of steps skipped because of a non-finite loss or gradient.
    #[serde(default)]
    pub n_skipped: usize,
    /// The state of the gradient scaler. Old checkpoints have none.
    #[serde(default)]
    pub scaler: Option<ScalerState>,
    /// The settings that may change between runs, with a note: the optimizer, the schedule, the seed.
    #[serde(default)]
    pub settings: Fingerprint,
    /// The modules that `precision.exclude_slower_modules` keeps in the compute dtype.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slower_modules: Option<Vec<String>>,
    /// The start of the run. Old checkpoints have none.
    #[serde(default, skip_serializing_if = "RunOrigin::is_unknown")]
    pub started_from: RunOrigin,
}

impl RunState {
    /// Returns true if the checkpoint in `dir` is a copy: it was written elsewhere, and the original still exists.
    pub(crate) fn is_copied_to(&self, dir: &Path) -> bool {
        let (Some(home), Ok(dir)) = (&self.home, dir.canonicalize()) else { return false };
        let original = home.join(Tag::name_of(&dir));
        dir.parent() != Some(home) && CheckpointFormat::Sharded.written_by(&original) == Some(self.run_start)
    }

    /// Returns the `output_dir` of the run that wrote the checkpoint in `dir`, if that is another folder than `output_dir`.
    ///
    /// A folder that was moved or copied with its checkpoints is the same run's, and so is one that replaces a missing folder.
    pub(crate) fn other_output_dir(&self, dir: &Path, output_dir: &Path) -> Option<&Path> {
        let (written, home) = (self.output_dir.as_deref()?, self.home.as_deref()?);
        let (now, dir) = (output_dir.canonicalize().ok()?, dir.canonicalize().ok()?);
        let relative = |folder: &Path, run: &Path| folder.strip_prefix(run).ok().map(Path::to_owned);
        let came_along =
            relative(home, written).is_some_and(|from| Some(from) == relative(dir.parent().unwrap_or(&dir), &now));
        (written != now && !came_along && written.is_dir()).then_some(written)
    }
}

impl TensorMeta {
    /// Returns the number of values.
    pub fn n_values(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the length of the last dim.
    pub fn n_columns(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }
}

impl TensorChunk {
    /// Returns the chunk of all elements of a tensor.
    pub fn full(tensor: TensorMeta) -> Self {
        let row_len = tensor.n_columns();
        Self { range: 0..tensor.n_values(), row_len, columns: 0..row_len, tensor }
    }

    /// Returns the shape in a file: the tensor's own for a full tensor, else a vector.
    pub(crate) fn shape(&self) -> Vec<usize> {
        if self.range.len() == self.tensor.n_values() { self.tensor.shape.clone() } else { vec![self.range.len()] }
    }

    /// Returns the elements shared with another chunk of the same tensor.
    pub(crate) fn overlaps(&self, other: &Self) -> Vec<Overlap> {
        if self.has_all_columns() && other.has_all_columns() || self.has_columns_of(other) {
            let range = intersection(&self.range, &other.range);
            let start = range.start;
            return overlap(range.len(), [start, start]).into_iter().collect();
        }
        match (self.row_len == other.row_len, self.has_all_columns(), other.has_all_columns()) {
            (true, ..) => self.overlaps_of_rows(other),
            (false, true, _) => self.with_row_len(other.row_len).overlaps_of_rows(other),
            (false, _, true) => self.overlaps_of_rows(&other.with_row_len(self.row_len)),
            // No program writes such chunks of one tensor.
            (false, false, false) => Vec::new(),
        }
    }

    /// Returns true if the chunk has elements of all columns: its range counts elements of the tensor.
    pub(crate) fn has_all_columns(&self) -> bool {
        self.columns == (0..self.row_len)
    }

    fn has_columns_of(&self, other: &Self) -> bool {
        (self.row_len, &self.columns) == (other.row_len, &other.columns)
    }

    /// Returns a chunk with all columns as one of a matrix with other rows.
    fn with_row_len(&self, row_len: usize) -> Self {
        Self { row_len, columns: 0..row_len, ..self.clone() }
    }

    /// Returns the elements shared with another chunk of the same matrix, row by row.
    fn overlaps_of_rows(&self, other: &Self) -> Vec<Overlap> {
        if intersection(&self.columns, &other.columns).is_empty() {
            return Vec::new();
        }
        let rows = intersection(&self.rows(), &other.rows());
        rows.filter_map(|row| {
            let common = intersection(&self.columns_in(row), &other.columns_in(row));
            let starts = [self, other].map(|chunk| chunk.place(row, common.start));
            overlap(common.len(), starts)
        })
        .collect()
    }

    /// Returns the rows that the chunk has elements of.
    fn rows(&self) -> Range<usize> {
        let n = self.columns.len().max(1);
        self.range.start / n..self.range.end.div_ceil(n)
    }

    /// Returns the columns that the chunk has of one of its rows.
    fn columns_in(&self, row: usize) -> Range<usize> {
        let n = self.columns.len();
        let in_row = intersection(&self.range, &(row * n..(row + 1) * n));
        let column = |at: usize| self.columns.start + at.saturating_sub(row * n);
        column(in_row.start)..column(in_row.end)
    }

    fn place(&self, row: usize, column: usize) -> usize {
        row * self.columns.len() + column.saturating_sub(self.columns.start)
    }
}

fn intersection(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

fn overlap(len: usize, starts: [usize; 2]) -> Option<Overlap> {
    (len > 0).then_some(Overlap { starts, len })
}

impl RunState {
    /// Returns the tag of this state.
    pub fn tag(&self) -> Tag {
        Tag { step: self.step, epoch: self.epoch }
    }

    /// Returns the identity of the checkpoint with this state.
    pub fn id(&self) -> CheckpointId {
        CheckpointId { run_start: self.run_start, step: self.step }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the indices in the full tensor of a chunk's elements.
    fn elements(chunk: &TensorChunk) -> Vec<usize> {
        let (width, n) = (chunk.row_len, chunk.columns.len());
        chunk.range.clone().map(|at| at / n * width + chunk.columns.start + at % n).collect()
    }

    #[test]
    fn overlaps_of_chunks_are_their_common_elements() {
        let tensor = TensorMeta { name: "w".to_owned(), shape: vec![5, 7] };
        let mut chunks = Vec::new();
        for columns in [0..7, 0..3, 3..7, 2..5, 6..7] {
            let n = 5 * columns.len();
            for range in [0..n, 0..n / 2, n / 2..n, n / 3..n / 2 + 1, 1..2] {
                chunks.push(TensorChunk { tensor: tensor.clone(), row_len: 7, columns: columns.clone(), range });
            }
        }
        // Rows of two experts with six rows each, seen as one row per expert.
        let tensor = TensorMeta { name: "w".to_owned(), shape: vec![12, 3] };
        for (row_len, columns) in [(3, 0..3), (18, 0..18), (18, 0..6), (18, 6..12), (18, 12..18)] {
            let n = 36 / row_len * columns.len();
            for range in [0..n, 0..n / 2, n / 2..n, n / 3..n / 2 + 1, 1..2] {
                chunks.push(TensorChunk { tensor: tensor.clone(), row_len, columns: columns.clone(), range });
            }
        }
        for a in &chunks {
            for b in chunks.iter().filter(|b| b.tensor == a.tensor) {
                let (of_a, of_b) = (elements(a), elements(b));
                let mut found = Vec::new();
                for Overlap { starts, len } in a.overlaps(b) {
                    for i in 0..len {
                        let at = of_a[starts[0] + i - a.range.start];
                        assert_eq!(at, of_b[starts[1] + i - b.range.start], "{a:?} {b:?}");
                        found.push(at);
                    }
                }
                let want: Vec<usize> = of_a.into_iter().filter(|at| of_b.contains(at)).collect();
                assert_eq!(found, want, "{a:?} {b:?}");
            }
        }
    }
}
