//! What a save holds, seen from here: tensors that an engine gives and takes in pieces, and the
//! numbers of the loop. Nothing here knows what an optimizer or a data set is.

use std::ops::Range;

use candlewick_ops::ScalerState;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::fingerprint::Fingerprint;
use super::plan::Tag;

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

/// Some elements of a tensor, in the order of its rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The whole tensor.
    pub tensor: TensorMeta,
    /// Which of its elements.
    pub range: Range<usize>,
}

/// Gives and takes the tensors of a training run (masters, first and second moments), as far as this rank has them.
///
/// They travel in pieces of a bounded size, so that a save needs no second copy of the state. Row-major indices count in
/// the whole tensor.
pub trait TrainState: Send {
    /// Lists every tensor of the model, always in the same order, whoever has it.
    fn tensors(&self) -> Vec<TensorMeta>;
    /// Lists what this rank has, in the same order.
    fn pieces(&self) -> Vec<Piece> {
        self.tensors().into_iter().map(Piece::whole).collect()
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
    /// The best evaluation so far.
    pub best_eval: Option<BestEval>,
    /// The token ledger.
    pub ledger: Value,
    /// What of the plan must not change.
    pub fingerprint: Fingerprint,
    /// When the run began, in milliseconds since 1970. A run that is taken up keeps it.
    pub began: u64,
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

/// Records an evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct BestEval {
    /// Optimizer steps done before it.
    pub step: usize,
    /// Mean loss over its target tokens. JSON has no NaN: it is written as null and read back from it.
    #[serde(deserialize_with = "nan_from_null")]
    pub loss: f64,
}

impl TensorMeta {
    /// Returns the number of values.
    pub fn n_values(&self) -> usize {
        self.shape.iter().product()
    }
}

impl Piece {
    /// All of a tensor.
    pub fn whole(tensor: TensorMeta) -> Self {
        Self { range: 0..tensor.n_values(), tensor }
    }

    /// The shape that it has in a file: the tensor's own, or that of a list.
    pub(crate) fn shape(&self) -> Vec<usize> {
        if self.range.len() == self.tensor.n_values() { self.tensor.shape.clone() } else { vec![self.range.len()] }
    }
}

impl RunState {
    /// Returns the name under which this state is saved.
    pub fn tag(&self) -> Tag {
        Tag { step: self.step, epoch: self.epoch }
    }
}

fn nan_from_null<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(deserializer)?.unwrap_or(f64::NAN))
}
