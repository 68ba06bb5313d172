//! silu(gate) * up, the gated activation of Llama's MLP.

mod cpu;

use candle_core::{Result, Tensor, bail};

use crate::floats::{FloatBuf, check_dtype};
use crate::storage::{self, host};
use crate::tape::record;

/// y = gate * sigmoid(gate) * up, element by element, computed in f32 and rounded once.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    check(gate, up)?;
    let shape = gate.shape().clone();
    let saved = (gate.detach().contiguous()?, up.detach().contiguous()?);
    let mut y = FloatBuf::zeros(gate.dtype(), gate.elem_count())?;
    {
        let (gate, up) = (host("swiglu", &saved.0)?, host("swiglu", &saved.1)?);
        cpu::forward(gate.floats()?, up.floats()?, y.view());
    }
    record("swiglu", [gate, up], (y.into_storage(), shape), move |_, dy| {
        let (gate, up) = &saved;
        let mut d_gate = FloatBuf::zeros(gate.dtype(), gate.elem_count())?;
        let mut d_up = FloatBuf::zeros(up.dtype(), up.elem_count())?;
        {
            let (gate, up) = (host("swiglu", gate)?, host("swiglu", up)?);
            let dy = host("swiglu", dy)?;
            let inputs = (gate.floats()?, up.floats()?, dy.floats()?);
            cpu::backward(inputs, d_gate.view(), d_up.view());
        }
        Ok([Some(storage::tensor(d_gate, gate.shape())), Some(storage::tensor(d_up, up.shape()))])
    })
}

fn check(gate: &Tensor, up: &Tensor) -> Result<()> {
    check_dtype("swiglu", "the gate", gate.dtype())?;
    if gate.shape() != up.shape() || gate.dtype() != up.dtype() {
        bail!("swiglu: gate is {:?} {:?} but up is {:?} {:?}", gate.dtype(), gate.dims(), up.dtype(), up.dims())
    }
    Ok(())
}
