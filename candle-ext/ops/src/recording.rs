//! Recording of ops and exchanges on the innermost tape.

use std::rc::Rc;

use candle_core::{DType, Result, Tensor, bail};

use crate::backward::{BackwardContext, BackwardFn, PendingExchange};
#[cfg(any(feature = "cuda", feature = "emulate"))]
use crate::saved::NormInputs;
use crate::saved::{GatedOutputs, Recomputable, Saved};
use crate::scope::{Scope, TapeNode, with_recording, within};
use crate::weight::Weight;

/// Input of a recorded op.
#[derive(Clone, Copy)]
pub enum OpInput<'a> {
    /// Activation, whose gradient the op's backward returns.
    Activation(&'a Tensor),
    /// Weight, to whose sink the op's backward adds the gradient.
    Weight(&'a Weight),
    /// Placeholder for trainable weights inside the op, whose gradients its backward handles itself.
    InnerWeights,
}

impl<'a> From<&'a Tensor> for OpInput<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Self::Activation(tensor)
    }
}

impl<'a> From<&'a Weight> for OpInput<'a> {
    fn from(weight: &'a Weight) -> Self {
        Self::Weight(weight)
    }
}

/// Records an op and its output on the innermost tape.
///
/// `backward(dy, context)` gets the output's contiguous gradient and returns a gradient per input. `None` means zero,
/// and is right for a weight.
///
/// Without a tracked input or a trainable weight, nothing is recorded, and the closure is dropped with the tensors it
/// saved.
pub fn record<const N: usize>(
    name: &'static str,
    inputs: [OpInput<'_>; N],
    output: Tensor,
    backward: impl FnOnce(&Tensor, &mut BackwardContext<'_>) -> Result<[Option<Tensor>; N]> + 'static,
) -> Tensor {
    with_recording(|recording| {
        let ids = inputs.map(|input| match input {
            OpInput::Activation(x) => Some(x.id()).filter(|id| recording.tracked.contains(id)),
            OpInput::Weight(_) | OpInput::InnerWeights => None,
        });
        let trains = |input: &OpInput<'_>| match input {
            OpInput::Activation(_) => false,
            OpInput::Weight(weight) => weight.sink().is_some(),
            OpInput::InnerWeights => true,
        };
        if ids.iter().any(Option::is_some) || inputs.iter().any(trains) {
            recording.tracked.insert(output.id());
            let follows_exchange = ids.iter().flatten().any(|id| recording.exchanged.contains(id));
            let backward: BackwardFn = Box::new(move |dy, context| Ok(backward(dy, context)?.into()));
            recording.nodes.push(TapeNode {
                name,
                inputs: ids.into(),
                output: output.id(),
                follows_exchange,
                backward,
            });
        }
    });
    output
}

/// Adds an auxiliary loss to the innermost tape; outside of a tape it has no effect. It is an f32 scalar, or the dot product of
/// an f32 vector and factors that are known before backward.
///
/// [`Tape::backward_with_losses`](crate::Tape::backward_with_losses) takes its weight, from which its backward starts.
pub fn auxiliary_loss(name: &'static str, loss: &Tensor) -> Result<()> {
    if loss.rank() > 1 || loss.dtype() != DType::F32 {
        bail!("auxiliary loss `{name}`: want an f32 scalar or vector, got {:?} {:?}", loss.dtype(), loss.dims())
    }
    with_recording(|recording| recording.auxiliary.push((name, loss.clone())));
    Ok(())
}

/// Records an exchange between ranks, such as an all-reduce: y = `forward(x)`, a new tensor.
///
/// Backward starts the exchange `start(dy)`, runs the deferred weight gradients meanwhile, then waits.
///
/// y is recomputable: the backward of an op that needs y calls `forward` again.
pub fn record_exchange(
    name: &'static str,
    x: &Tensor,
    forward: impl Fn(&Tensor) -> Result<Tensor> + 'static,
    start: impl FnOnce(&Tensor) -> Result<PendingExchange> + 'static,
) -> Result<Tensor> {
    let y = forward(x)?;
    let saved = save(x);
    recompute_with(&y, move || forward(&saved.get()?));
    let is_wanted = requires_grad(x);
    let y = record(name, [x.into()], y, move |dy, context| {
        let pending = start(dy)?;
        context.run_deferred()?;
        Ok([Some(pending()?)])
    });
    if is_wanted {
        with_recording(|recording| recording.exchanged.insert(y.id()));
    }
    Ok(y)
}

/// Runs `f` without recording on a tape, as torch's `no_grad`.
pub fn no_grad<T>(f: impl FnOnce() -> Result<T>) -> Result<T> {
    Ok(within(Scope::default(), f)?.0)
}

/// Returns true inside `Tape::record`, except inside [`no_grad`].
pub(crate) fn is_recording() -> bool {
    with_recording(|_| ()).is_some()
}

/// Returns true if the innermost tape needs the gradient of `x`.
///
/// That holds for the tape's inputs, and for tensors computed from them or from a trainable weight.
pub fn requires_grad(x: &Tensor) -> bool {
    with_recording(|recording| recording.tracked.contains(&x.id())).unwrap_or(false)
}

/// Saves `x` for a backward: the tensor, or the function that recomputes it.
pub(crate) fn save(x: &Tensor) -> Saved {
    match with_recording(|recording| recording.recomputable.get(&x.id()).cloned()).flatten() {
        Some(recomputable) => Saved::Recomputable(recomputable),
        None => Saved::Tensor(x.clone()),
    }
}

/// Makes backward recompute `x` by `compute` instead of saving it. `compute` must be cheap and bitwise reproducible.
pub(crate) fn recompute_with(x: &Tensor, compute: impl Fn() -> Result<Tensor> + 'static) {
    with_recording(|recording| recording.recomputable.insert(x.id(), Rc::new(Recomputable::new(x.id(), compute))));
}

/// Marks `x` as a tensor that only its readers need in backward. Its memory is free after forward if they keep another form of
/// it, such as FP8 codes.
pub fn saved_by_readers_only(x: &Tensor) {
    let n_bytes = x.elem_count() * x.dtype().size_in_bytes();
    with_recording(|recording| recording.saved_by_readers.insert(x.id(), n_bytes));
}

/// Returns the bytes that [`save`] of `x` would hold until backward, apart from tensors that other ops save anyway.
pub(crate) fn bytes_of_saving(x: &Tensor) -> usize {
    with_recording(|recording| recording.saved_by_readers.get(&x.id()).copied()).flatten().unwrap_or(0)
}

/// Calls [`recompute_with`] for a tensor that is computed from `source` alone, which backward then holds.
pub(crate) fn recompute_from(source: &Tensor, x: &Tensor, compute: impl Fn() -> Result<Tensor> + 'static) {
    recompute_with(x, compute);
    with_recording(|recording| {
        if let Some(n_bytes) = recording.saved_by_readers.get(&source.id()).copied() {
            recording.saved_by_readers.insert(x.id(), n_bytes);
        }
    });
}

/// Calls [`recompute_with`] for the output of a norm, which kernels can also compute from `norm`.
#[cfg(any(feature = "cuda", feature = "emulate"))]
pub(crate) fn recompute_norm_with(x: &Tensor, norm: NormInputs, compute: impl Fn() -> Result<Tensor> + 'static) {
    let recomputable = Rc::new(Recomputable::of_norm(x.id(), norm, compute));
    with_recording(|recording| recording.recomputable.insert(x.id(), recomputable));
}

/// Calls [`recompute_with`] for the output of a gated activation, unless the tape saves those.
pub(crate) fn recompute_gated_with(x: &Tensor, compute: impl Fn() -> Result<Tensor> + 'static) {
    recompute_gated(x, || Recomputable::new(x.id(), compute));
}

/// Calls [`recompute_gated_with`] for an op whose backward runs the readers that wait for the returned activation.
pub(crate) fn recompute_gated_in_backward(
    x: &Tensor,
    compute: impl Fn() -> Result<Tensor> + 'static,
) -> Option<Rc<Recomputable>> {
    recompute_gated(x, || Recomputable::in_backward(x.id(), compute))
}

fn recompute_gated(x: &Tensor, recomputable: impl FnOnce() -> Recomputable) -> Option<Rc<Recomputable>> {
    match with_recording(|recording| recording.gated)? {
        GatedOutputs::Saved => {
            saved_by_readers_only(x);
            None
        }
        GatedOutputs::Recomputed => {
            let recomputable = Rc::new(recomputable());
            with_recording(|recording| recording.recomputable.insert(x.id(), recomputable.clone()));
            Some(recomputable)
        }
    }
}
