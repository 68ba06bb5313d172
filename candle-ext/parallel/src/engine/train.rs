//! A step: forwards and backwards in the order of the pipeline's timetable; alone, each micro-batch there and back.

use std::collections::HashMap;

use candle_core::{DType, Result, Tensor};
use candlewick_model::{Cx, Seams};
use candlewick_ops::{Reduction, SavedOutputs, Tape, Upstream, save_outputs, span, stay_awake};

use super::loss::{AuxiliarySums, StepLoss, StepLosses, input_grad};
use super::{Engine, Micro, Residency};
use crate::objective::{MicroLoss, TokenLosses};
use crate::offload::Parked;
use crate::params::MicroBatch;
use crate::pipeline::{Action, Pass};
use crate::sequence::Part;

/// What a block keeps between its forward and its backward.
enum Kept {
    /// With the input that it is differentiated by.
    Tape(Tensor, Tape),
    /// With what is not to be computed again.
    Input(Tensor, SavedOutputs),
    Parked(Parked),
}

/// What a run of blocks keeps.
struct Live {
    /// Of the embedding, if the run begins with it.
    embedded: Option<Tape>,
    blocks: Vec<Kept>,
    /// The gradient of what the run gave, if the head came behind it.
    dy: Option<Tensor>,
}

/// A micro-batch that is on its way.
struct MicroState<'m> {
    /// All of its tokens, also where ranks share them.
    whole: &'m Micro,
    part: Part<'m>,
    cos: Tensor,
    sin: Tensor,
    dropout_key: u64,
    /// What each run keeps that was gone through.
    live: HashMap<usize, Live>,
}

/// A pass in its place in the step.
struct Turn {
    pass: Pass,
    micro_batch: MicroBatch,
    /// Whether the pass behind it is its own backward.
    goes_back_next: bool,
}

