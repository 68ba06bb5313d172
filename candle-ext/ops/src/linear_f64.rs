//! Linear layer in f64, for the logits of routers: y = x w^T over the last dim.
//!
//! t tokens (all leading dims), k inputs, n outputs

use candle_core::{DType, Result, Tensor};

use crate::backward::BackwardContext;
use crate::gemm::Accumulate;
use crate::in_place::copy_into;
use crate::linear;
use crate::recording::{record, requires_grad, save};
use crate::saved::Saved;
use crate::span::span;
use crate::weight::Weight;
use crate::weight_matmul::Dims;

const OP: &str = "linear_f64";

/// Computes y = x w^T in f64, rounded to f32, with x [.., k], w [n, k] and y [.., n].
///
/// Backward computes dx = dy w and dw = dy^T x in f64. It rounds dx to x's dtype and adds dw to the sink; a frozen weight
/// has none. A quantized weight is dequantized to f32.
///
/// The formulas are those of Megatron-LM's `router_gating_linear`.
pub fn linear_f64(x: &Tensor, w: &Weight) -> Result<Tensor> {
    let _span = span(OP, "forward");
    let dims = linear::check(OP, x, w, None)?;
    let input = x.contiguous()?;
    let mut shape = x.dims().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = dims.n;
    }
    let y = match dims.t {
        0 => Tensor::zeros(shape, DType::F32, x.device())?,
        _ => rows_f64(&input, dims.k, dims)?.matmul(&weight_f64(w)?.t()?)?.to_dtype(DType::F32)?.reshape(shape)?,
    };
    let saved = SavedInputs {
        input: w.sink().map(|_| save(&input)),
        wants_dx: requires_grad(x).then(|| (x.dtype(), x.dims().to_vec())),
        w: w.clone(),
        dims,
    };
    Ok(record(OP, [x.into(), w.into()], y, move |dy, context| Ok([saved.backward(dy, context)?, None])))
}

/// Returns the bytes of the f64 copies in one pass, forward or backward, with x [t, k] and w [n, k].
pub fn linear_f64_bytes(n_tokens: u64, n_in: u64, n_out: u64) -> u64 {
    (n_tokens * n_in + n_out * n_in + n_tokens * n_out) * size_of::<f64>() as u64
}

struct SavedInputs {
    /// Input, saved for the gradient of a trainable weight.
    input: Option<Saved>,
    /// Dtype and shape of the input; `None` if its gradient is not needed.
    wants_dx: Option<(DType, Vec<usize>)>,
    w: Weight,
    dims: Dims,
}

impl SavedInputs {
    /// Adds dw to its sink and returns dx. Computes dx first if an exchange waits for it.
    fn backward(mut self, dy: &Tensor, context: &mut BackwardContext<'_>) -> Result<Option<Tensor>> {
        if !context.defers() {
            self.add_grad(dy)?;
            return self.grad_x(dy);
        }
        let (dx, dy) = (self.grad_x(dy)?, dy.clone());
        context.defer(move || self.add_grad(&dy))?;
        Ok(dx)
    }

    /// Frees the input: a recomputed one would add to the memory of dx.
    fn add_grad(&mut self, dy: &Tensor) -> Result<()> {
        let (Some(sink), Some(x)) = (self.w.sink(), self.input.take()) else { return Ok(()) };
        if self.dims.t == 0 {
            return Ok(());
        }
        let dw = rows_f64(dy, self.dims.n, self.dims)?.t()?.matmul(&rows_f64(&x.get()?, self.dims.k, self.dims)?)?;
        let (grad, accumulate) = sink.grad_to_write()?;
        let sum = match accumulate {
            Accumulate::Overwrite => dw,
            Accumulate::Add => (grad.to_dtype(DType::F64)?.reshape(dw.shape())? + dw)?,
        };
        copy_into(&grad, &sum.to_dtype(DType::F32)?)
    }

    fn grad_x(&self, dy: &Tensor) -> Result<Option<Tensor>> {
        let Some((dtype, shape)) = &self.wants_dx else { return Ok(None) };
        if self.dims.t == 0 {
            return Tensor::zeros(shape.as_slice(), *dtype, dy.device()).map(Some);
        }
        let dx = rows_f64(dy, self.dims.n, self.dims)?.matmul(&weight_f64(&self.w)?)?;
        dx.to_dtype(*dtype)?.reshape(shape.as_slice()).map(Some)
    }
}

/// Returns a tensor [.., width] as an f64 matrix [t, width].
fn rows_f64(x: &Tensor, width: usize, dims: Dims) -> Result<Tensor> {
    x.reshape((dims.t, width))?.to_dtype(DType::F64)
}

fn weight_f64(w: &Weight) -> Result<Tensor> {
    w.stored()?.dense(DType::F32)?.to_dtype(DType::F64)
}
