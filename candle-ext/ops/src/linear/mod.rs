//! Linear layer: y = x w^T + b over the last dim.
//!
//! t tokens (all leading dims), k inputs, n outputs

mod adapter;
pub(crate) mod bias;
mod cost;
pub(crate) mod cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;

use candle_core::{DType, Result, Tensor, bail};

use crate::backward::BackwardContext;
use crate::device::on_device;
use crate::floats::{FloatBuf, check_dtype};
use crate::fp8::{Fp8LinearCall, fake_quantized_linear, fp8_linear};
use crate::recording::{record, requires_grad, save};
use crate::saved::Saved;
use crate::span::span;
use crate::storage::{self, host};
use crate::weight::Weight;
use crate::weight_matmul::Dims;
pub use adapter::{joins_adapters, linear_plus, linear_plus_columns, linear_scaled};
use bias::add_grad_bias;
pub use cost::LinearCost;

/// Dtype of a linear layer's output. Sums are f32 and rounded once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputDtype {
    /// The input's dtype.
    SameAsInput,
    /// f32.
    F32,
}

/// Computes y = x w^T + b, with x [.., k], w [n, k], b [n] and y [.., n].
///
/// Weight gradients are added to the sinks (dw += dy^T x); frozen weights have none.
///
/// A weight with an enabled [`Fp8Linear`](crate::fp8::Fp8Linear) multiplies in FP8.
///
/// The weight may be quantized or have another dtype than x. The CPU dequantizes one panel at a time to f32, CUDA the
/// whole weight to x's dtype.
pub fn linear(x: &Tensor, w: &Weight, bias: Option<&Weight>, precision: OutputDtype) -> Result<Tensor> {
    let _span = span("linear", "forward");
    let dims = check("linear", x, w, bias)?;
    let input = x.contiguous()?;
    let out_dtype = match precision {
        OutputDtype::SameAsInput => x.dtype(),
        OutputDtype::F32 => DType::F32,
    };
    if let Some(layer) = w.fp8() {
        if layer.fake_quantizes() {
            return fake_quantized_linear(&input, w, bias, out_dtype);
        }
        return fp8_linear(&input, Fp8LinearCall { w, bias, layer, out_dtype, dims });
    }
    let y = on_device!("linear", input, {
        cpu => forward_cpu(&input, w, bias, out_dtype, dims)?.into_storage(),
        cuda => {
            let bias = bias.map(Weight::value).transpose()?;
            let terms = cuda::GemmTerms { bias: bias.as_ref(), ..cuda::GemmTerms::NONE };
            cuda::forward(&input, &w.stored()?.dense(input.dtype())?, terms, out_dtype, dims)?.into_storage()
        },
    });
    let saved = SavedLinear::new(x, &input, w, bias, dims);
    let y = storage::tensor(y, output_shape(x, dims));
    Ok(record("linear", [x.into(), w.into(), bias.unwrap_or(w).into()], y, move |dy, context| {
        Ok([saved.backward(dy, context)?, None, None])
    }))
}

fn forward_cpu(x: &Tensor, w: &Weight, bias: Option<&Weight>, out_dtype: DType, dims: Dims) -> Result<FloatBuf> {
    let mut y = FloatBuf::unwritten(out_dtype, dims.t * dims.n)?;
    let (w, bias) = (w.stored()?, bias.map(Weight::value).transpose()?);
    let x = host("linear", x)?;
    let bias = bias.as_ref().map(|bias| host("linear", bias)).transpose()?;
    let bias = bias.as_ref().map(|bias| bias.floats()).transpose()?;
    let x = x.floats()?;
    w.with_operand("linear", |w| cpu::forward(x, w, bias, y.view(), dims))?;
    Ok(y)
}

struct SavedLinear {
    /// Input, saved for the gradient of a trainable weight.
    input: Option<Saved>,
    x_dtype: DType,
    /// Shape of the input; `None` if its gradient is not needed.
    wants_dx: Option<Vec<usize>>,
    w: Weight,
    bias: Option<Weight>,
    dims: Dims,
    /// Factor on the matmul, 1 on a CPU.
    #[cfg_attr(not(any(feature = "cuda", feature = "emulate")), expect(dead_code, reason = "only CUDA reads it"))]
    factor: f32,
}

/// Returns the shape of the output for an input x.
fn output_shape(x: &Tensor, dims: Dims) -> Vec<usize> {
    let mut shape = x.dims().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = dims.n;
    }
    shape
}

impl SavedLinear {
    /// Saves what the gradients of x w^T need; `input` is x in contiguous memory.
    fn new(x: &Tensor, input: &Tensor, w: &Weight, bias: Option<&Weight>, dims: Dims) -> Self {
        Self {
            input: w.sink().map(|_| save(input)),
            x_dtype: x.dtype(),
            wants_dx: requires_grad(x).then(|| x.dims().to_vec()),
            w: w.clone(),
            bias: bias.cloned(),
            dims,
            factor: 1.0,
        }
    }

