//! Reverse-mode automatic differentiation: a [`Tape`] records ops and runs backward once.
//!
//! candle's own backward keeps all saved tensors to its end, adds gradients to zeros, and allows three inputs per op.

use std::collections::HashMap;

use candle_core::{Result, Tensor, TensorId, bail};

use crate::add::add;
use crate::backward::{BackwardContext, BackwardState};
use crate::saved::{GatedOutputs, ReplayPhase, SavedOutputs};
use crate::scope::{Recording, Scope, TapeNode, within};
use crate::span::span;

/// A recorded computation, differentiable with respect to its inputs and to the trainable weights it used.
pub struct Tape {
    output: Tensor,
    nodes: Vec<TapeNode>,
    /// Auxiliary losses by name, f32 scalars or vectors.
    auxiliary: Vec<(&'static str, Tensor)>,
}

/// Gradients of a tape's inputs.
#[derive(Debug)]
pub struct Grads(HashMap<TensorId, Tensor>);

impl Tape {
    /// Runs `forward` and records its ops on `inputs` and on trainable weights.
    pub fn record(inputs: &[&Tensor], forward: impl FnOnce() -> Result<Tensor>) -> Result<Self> {
        let recording = Recording::of(inputs, GatedOutputs::Recomputed);
        Ok(Self::in_scope(Scope { recording: Some(recording), replay: None }, forward)?.0)
    }

    /// Records the second run of `forward`, with the outputs that [`save_outputs`](crate::save_outputs) saved in the
    /// first.
    ///
    /// Ops without a saved output compute theirs. Fails if saved outputs are left unused.
    ///
    /// Outputs of gated activations are saved on this tape, because its backward follows at once and needs them first.
    pub fn replay(saved: SavedOutputs, inputs: &[&Tensor], forward: impl FnOnce() -> Result<Tensor>) -> Result<Self> {
        let recording = Recording::of(inputs, GatedOutputs::Saved);
        let scope = Scope { recording: Some(recording), replay: Some(ReplayPhase::Second(saved)) };
        let (tape, replay) = Self::in_scope(scope, forward)?;
        if let Some(ReplayPhase::Second(left)) = replay {
            left.check_used()?;
        }
        Ok(tape)
    }

    fn in_scope(scope: Scope, forward: impl FnOnce() -> Result<Tensor>) -> Result<(Self, Option<ReplayPhase>)> {
        let (output, Scope { recording, replay }) = within(scope, forward)?;
        let Recording { nodes, auxiliary, .. } = recording.unwrap_or_default();
        Ok((Self { output, nodes, auxiliary }, replay))
    }

    /// Returns the output of the recorded forward.
    pub fn output(&self) -> &Tensor {
        &self.output
    }

    /// Returns true if no op of the forward has a backward.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Returns the auxiliary losses of the forward by name, f32 scalars or vectors in the order of their computation.
    pub fn auxiliary_losses(&self) -> &[(&'static str, Tensor)] {
        &self.auxiliary
    }

    /// Runs backward from the gradient `dy` of the output. Adds to the weights' sinks and returns the inputs'
    /// gradients.
    ///
    /// Saved tensors of an op are freed as soon as its backward has run.
    ///
    /// # Errors
    ///
    /// If the forward computed auxiliary losses, whose gradients would be lost.
    pub fn backward(self, dy: &Tensor) -> Result<Grads> {
        self.backward_with_losses(dy, &[])
    }

    /// Runs [`Tape::backward`] from `dy` and from a weight per auxiliary loss, its coefficient in the objective: an f32 scalar or
    /// vector, as the loss is.
    pub fn backward_with_losses(self, dy: &Tensor, weights: &[Tensor]) -> Result<Grads> {
        if let Some((name, _)) = self.auxiliary.get(weights.len()) {
            bail!("backward: the auxiliary loss `{name}` has no weight")
        }
        let y = &self.output;
        if y.shape() != dy.shape() || y.dtype() != dy.dtype() {
            bail!(
                "backward: the gradient has shape {:?} and dtype {:?}, the output {:?} and {:?}",
                dy.shape(),
                dy.dtype(),
                y.shape(),
                y.dtype()
            )
        }
        let mut state = BackwardState::new(y.id(), dy.clone());
        state.grads.extend(self.auxiliary.iter().zip(weights).map(|((_, loss), weight)| (loss.id(), weight.clone())));
        self.nodes.into_iter().rev().try_for_each(|node| differentiate(node, &mut state))?;
        state.run_deferred()?;
        while let Some((id, grad)) = state.receive(None)? {
            add_grad(&mut state, id, grad)?;
        }
        Ok(Grads(state.grads))
    }
}

/// Runs the backward of one op and accumulates its inputs' gradients.
fn differentiate(node: TapeNode, state: &mut BackwardState) -> Result<()> {
    while let Some((id, grad)) = state.receive(Some(node.output))? {
        add_grad(state, id, grad)?;
    }
    let Some(dy) = state.grads.remove(&node.output) else { return Ok(()) };
    let _span = span(node.name, "backward");
    let mut context = BackwardContext::new(state, &node.inputs, node.follows_exchange);
    let of_inputs = (node.backward)(&dy.contiguous()?, &mut context)?;
    context.check_returned(node.name, &of_inputs)?;
    drop(dy);
    for (id, grad) in node.inputs.into_iter().zip(of_inputs) {
        let (Some(id), Some(grad)) = (id, grad) else { continue };
        add_grad(state, id, grad)?;
    }
    Ok(())
}

/// Adds to the accumulated gradient of a tensor.
fn add_grad(state: &mut BackwardState, id: TensorId, grad: Tensor) -> Result<()> {
    let sum = match state.grads.remove(&id) {
        Some(sum) => add(&sum, &grad)?,
        None => grad,
    };
    state.grads.insert(id, sum);
    Ok(())
}

impl Recording {
    fn of(inputs: &[&Tensor], gated: GatedOutputs) -> Self {
        Self { tracked: inputs.iter().map(|input| input.id()).collect(), gated, ..Self::default() }
    }
}

impl Grads {
    /// Returns the gradient of an input of the tape; `None` if the output does not depend on it.
    pub fn get(&self, input: &Tensor) -> Option<&Tensor> {
        self.0.get(&input.id())
    }

    /// Takes the gradient of an input of the tape; `None` if the output does not depend on it.
    pub fn remove(&mut self, input: &Tensor) -> Option<Tensor> {
        self.0.remove(&input.id())
    }
}
