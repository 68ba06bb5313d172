//! What a save holds, seen from here: tensors that an engine gives and takes in chunks, and the
//! numbers of the loop. Nothing here knows what an optimizer or a data set is.

use std::ops::Range;
use std::path::{Path, PathBuf};

use candlewick_ops::ScalerState;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::fingerprint::Fingerprint;
use super::plan::{CheckpointFormat, Tag};
use super::scores::Scores;

/// The reason of an engine's failure.
pub type StateError = Box<dyn std::error::Error + Send + Sync>;

/// Names one f32 tensor of the training state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMeta {
    /// Its name in the whole model, whichever rank holds it: "master/model.norm.weight".
    pub name: String,
    /// Its shape in the whole model.
    pub shape: Vec<usize>,
}

/// Some elements of some columns of a tensor, in the order of the rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorChunk {
    /// The whole tensor.
    pub tensor: TensorMeta,
    /// Which of its columns, the elements of its last dim.
    pub columns: Range<usize>,
    /// Which of the elements of these columns.
    pub range: Range<usize>,
}

/// Neighbouring elements that two chunks have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overlap {
    /// Where they begin in either chunk's columns.
    pub(crate) starts: [usize; 2],
    /// How many they are.
    pub(crate) len: usize,
}

/// Gives and takes the tensors of a training run (masters, first and second moments), as far as this rank has them.
///
/// They travel in chunks of a bounded size, so that a save needs no second copy of the state. Row-major indices count the
/// elements of the columns that this rank has.
pub trait TrainState: Send {
    /// Lists every tensor of the model, always in the same order, whichever rank has it.
    fn tensors(&self) -> Vec<TensorMeta>;
    /// Lists what this rank has, in the same order.
    fn chunks(&self) -> Vec<TensorChunk> {
        self.tensors().into_iter().map(TensorChunk::full).collect()
    }
    /// Lists what this rank writes: all that it has and no other rank writes.
    fn chunks_to_write(&self) -> Vec<TensorChunk> {
        self.chunks()
    }
    /// Hands `n_values` values from the row-major index `start` on to `take`, without a copy where they are at hand.
    fn read(&self, name: &str, start: usize, n_values: usize, take: &mut dyn FnMut(&[f32])) -> Result<(), StateError>;
    /// Replaces the values from the row-major index `start` on.
    fn load(&mut self, name: &str, start: usize, values: Vec<f32>) -> Result<(), StateError>;
}

/// Holds the loop's side of a save.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunState {
    /// Optimizer steps done; it is also the position in the schedule.
    pub step: usize,
    /// Epochs done.
    pub epoch: usize,
    /// Micro-batches of the next step that are already summed. Saves are made between steps: 0.
    pub accumulation_phase: usize,
    /// Where the data stream stands.
    pub cursor: Value,
    /// The states of the random number generators that live on between steps.
    pub rng: Value,
    /// Tokens trained on, padding not counted.
    pub tokens: u64,
    /// Target tokens among them.
    pub target_tokens: u64,
    /// Seconds spent in this run and the ones that it resumes.
    pub elapsed_s: f64,
    /// What says which save is the best; older saves have none.
    #[serde(default)]
    pub scores: Scores,
    /// The last step whose evaluations are done.
    #[serde(default)]
    pub evaluated: Option<usize>,
    /// The token ledger.
    pub ledger: Value,
    /// What of the plan must not change.
    pub fingerprint: Fingerprint,
    /// When the run run_start, in milliseconds since 1970. A run that is taken up keeps it.
    #[serde(rename = "began")]
    pub run_start: u64,
    /// The moment whose date its chat template prints, in milliseconds since 1970; older saves have none.
    #[serde(default)]
    pub date: Option<u64>,
    /// The folder that the save was written into; older saves have none.
    #[serde(default)]
    pub home: Option<PathBuf>,
    /// Steps that were skipped because a loss or gradient was not finite.
    #[serde(default)]
    pub n_skipped: usize,
    /// How gradients were judged so far; older saves have none.
    #[serde(default)]
    pub scaler: Option<ScalerState>,
    /// What a later start may change, but is told of: the optimizer, the schedule, the seed.
    #[serde(default)]
    pub settings: Fingerprint,
}

impl RunState {
    /// Returns whether the save in `dir` is a copy: it was written elsewhere, and the original is there still.
    pub(crate) fn is_copied_to(&self, dir: &Path) -> bool {
        let (Some(home), Ok(dir)) = (&self.home, dir.canonicalize()) else { return false };
        let original = home.join(Tag::name_of(&dir));
        dir.parent() != Some(home) && CheckpointFormat::Sharded.written_by(&original) == Some(self.run_start)
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
    /// All of a tensor.
    pub fn full(tensor: TensorMeta) -> Self {
        Self { range: 0..tensor.n_values(), columns: 0..tensor.n_columns(), tensor }
    }

    /// The shape that it has in a file: the tensor's own, or that of a list.
    pub(crate) fn shape(&self) -> Vec<usize> {
        if self.range.len() == self.tensor.n_values() { self.tensor.shape.clone() } else { vec![self.range.len()] }
    }

    /// What it has in common with another chunk of the same tensor.
    pub(crate) fn overlaps(&self, other: &Self) -> Vec<Overlap> {
        if self.columns == other.columns {
            let range = intersection(&self.range, &other.range);
            let start = range.start;
            return range_of(range.len(), [start, start]).into_iter().collect();
        }
        if intersection(&self.columns, &other.columns).is_empty() {
            return Vec::new();
        }
        let rows = intersection(&self.rows(), &other.rows());
        rows.filter_map(|row| {
            let common = intersection(&self.columns_in(row), &other.columns_in(row));
            let starts = [self, other].map(|chunk| chunk.place(row, common.start));
            range_of(common.len(), starts)
        })
        .collect()
    }

    /// The rows of which it has something.
    fn rows(&self) -> Range<usize> {
        let n = self.columns.len().max(1);
        self.range.start / n..self.range.end.div_ceil(n)
    }

    /// The columns that it has of one of its rows.
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

fn range_of(len: usize, starts: [usize; 2]) -> Option<Overlap> {
    (len > 0).then_some(Overlap { starts, len })
}

impl RunState {
    /// Returns the name under which this state is saved.
    pub fn tag(&self) -> Tag {
        Tag { step: self.step, epoch: self.epoch }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The elements of the whole tensor that a chunk has, in its order.
    fn elements(chunk: &TensorChunk) -> Vec<usize> {
        let (width, n) = (chunk.tensor.n_columns(), chunk.columns.len());
        chunk.range.clone().map(|at| at / n * width + chunk.columns.start + at % n).collect()
    }

    #[test]
    fn pieces_have_in_common_what_both_have() {
        let tensor = TensorMeta { name: "w".to_owned(), shape: vec![5, 7] };
        let mut chunks = Vec::new();
        for columns in [0..7, 0..3, 3..7, 2..5, 6..7] {
            let n = 5 * columns.len();
            for range in [0..n, 0..n / 2, n / 2..n, n / 3..n / 2 + 1, 1..2] {
                chunks.push(TensorChunk { tensor: tensor.clone(), columns: columns.clone(), range });
            }
        }
        for a in &chunks {
            for b in &chunks {
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
