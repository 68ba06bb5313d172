//! The block engine: forward through the blocks, loss, and backward block by block, last first.
//!
//! t tokens (packed), d model

mod inference;

use std::borrow::Cow;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use candlewick_comm::Collective;
use candlewick_model::{Cx, MlpRows, Model, OneDevice, Seams, Weights};
use candlewick_ops::{
    AttentionChoice, Awake, CrossEntropy, Reduction, Seqs, Tape, Upstream, linear_cross_entropy, span, stay_awake,
};

use crate::offload::{Parked, Parking};
use crate::params::ParamStore;
use crate::sequence::{Part, Ulysses};

pub use inference::{Asked, Tokens};

/// What a block keeps between its forward and its backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residency {
    /// The whole tape: fastest, most memory.
    Keep,
    /// Its input; the forward runs again in backward (activation checkpointing).
    Recompute,
    /// Its input, parked where [`Engine::with_parking`] says.
    Offload,
}

/// One micro-batch: packed sequences on the device.
#[derive(Clone)]
pub struct Micro {
    /// Token ids, u32 `[t]`.
    pub ids: Tensor,
    /// The token that each position must predict, i64 `[t]` on the CPU, or [`Micro::IGNORED`].
    pub targets: Tensor,
    /// The place of each token in its sequence, `t` of them.
    pub positions: Vec<u32>,
    /// Where the sequences begin.
    pub seqs: Seqs,
}

impl Micro {
    /// The target of a position that predicts nothing.
    pub const IGNORED: i64 = -100;
}

/// What a sum of token losses is multiplied by: one over the number of target tokens of the whole step.
///
/// Only a step's count can make one, so that no micro-batch or rank is normalised by its own.
#[derive(Clone, Debug)]
pub struct LossScale {
    mean: f64,
    /// What half precision multiplies besides, an f32 scalar on the device.
    factor: Option<Tensor>,
}

impl LossScale {
    /// The mean over the target tokens of a step: those of all its micro-batches on all ranks.
    pub fn mean_over(n_targets_of_step: f64) -> Self {
        Self { mean: 1.0 / n_targets_of_step.max(1.0), factor: None }
    }

    /// The same times a scalar that only the device knows: [`GradScaler::loss_scale`](candlewick_ops::GradScaler).
    pub fn times(self, factor: Option<Tensor>) -> Self {
        Self { factor, ..self }
    }

    fn upstream(&self) -> Upstream<'_> {
        match &self.factor {
            Some(factor) => Upstream::Scaled(self.mean, factor),
            None => Upstream::Scalar(self.mean),
        }
    }
}

/// The model, its parameters and the plan of what each block keeps.
pub struct Engine {
    model: Model,
    store: ParamStore,
    residency: Vec<Residency>,
    parking: Parking,
    group: Arc<dyn Collective>,
    device: Device,
    attention: AttentionChoice,
    mlp_rows: MlpRows,
    sequence: Option<Ulysses>,
}

enum Kept {
    /// With the input that it is differentiated by.
    Tape(Tensor, Tape),
    Input(Tensor),
    Parked(Parked),
}

impl Engine {
    /// Bytes of logits that the loss may hold at once. On a GPU each chunk passes over the whole gradient of the head: few
    /// chunks are fast ones.
    fn logits_bytes(&self) -> usize {
        if self.device.is_cuda() { 1 << 30 } else { 64 << 20 }
    }

    /// Joins a model with its parameters. `residency` says what each block keeps; its length is the number of blocks.
    pub fn new(
        model: Model,
        store: ParamStore,
        residency: Vec<Residency>,
        group: Arc<dyn Collective>,
        device: Device,
    ) -> Self {
        assert_eq!(residency.len(), model.n_blocks(), "the residency plan names every block");
        let (parking, attention, mlp_rows) = (Parking::HostMemory, AttentionChoice::default(), MlpRows::default());
        Self { model, store, residency, parking, group, device, attention, mlp_rows, sequence: None }
    }

    /// The same engine with its attention computed as `attention` says.
    pub fn with_attention(self, attention: AttentionChoice) -> Self {
        Self { attention, ..self }
    }