    /// Adds dw and db to their sinks and returns dx = dy w. Computes dx first if an exchange waits for it, or if the backward of
    /// the op before computes the input.
    ///
    /// The f32 gradient of an f32 output is rounded if the operands are bf16, so that all are.
    fn backward(self, dy: &Tensor, context: &mut BackwardContext<'_>) -> Result<Option<Tensor>> {
        let are_bf16 = self.x_dtype == DType::BF16 && self.w.dtype() == DType::BF16;
        let dy = &if are_bf16 { dy.to_dtype(DType::BF16)? } else { dy.clone() };
        let awaited = self.input.as_ref().and_then(Saved::awaited).filter(|_| self.wants_dx.is_some());
        if !context.defers() && awaited.is_none() {
            self.add_grads(dy)?;
            return self.grad_x(dy, context);
        }
        let (dx, dy) = (self.grad_x(dy, context)?, dy.clone());
        match (&dx, awaited) {
            (Some(dx), Some(input)) if !context.defers() => input.wait(dx.id(), move || self.add_grads(&dy))?,
            _ => context.defer(move || self.add_grads(&dy))?,
        }
        Ok(dx)
    }

    fn add_grads(&self, dy: &Tensor) -> Result<()> {
        if self.dims.t == 0 {
            return Ok(());
        }
        on_device!("linear", dy, {
            cpu => self.add_grad_w_cpu(dy)?,
            cuda => {
                if let (Some(sink), Some(x)) = (self.w.sink(), &self.input) {
                    let (dw, accumulate) = sink.grad_to_write()?;
                    cuda::grad_w(dy, &x.get()?, self.factor, (&dw, accumulate), self.dims)?;
                }
            },
        });
        match self.bias.as_ref().and_then(Weight::sink) {
            Some(sink) => add_grad_bias(dy, sink),
            None => Ok(()),
        }
    }

    fn add_grad_w_cpu(&self, dy: &Tensor) -> Result<()> {
        if let (Some(sink), Some(x)) = (self.w.sink(), &self.input) {
            let (x, dy) = (x.get()?, host("linear", dy)?);
            let x = host("linear", &x)?;
            let (x, dy) = (x.floats()?, dy.floats()?);
            sink.add_or_write("linear", |dw, accumulate| cpu::grad_w(dy, x, dw, accumulate, self.dims))?;
        }
        Ok(())
    }

    #[cfg_attr(
        not(any(feature = "cuda", feature = "emulate")),
        expect(unused_variables, reason = "only CUDA adds to the accumulated gradient")
    )]
    fn grad_x(&self, dy: &Tensor, context: &mut BackwardContext<'_>) -> Result<Option<Tensor>> {
        let Some(shape) = &self.wants_dx else { return Ok(None) };
        let dtype = self.x_dtype;
        on_device!("linear", dy, {
            cpu => {
                let dy = host("linear", dy)?;
                let mut dx = FloatBuf::unwritten(dtype, self.dims.t * self.dims.k)?;
                let (dy, part_rows) = (dy.floats()?, self.w.part_rows());
                self.w.stored()?.with_operand("linear", |w| cpu::grad_x(dy, w, &part_rows, dx.view(), self.dims))?;
                Ok(Some(storage::tensor(dx, shape.as_slice())))
            },
            cuda => {
                let sum = context.accumulated(0, dtype, shape)?;
                let terms = cuda::GemmTerms { factor: self.factor, plus: sum.as_ref(), bias: None };
                let dx = cuda::grad_x(dy, &self.w.stored()?.dense(dtype)?, terms, dtype, self.dims)?;
                Ok(Some(dx.into_tensor(shape.as_slice())))
            },
        })
    }
}

/// Returns the sizes of a linear layer. Fails if the dtypes or shapes of input, weight and bias do not match.
pub(crate) fn check(op: &str, x: &Tensor, w: &Weight, bias: Option<&Weight>) -> Result<Dims> {
    check_dtype(op, "the input", x.dtype())?;
    if w.is_dense() {
        check_dtype(op, "the weight", w.dtype())?;
    }
    let (Some(&k), &[n, _]) = (x.dims().last(), w.dims()) else {
        bail!("{op}: want an input [.., k] and a weight [n, k], got {:?} and {:?}", x.dims(), w.dims())
    };
    w.check(op, &[n, k])?;
    if let Some(bias) = bias {
        check_dtype(op, "the bias", bias.dtype())?;
        bias.check(&format!("{op} (bias)"), &[n])?;
    }
    let t = x.dims()[..x.rank() - 1].iter().product();
    Ok(Dims { t, n, k })
}
