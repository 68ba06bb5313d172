//! SwiGLU: silu(gate) * up, the gated activation of Llama's MLP.

mod cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;
mod output_grad;
mod source;

use std::rc::{Rc, Weak};

use candle_core::{DType, Result, Tensor, bail};

use crate::cost::{Cost, bytes};
use crate::device::on_device;
use crate::floats::{FloatBuf, check_dtype};
use crate::recording::{recompute_gated_in_backward, record};
use crate::saved::Recomputable;
use crate::span::span;
use crate::storage::{self, host, update};
use output_grad::OutputGrad;
use source::GateUp;

/// Computes y = gate * sigmoid(gate) * up, element by element, in f32 and rounded once.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let _span = span("swiglu", "forward");
    check(gate, up)?;
    let source = GateUp::Two(gate.contiguous()?, up.contiguous()?);
    let (y, saved) = forward_recomputable(&source)?;
    Ok(record("swiglu", [gate.into(), up.into()], y, move |dy, _| {
        let mut grads = backward_with_readers(&source, dy, saved.upgrade().as_deref())?.into_iter();
        Ok([grads.next(), grads.next()])
    }))
}

/// Computes [`swiglu`] of a fused projection `gate_up` [.., 2f]: f elements of gate, then f of up. Returns y [.., f].
pub fn swiglu_joined(gate_up: &Tensor) -> Result<Tensor> {
    let _span = span("swiglu", "forward");
    check_dtype("swiglu", "the gate", gate_up.dtype())?;
    if !gate_up.dims().last().is_some_and(|width| width.is_multiple_of(2)) {
        bail!("swiglu: want an input [.., 2f] of gate and up, got {:?}", gate_up.dims())
    }
    let source = GateUp::Joined(gate_up.contiguous()?);
    let (y, saved) = forward_recomputable(&source)?;
    Ok(record("swiglu", [gate_up.into()], y, move |dy, _| {
        Ok([backward_with_readers(&source, dy, saved.upgrade().as_deref())?.pop()])
    }))
}

/// Returns the cost of a forward with `n_outputs` elements: gate and up are saved, y is recomputed.
pub fn swiglu_cost(n_outputs: u64, dtype: DType) -> Cost {
    Cost { saved_bytes: bytes(2 * n_outputs, dtype), ..Cost::default() }
}

/// Computes y, which backward may compute again.
fn forward_recomputable(source: &GateUp) -> Result<(Tensor, Weak<Recomputable>)> {
    let y = forward(source)?;
    let again = source.clone();
    let saved = recompute_gated_in_backward(&y, move || forward(&again));
    // Its readers alone keep y.
    Ok((y, saved.as_ref().map(Rc::downgrade).unwrap_or_default()))
}

/// Returns the gradient of each tensor of the source, and runs the readers of y that wait for it.
///
/// One pass computes the gradients and y, if y can take the place of dy.
fn backward_with_readers(source: &GateUp, dy: &Tensor, saved: Option<&Recomputable>) -> Result<Vec<Tensor>> {
    let readers = saved.map(Recomputable::take_waiting).unwrap_or_default();
    match saved {
        Some(saved) if readers.iter().any(|reader| reader.allocated(dy)) => {
            let grads = backward(source, dy, OutputGrad::BecomesOutput)?;
            saved.run(readers, dy.clone())?;
            Ok(grads)
        }
        Some(saved) if !readers.is_empty() => {
            saved.run(readers, forward(source)?)?;
            backward(source, dy, OutputGrad::Kept)
        }
        _ => backward(source, dy, OutputGrad::Kept),
    }
}

fn forward(source: &GateUp) -> Result<Tensor> {
    on_device!("swiglu", source.tensor(), {
        cpu => forward_cpu(source),
        cuda => Ok(cuda::forward(source)?.into_tensor(source.shape())),
    })
}

/// Returns the gradient of each tensor of the source.
fn backward(source: &GateUp, dy: &Tensor, output_grad: OutputGrad) -> Result<Vec<Tensor>> {
    on_device!("swiglu", dy, {
        cpu => backward_cpu(source, dy, output_grad),
        cuda => cuda::backward(source, dy, output_grad),
    })
}

/// Returns the gradients of contiguous gate and up.
#[cfg(any(feature = "cuda", feature = "emulate"))]
pub(crate) fn swiglu_grads([gate, up]: [&Tensor; 2], dy: &Tensor) -> Result<[Tensor; 2]> {
    let grads = backward(&GateUp::Two(gate.clone(), up.clone()), dy, OutputGrad::Kept)?;
    match <[Tensor; 2]>::try_from(grads) {
        Ok(grads) => Ok(grads),
        Err(_) => bail!("swiglu: gate and up have a gradient each"),
    }
}

fn forward_cpu(source: &GateUp) -> Result<Tensor> {
    let mut y = FloatBuf::unwritten(source.tensor().dtype(), source.shape().elem_count())?;
    with_inputs(source, |inputs| {
        cpu::forward(inputs, y.view(), source.gated());
        Ok(())
    })?;
    Ok(storage::tensor(y, source.shape()))
}

fn backward_cpu(source: &GateUp, dy: &Tensor, output_grad: OutputGrad) -> Result<Vec<Tensor>> {
    let buffer = |x: &Tensor| FloatBuf::unwritten(x.dtype(), x.elem_count());
    let mut grads: Vec<FloatBuf> = source.tensors().map(buffer).collect::<Result<_>>()?;
    let outputs = match grads.as_mut_slice() {
        [d_gate, d_up] => cpu::GateUpGrads::Two([d_gate.view(), d_up.view()]),
        [d_joined] => cpu::GateUpGrads::Joined(d_joined.view()),
        _ => bail!("swiglu: gate and up are one tensor or two"),
    };
    with_inputs(source, |inputs| match output_grad {
        OutputGrad::Kept => {
            cpu::backward(inputs, cpu::OutputGradBuffer::Read(host("swiglu", dy)?.floats()?), outputs, source.gated());
            Ok(())
        }
        OutputGrad::BecomesOutput => update(dy, "swiglu", |dy| {
            cpu::backward(inputs, cpu::OutputGradBuffer::BecomesOutput(dy), outputs, source.gated());
            Ok(())
        }),
    })?;
    Ok(grads.into_iter().zip(source.tensors()).map(|(grad, x)| storage::tensor(grad, x.shape())).collect())
}

/// Calls `f` with the elements of gate and up, if there are any.
fn with_inputs(source: &GateUp, f: impl FnOnce(cpu::SwigluInputs) -> Result<()>) -> Result<()> {
    let first = host("swiglu", source.tensor())?;
    match source {
        _ if source.tensor().elem_count() == 0 => Ok(()),
        GateUp::Two(_, up) => {
            let up = host("swiglu", up)?;
            f(cpu::SwigluInputs { gate: first.floats()?, up: up.floats()? })
        }
        GateUp::Joined(_) => {
            let gate = first.floats()?;
            f(cpu::SwigluInputs { gate, up: gate.slice(source.gated().width..gate.len()) })
        }
    }
}

fn check(gate: &Tensor, up: &Tensor) -> Result<()> {
    check_dtype("swiglu", "the gate", gate.dtype())?;
    if gate.shape() != up.shape() || gate.dtype() != up.dtype() {
        bail!("swiglu: gate is {:?} {:?} but up is {:?} {:?}", gate.dtype(), gate.dims(), up.dtype(), up.dims())
    }
    Ok(())
}