    /// The same engine with the inputs of [`Residency::Offload`] parked there, not in the host's memory.
    pub fn with_parking(self, parking: Parking) -> Self {
        Self { parking, ..self }
    }

    /// The same engine with its MLPs passing over the tokens as `mlp_rows` says.
    pub fn with_mlp_rows(self, mlp_rows: MlpRows) -> Self {
        Self { mlp_rows, ..self }
    }

    /// The same engine with the tokens of each micro-batch shared among these ranks: all of them give the same ones.
    pub fn with_sequence(self, ranks: Arc<dyn Collective>) -> Self {
        Self { sequence: Some(Ulysses::new(ranks)), ..self }
    }

    /// Returns the model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Returns the parameters.
    pub fn store(&self) -> &ParamStore {
        &self.store
    }

    /// Returns what each block keeps.
    pub fn residency(&self) -> &[Residency] {
        &self.residency
    }

    /// Returns how MLPs pass over the tokens.
    pub fn mlp_rows(&self) -> MlpRows {
        self.mlp_rows
    }

    /// Returns the device that the engine computes on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the group over which losses and counts are summed.
    pub fn group(&self) -> &dyn Collective {
        self.group.as_ref()
    }

    /// Runs forward and backward over the micro-batches of a step and returns the sums of their token losses, f32 scalars:
    /// this rank's. The gradient of `scale` times all sums of all ranks is in the main gradients then.
    ///
    /// `dropout_key` chooses what dropout drops in a micro-batch. Nothing here waits for a GPU: read the losses of a step
    /// together, at its end.
    pub fn forward_backward(
        &self,
        micros: &[Micro],
        scale: &LossScale,
        dropout_key: impl Fn(usize) -> u64,
    ) -> Result<Vec<Tensor>> {
        let one = |(i, micro)| {
            let _span = span("micro-batch", "");
            self.one_forward_backward(micro, scale, dropout_key(i), i + 1 == micros.len())
        };
        let sums = micros.iter().enumerate().map(one).collect::<Result<_>>()?;
        self.store.settle()?;
        Ok(sums)
    }

    fn one_forward_backward(
        &self,
        micro: &Micro,
        scale: &LossScale,
        dropout_key: u64,
        is_last: bool,
    ) -> Result<Tensor> {
        let _awake = self.stay_awake();
        let Part { micro, first_row } = &self.part(micro)?;
        let (cos, sin) = self.model.rope(&micro.positions, &self.device)?;
        let of_all = self.cx([&cos, &sin], &micro.seqs, self.seams());
        let cx = Cx { dropout_key: Some(dropout_key), first_row: *first_row, ..of_all };

        let embedded = Tape::record(&[], || self.model.embed(&self.store.fetch(0)?, &micro.ids))?;
        let mut x = embedded.output().clone();
        let mut kept = Vec::with_capacity(self.model.n_blocks());
        self.store.release(0);
        for block_idx in 0..self.model.n_blocks() {
            let (y, keep) = self.forward_block(block_idx, x, &cx)?;
            kept.push(keep);
            x = y;
        }
        let (loss, mut dx) = self.loss_and_grad(&x, &micro.targets, scale)?;
        drop(x);
        self.done_with(self.head(), is_last)?;
        for (block_idx, keep) in kept.into_iter().enumerate().rev() {
            dx = self.backward_block(block_idx, keep, &dx, &cx)?;
            self.done_with(block_idx + 1, is_last)?;
        }
        self.store.open_grads(0)?;
        embedded.backward(&dx)?;
        self.done_with(0, is_last)?;
        Ok(loss)
    }

    /// Lets go of a unit after its backward.
    fn done_with(&self, unit_idx: usize, is_last: bool) -> Result<()> {
        self.store.release(unit_idx);
        self.store.close_grads(unit_idx, is_last)
    }