impl Engine {
    /// Runs forward and backward over the micro-batches of a step. Afterwards the main gradients hold the gradient of `loss`,
    /// summed over micro-batches and ranks.
    ///
    /// Returns this rank's losses before normalisation, zeros where it [does not know them](Engine::knows_losses).
    /// `dropout_key` seeds the dropout of a micro-batch. Nothing here waits for a GPU: read the losses at the end of the step.
    pub fn forward_backward<'l>(
        &self,
        micros: &[Micro],
        loss: impl Into<StepLoss<'l>>,
        dropout_key: impl Fn(usize) -> u64,
    ) -> Result<StepLosses> {
        let loss = &loss.into();
        let mut auxiliary = AuxiliarySums::new(loss);
        let micros: Vec<_> = micros.iter().map(|micro| micro.padded(self.multiple())).collect::<Result<_>>()?;
        let unknown = || Tensor::zeros((), DType::F32, &self.device);
        let mut sums: Vec<_> = micros.iter().map(|_| unknown()).collect::<Result<_>>()?;
        let mut begun: Vec<Option<MicroState>> = micros.iter().map(|_| None).collect();
        let actions = self.pipeline.actions(micros.len());
        for (i, action) in actions.iter().enumerate() {
            let (Action::Forward(pass) | Action::Backward(pass)) = *action;
            let micro_batch = if pass.micro + 1 == micros.len() { MicroBatch::Last } else { MicroBatch::Earlier };
            let _awake = stay_awake(&self.device);
            match action {
                Action::Forward(_) => {
                    let _span = span("micro-batch", "forward");
                    let goes_back_next = actions.get(i + 1) == Some(&Action::Backward(pass));
                    let of_micro = match &mut begun[pass.micro] {
                        Some(of_micro) => of_micro,
                        none => none.insert(self.begin(&micros[pass.micro], dropout_key(pass.micro))?),
                    };
                    let turn = Turn { pass, micro_batch, goes_back_next };
                    let (loss, live) = self.with_seams(None, |seams| self.go_on(&turn, of_micro, loss, seams))?;
                    of_micro.live.insert(pass.chunk, live);
                    if let Some(loss) = loss {
                        sums[pass.micro] = loss;
                    }
                }
                Action::Backward(_) => {
                    let _span = span("micro-batch", "backward");
                    let turn = Turn { pass, micro_batch, goes_back_next: false };
                    let of_micro = begun[pass.micro].as_mut().expect("a forward comes before its backward");
                    let live = of_micro.live.remove(&pass.chunk).expect("what it keeps is kept once");
                    self.with_seams(None, |seams| self.go_back(&turn, of_micro, live, seams, &mut auxiliary))?;
                    // The first run goes back last.
                    if pass.chunk == 0 {
                        begun[pass.micro] = None;
                    }
                }
            }
        }
        self.pipeline.finish()?;
        self.store.wait_grad_reduction()?;
        Ok(StepLosses { micros: sums, auxiliary: auxiliary.finish(&self.device)? })
    }

    fn begin<'m>(&self, micro: &'m Micro, dropout_key: u64) -> Result<MicroState<'m>> {
        let part = self.part(micro)?;
        let (cos, sin) = self.model.rope(&part.micro.positions, &self.device)?;
        Ok(MicroState { whole: micro, part, cos, sin, dropout_key, live: HashMap::new() })
    }

    /// Forward through a run of blocks, and through what comes before and behind it.
    fn go_on(
        &self,
        turn: &Turn,
        of_micro: &MicroState,
        loss: &StepLoss,
        seams: &dyn Seams,
    ) -> Result<(Option<Tensor>, Live)> {
        let (layout, stage, chunk) = (self.pipeline.layout(), self.pipeline.stage(), turn.pass.chunk);
        let micro = &of_micro.part.micro;
        let cx = self.training_cx(of_micro, seams);
        let (embedded, mut x) = match layout.is_first(stage, chunk) {
            true => {
                let tape = Tape::record(&[], || self.model.embed(self.store.fetch(0)?, &micro.ids, seams))?;
                self.store.release(0);
                let x = tape.output().clone();
                (Some(tape), x)
            }
            false => {
                let expected = self.hidden_states(micro.positions.len(), seams);
                (None, self.pipeline.receive_activation(expected)?)
            }
        };
        let run = layout.blocks(stage, chunk);
        let mut blocks = Vec::with_capacity(run.len());
        for block_idx in run.clone() {
            let (y, keep) = self.forward_block(block_idx, x, &cx)?;
            // The last one's are wanted again at once where its backward comes next.
            if block_idx + 1 < run.end || !turn.goes_back_next {
                self.store.release(block_idx + 1);
            }
            blocks.push(keep);
            x = y;
        }
        if !layout.is_last(stage, chunk) {
            self.pipeline.send_activation(&x)?;
            return Ok((None, Live { embedded, blocks, dy: None }));
        }
        let (loss, dx) = self.loss_and_grad(&x, of_micro, loss, seams)?;
        drop(x);
        self.done_with(self.head(), turn.micro_batch)?;
        Ok((Some(loss), Live { embedded, blocks, dy: Some(dx) }))
    }

    /// Backward through a run of blocks, and through the embedding if it begins with that.
    fn go_back(
        &self,
        turn: &Turn,
        of_micro: &MicroState,
        live: Live,
        seams: &dyn Seams,
        auxiliary: &mut AuxiliarySums,
    ) -> Result<()> {
        let Live { embedded, blocks, dy } = live;
        let cx = self.training_cx(of_micro, seams);
        let mut dx = match dy {
            Some(dy) => dy,
            None => {
                let expected = self.hidden_states(of_micro.part.micro.positions.len(), seams);
                self.pipeline.receive_gradient(expected)?
            }
        };
        let run = self.pipeline.layout().blocks(self.pipeline.stage(), turn.pass.chunk);
        for (block_idx, keep) in run.zip(blocks).rev() {
            dx = self.backward_block(block_idx, keep, &dx, &cx, auxiliary)?;
            self.done_with(block_idx + 1, turn.micro_batch)?;
        }
        let Some(embedded) = embedded else { return self.pipeline.send_gradient(&dx) };
        self.store.prepare_grads(0)?;
        embedded.backward(&dx)?;
        self.done_with(0, turn.micro_batch)
    }

    fn training_cx<'a>(&self, of_micro: &'a MicroState, seams: &'a dyn Seams) -> Cx<'a> {
        let MicroState { part, cos, sin, dropout_key, .. } = of_micro;
        Cx { dropout_key: Some(*dropout_key), ..self.cx([cos, sin], &part.micro.seqs, &part.rows, seams) }
    }

    /// Lets go of a unit after its backward.
    fn done_with(&self, unit_idx: usize, micro_batch: MicroBatch) -> Result<()> {
        self.store.release(unit_idx);
        self.store.start_grad_reduction(unit_idx, micro_batch)
    }

    fn forward_block(&self, block_idx: usize, x: Tensor, cx: &Cx) -> Result<(Tensor, Kept)> {
        let _span = span("block", "forward");
        let weights = self.fetch(block_idx + 1, Some(block_idx + 2))?;
        if self.residency[block_idx] == Residency::Keep {
            let tape = Tape::record(&[&x], || self.model.block(weights, &x, cx))?;
            return Ok((tape.output().clone(), Kept::Tape(x, tape)));
        }
        let forward = || self.model.block(weights, &x, cx);
        let (y, outputs) = match self.residency[block_idx] {
            Residency::Selective => save_outputs(forward)?,
            _ => (forward()?, SavedOutputs::default()),
        };
        let kept = match self.residency[block_idx] {
            Residency::Offload => Kept::Parked(Parked::park(&x, &self.parking)?),
            _ => Kept::Input(x, outputs),
        };
        Ok((y, kept))
    }

    fn backward_block(
        &self,
        block_idx: usize,
        kept: Kept,
        dy: &Tensor,
        cx: &Cx,
        auxiliary: &mut AuxiliarySums,
    ) -> Result<Tensor> {
        let _span = span("block", "backward");
        // The embedding's backward reads no weights.
        let weights = self.fetch(block_idx + 1, Some(block_idx).filter(|unit_idx| *unit_idx > 0))?;
        self.store.prepare_grads(block_idx + 1)?;
        let (x, outputs) = match kept {
            Kept::Tape(x, tape) => return auxiliary.input_grad(tape, &x, dy),
            Kept::Input(x, outputs) => (x, outputs),
            Kept::Parked(parked) => (parked.fetch()?, SavedOutputs::default()),
        };
        let forward = || self.model.block(weights, &x, cx);
        let tape = Tape::replay(outputs, &[&x], forward)?;
        auxiliary.input_grad(tape, &x, dy)
    }

    /// Returns the loss of a micro-batch, and the gradient of the scaled loss with respect to the last block's output.
    fn loss_and_grad(
        &self,
        x_td: &Tensor,
        of_micro: &MicroState,
        loss: &StepLoss,
        seams: &dyn Seams,
    ) -> Result<(Tensor, Tensor)> {
        let _span = span("head", "forward and backward");
        let weights = self.store.fetch(self.head())?;
        self.store.prepare_grads(self.head())?;
        let tape = Tape::record(&[x_td], || seams.enter(&self.model.norm(weights, x_td)?))?;
        let lm_head = self.model.lm_head(weights)?;
        let (normed_td, part) = (tape.output(), &of_micro.part);
        let cross_entropy =
            |reduction, upstream| self.cross_entropy(normed_td, &lm_head, &part.micro.targets, reduction, upstream);
        let token_losses =
            || self.of_all_tokens(&cross_entropy(Reduction::None, Upstream::NoGrad)?.loss, of_micro.whole);
        let (value, out) = match loss.objective.loss(&TokenLosses::new(of_micro.whole, &token_losses))? {
            MicroLoss::SumOfTokens => {
                let out = cross_entropy(Reduction::Sum, loss.scale.upstream())?;
                (out.loss.clone(), out)
            }
            MicroLoss::Weighted { loss: value, weights } => {
                let rows = loss.scale.times_weights(&self.of_own_tokens(&weights, of_micro.whole)?)?;
                (self.counted_once(value)?, cross_entropy(Reduction::None, Upstream::Rows(&rows))?)
            }
        };
        let dx = out.dx.expect("an upstream gradient was given");
        Ok((value, input_grad(tape, x_td, &dx, &[])?))
    }
}
