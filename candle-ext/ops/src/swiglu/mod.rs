//! silu(gate) * up, the gated activation of Llama's MLP.

mod cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;

use candle_core::{Result, Tensor, bail};

use crate::device::on_device;
use crate::floats::{FloatBuf, check_dtype};
use crate::span::span;
use crate::storage::{self, host};
use crate::tape::{make_cheap, record};

/// y = gate * sigmoid(gate) * up, element by element, computed in f32 and rounded once.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let _span = span("swiglu", "forward");
    check(gate, up)?;
    let (gate_kept, up_kept) = (gate.contiguous()?, up.contiguous()?);
    let y = forward(&gate_kept, &up_kept)?;
    let (again_gate, again_up) = (gate_kept.clone(), up_kept.clone());
    make_cheap(&y, move || forward(&again_gate, &again_up));
    Ok(record("swiglu", [gate.into(), up.into()], y, move |dy| {
        let (gate, up) = (&gate_kept, &up_kept);
        let (d_gate, d_up) = on_device!("swiglu", dy, {
            cpu => backward_cpu(gate, up, dy)?,
            cuda => cuda::backward(gate, up, dy)?,
        });
        Ok([Some(d_gate), Some(d_up)])
    }))
}

fn forward(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    on_device!("swiglu", gate, {
        cpu => {
            let mut y = FloatBuf::unwritten(gate.dtype(), gate.elem_count())?;
            let (gate_host, up_host) = (host("swiglu", gate)?, host("swiglu", up)?);
            cpu::forward(gate_host.floats()?, up_host.floats()?, y.view());
            Ok(storage::tensor(y, gate.shape()))
        },
        cuda => Ok(cuda::forward(gate, up)?.into_tensor(gate.shape())),
    })
}

fn backward_cpu(gate: &Tensor, up: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)> {
    let shape = gate.shape();
    let mut d_gate = FloatBuf::unwritten(gate.dtype(), gate.elem_count())?;
    let mut d_up = FloatBuf::unwritten(up.dtype(), up.elem_count())?;
    let (gate, up, dy) = (host("swiglu", gate)?, host("swiglu", up)?, host("swiglu", dy)?);
    let inputs = (gate.floats()?, up.floats()?, dy.floats()?);
    cpu::backward(inputs, d_gate.view(), d_up.view());
    Ok((storage::tensor(d_gate, shape), storage::tensor(d_up, shape)))
}

fn check(gate: &Tensor, up: &Tensor) -> Result<()> {
    check_dtype("swiglu", "the gate", gate.dtype())?;
    if gate.shape() != up.shape() || gate.dtype() != up.dtype() {
        bail!("swiglu: gate is {:?} {:?} but up is {:?} {:?}", gate.dtype(), gate.dims(), up.dtype(), up.dims())
    }
    Ok(())
}