    fn forward_block(&self, block_idx: usize, x: Tensor, cx: &Cx) -> Result<(Tensor, Kept)> {
        let _span = span("block", "forward");
        let weights = self.fetch(block_idx + 1, Some(block_idx + 2))?;
        let (y, kept) = if self.residency[block_idx] == Residency::Keep {
            let tape = Tape::record(&[&x], || self.model.block(block_idx, &weights, &x, cx))?;
            (tape.output().clone(), Kept::Tape(x, tape))
        } else {
            let y = self.model.block(block_idx, &weights, &x, cx)?;
            let kept = match self.residency[block_idx] {
                Residency::Offload => Kept::Parked(Parked::park(&x, &self.parking)?),
                _ => Kept::Input(x),
            };
            (y, kept)
        };
        // The last one's are wanted again at once.
        if block_idx + 1 < self.model.n_blocks() {
            self.store.release(block_idx + 1);
        }
        Ok((y, kept))
    }

    /// The weights of a unit, while those of the one that is wanted after it are on their way.
    fn fetch(&self, unit_idx: usize, next: Option<usize>) -> Result<Weights> {
        let weights = self.store.fetch(unit_idx)?;
        next.map_or(Ok(()), |next| self.store.prefetch(next))?;
        Ok(weights)
    }

    fn backward_block(&self, block_idx: usize, kept: Kept, dy: &Tensor, cx: &Cx) -> Result<Tensor> {
        let _span = span("block", "backward");
        // The embedding's backward reads no weights.
        let weights = self.fetch(block_idx + 1, Some(block_idx).filter(|unit_idx| *unit_idx > 0))?;
        self.store.open_grads(block_idx + 1)?;
        let x = match kept {
            Kept::Tape(x, tape) => return input_grad(tape, &x, dy),
            Kept::Input(x) => x,
            Kept::Parked(parked) => parked.fetch()?,
        };
        input_grad(Tape::record(&[&x], || self.model.block(block_idx, &weights, &x, cx))?, &x, dy)
    }

    /// Returns the sum of the token losses, and the gradient of the scaled sum with respect to the last block's output.
    fn loss_and_grad(&self, x_td: &Tensor, targets: &Tensor, scale: &LossScale) -> Result<(Tensor, Tensor)> {
        let _span = span("head", "forward and backward");
        let weights = self.store.fetch(self.head())?;
        self.store.open_grads(self.head())?;
        let tape = Tape::record(&[x_td], || self.model.norm(&weights, x_td))?;
        let lm_head = self.model.lm_head(&weights)?;
        let spec = self.cross_entropy(lm_head.dims(), Reduction::Sum)?;
        let out = linear_cross_entropy(tape.output(), &lm_head, targets, &spec, scale.upstream())?;
        let dx = out.dx.expect("an upstream gradient was given");
        Ok((out.loss, input_grad(tape, x_td, &dx)?))
    }

    /// What this rank computes of a micro-batch.
    fn part<'m>(&self, micro: &'m Micro) -> Result<Part<'m>> {
        match &self.sequence {
            Some(sequence) => sequence.part(micro),
            None => Ok(Part { micro: Cow::Borrowed(micro), first_row: 0 }),
        }
    }

    fn seams(&self) -> &dyn Seams {
        self.sequence.as_ref().map_or(&OneDevice, |sequence| sequence)
    }

    /// What the blocks of a forward have in common, outside of training.
    fn cx<'a>(&self, [cos, sin]: [&'a Tensor; 2], seqs: &'a Seqs, seams: &'a dyn Seams) -> Cx<'a> {
        let (attention, mlp_rows) = (self.attention, self.mlp_rows);
        Cx { cos, sin, seqs, dropout_key: None, first_row: 0, attention, mlp_rows, seams }
    }

    /// Where the CPU computes.
    fn stay_awake(&self) -> Option<Awake> {
        self.device.is_cpu().then(stay_awake)
    }

    fn head(&self) -> usize {
        self.model.n_blocks() + 1
    }

    fn cross_entropy(&self, lm_head_vd: &[usize], reduction: Reduction) -> Result<CrossEntropy> {
        let row_bytes = lm_head_vd[0] * DType::F32.size_in_bytes();
        Ok(CrossEntropy { reduction, ignore_index: Micro::IGNORED, chunk: (self.logits_bytes() / row_bytes).max(1) })
    }
}

/// The gradient of the one input of a tape.
fn input_grad(tape: Tape, x: &Tensor, dy: &Tensor) -> Result<Tensor> {
    match tape.backward(dy)?.remove(x) {
        Some(dx) => Ok(dx),
        None => x.zeros_like(),
    }
}
