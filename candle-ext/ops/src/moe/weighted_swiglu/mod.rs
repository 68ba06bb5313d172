//! SwiGLU with a weight per row: the experts' activation, with the router's weight between their two matmuls.

mod cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;

use candle_core::{DType, Result, Tensor, bail};

use crate::cost::{Cost, bytes};
use crate::device::on_device;
use crate::floats::{FloatBuf, check_dtype};
use crate::recording::{recompute_gated_with, record};
use crate::span::span;
use crate::storage::{self, host};
use cpu::{Inputs, WeightedSwigluGrads};

const OP: &str = "weighted_swiglu";

/// Computes y = w * silu(gate) * up, in f32 and rounded once.
///
/// `gate_up` is [n, 2f]: f elements of gate, then f of up. The weights w of rows are f32 [n]; y is [n, f].
///
/// The weight of an expert's output scales its activation instead, as in Megatron-LM: the second matmul is linear. Its
/// gradient is the sum of dy * silu(gate) * up over a row, so the expert's output is not saved.
pub fn weighted_swiglu(gate_up: &Tensor, row_weights: &Tensor) -> Result<Tensor> {
    let _span = span(OP, "forward");
    check(gate_up, row_weights)?;
    let source = Source { gate_up: gate_up.contiguous()?, weights: row_weights.contiguous()? };
    let y = source.forward()?;
    let again = source.clone();
    recompute_gated_with(&y, move || again.forward());
    Ok(record(OP, [gate_up.into(), row_weights.into()], y, move |dy, _| {
        let [d_gate_up, d_weights] = source.backward(dy)?;
        Ok([Some(d_gate_up), Some(d_weights)])
    }))
}

/// Returns the cost of a forward with `n_outputs` = n * f elements: gate and up are saved, y is recomputed.
pub fn weighted_swiglu_cost(n_outputs: u64, dtype: DType) -> Cost {
    Cost { saved_bytes: bytes(2 * n_outputs, dtype), ..Cost::default() }
}

/// Contiguous inputs.
#[derive(Clone)]
struct Source {
    gate_up: Tensor,
    weights: Tensor,
}

impl Source {
    fn forward(&self) -> Result<Tensor> {
        let (n, width) = self.sizes();
        on_device!(OP, self.gate_up, {
            cpu => {
                let mut y = FloatBuf::unwritten(self.gate_up.dtype(), n * width)?;
                self.with_inputs(|inputs| cpu::forward(inputs, y.view()))?;
                Ok(storage::tensor(y, (n, width)))
            },
            cuda => cuda::forward(&self.gate_up, &self.weights, (n, width)),
        })
    }

    /// Returns the gradients of gate_up and of the weights.
    fn backward(&self, dy: &Tensor) -> Result<[Tensor; 2]> {
        let (n, width) = self.sizes();
        on_device!(OP, self.gate_up, {
            cpu => {
                let mut d_gate_up = FloatBuf::unwritten(self.gate_up.dtype(), n * 2 * width)?;
                let mut d_weights = vec![0.0; n];
                let dy = host(OP, dy)?;
                let dy = dy.floats()?;
                self.with_inputs(|inputs| {
                    cpu::backward(inputs, dy, WeightedSwigluGrads { gate_up: d_gate_up.view(), weights: &mut d_weights });
                })?;
                let d_weights = Tensor::from_vec(d_weights, n, self.weights.device())?;
                Ok([storage::tensor(d_gate_up, (n, 2 * width)), d_weights])
            },
            cuda => cuda::backward(&self.gate_up, &self.weights, dy, (n, width)),
        })
    }

    /// Returns n and f.
    fn sizes(&self) -> (usize, usize) {
        (self.gate_up.dims()[0], self.gate_up.dims()[1] / 2)
    }

    /// Calls `f` with the elements, if there are any.
    fn with_inputs(&self, f: impl FnOnce(Inputs<'_>)) -> Result<()> {
        if self.gate_up.elem_count() == 0 {
            return Ok(());
        }
        let (gate_up, weights) = (host(OP, &self.gate_up)?, host(OP, &self.weights)?);
        f(Inputs { gate_up: gate_up.floats()?, weights: weights.slice()?, width: self.sizes().1 });
        Ok(())
    }
}

fn check(gate_up: &Tensor, weights: &Tensor) -> Result<()> {
    check_dtype(OP, "the input", gate_up.dtype())?;
    let &[n, width] = gate_up.dims() else { bail!("{OP}: want an input [n, 2f], got {:?}", gate_up.dims()) };
    if !width.is_multiple_of(2) {
        bail!("{OP}: want an input [n, 2f] of gate and up, got [{n}, {width}]")
    }
    if weights.dtype() != DType::F32 || weights.dims() != [n] {
        bail!("{OP}: want f32 weights [{n}], got {:?} {:?}", weights.dtype(), weights.dims())
    }
    Ok(())
}
