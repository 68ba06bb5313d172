//! RMSNorm: y = x / sqrt(mean(x^2) + eps) * w over the last dim, optionally fused with a residual addition.
//!
//! t rows (all leading dims), d elements

pub(crate) mod cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;

use candle_core::{DType, Result, Tensor, bail};

use crate::add;
use crate::backward::BackwardContext;
use crate::cost::{Cost, bytes};
use crate::device::on_device;
use crate::floats::{FloatBuf, check_dtype};
#[cfg(any(feature = "cuda", feature = "emulate"))]
use crate::recording::recompute_norm_with;
use crate::recording::{recompute_with, record, requires_grad};
#[cfg(any(feature = "cuda", feature = "emulate"))]
use crate::saved::NormInputs;
use crate::span::span;
use crate::storage::{self, host};
#[cfg(any(feature = "cuda", feature = "emulate"))]
use crate::weight::GradSink;
use crate::weight::Weight;

/// An RMSNorm: of x, or of the sum of x and another tensor.
#[derive(Clone, Copy)]
pub struct NormCall<'a> {
    /// Input [.., d].
    pub x: &'a Tensor,
    /// Addend of the input, in the norm's dtype.
    pub plus: Option<&'a Tensor>,
    /// Weight [d].
    pub weight: &'a Weight,
    /// Epsilon under the root.
    pub eps: f64,
}

/// A norm whose output kernels compute where they quantize it.
#[cfg(any(feature = "cuda", feature = "emulate"))]
pub(crate) struct UnwrittenNorm {
    /// Input of the norm: x, or the sum.
    pub(crate) stream: Tensor,
    /// Output of the norm on the tape. Its elements are those of the input, so that no op may read them.
    pub(crate) y: Tensor,
    pub(crate) inputs: NormInputs,
}

/// Computes y = x / sqrt(mean(x^2) + eps) * w over the last dim, with f32 sums.
///
/// y has x's dtype, or w's if x is f32: the norm of an f32 residual stream has the dtype in which the layers compute.
///
/// The normalised x is rounded to x's dtype before the multiplication by w, as in transformers.
///
/// With n = x r, r = 1 / sqrt(mean(x^2) + eps) and g = dy w: dw += sum(dy n), dx = r (g - n mean(g n)).
pub fn rms_norm(x: &Tensor, w: &Weight, eps: f64) -> Result<Tensor> {
    let _span = span("rms_norm", "forward");
    let d = check(x, w)?;
    let input = x.contiguous()?;
    let eps = eps as f32;
    let (y, rstd) = forward(&input, w, d, eps)?;
    Ok(record_norm(x, input, w, (y, rstd), eps))
}

/// Returns [`add`](crate::add()) of a and b, and [`rms_norm`] of the sum. The bits equal those of the two separate ops.
///
/// b has the norm's dtype.
pub fn add_rms_norm(a: &Tensor, b: &Tensor, w: &Weight, eps: f64) -> Result<(Tensor, Tensor)> {
    let _span = span("add_rms_norm", "forward");
    add::check(a, b)?;
    let (d, eps) = (check(a, w)?, eps as f32);
    let dtype = output_dtype(a, w);
    if b.dtype() != dtype {
        bail!("add_rms_norm: the second input is {:?}, want {dtype:?}, the dtype of the norm", b.dtype())
    }
    let (left, right, weight) = (a.contiguous()?, b.contiguous()?, w.value()?);
    let (sum, y, rstd) = on_device!("add_rms_norm", left, {
        cpu => {
            let buffer = |dtype| FloatBuf::unwritten(dtype, a.elem_count());
            let (mut sum, mut y) = (buffer(a.dtype())?, buffer(dtype)?);
            let (left, right, weight) = (host("add_rms_norm", &left)?, host("add_rms_norm", &right)?, host("add_rms_norm", &weight)?);
            cpu::add_forward([left.floats()?, right.floats()?], weight.floats()?, [sum.view(), y.view()], d, eps);
            (storage::tensor(sum, a.shape()), storage::tensor(y, a.shape()), None)
        },
        cuda => {
            let (sum, y, rstd) = cuda::add_forward(&left, &right, &weight, d, eps)?;
            (sum.into_tensor(a.shape()), y.into_tensor(a.shape()), Some(rstd))
        },
    });
    let sum = add::record_sum(a, b, sum);
    let y = record_norm(&sum, sum.clone(), w, (y, rstd), eps);
    Ok((sum, y))
}

#[cfg(any(feature = "cuda", feature = "emulate"))]
impl NormCall<'_> {
    /// Records the norm, without its output. x, the addend and the weight have one dtype.
    pub(crate) fn unwritten(self) -> Result<UnwrittenNorm> {
        let Self { x, plus, weight, eps } = self;
        let _span = span("rms_norm", "forward");
        let (d, eps) = (check(x, weight)?, eps as f32);
        let (input, w) = (x.contiguous()?, weight.value()?);
        let (stream, input, rstd) = match plus {
            None => {
                let rstd = cuda::row_factors(&input, &w, d, eps)?;
                (x.clone(), input, rstd)
            }
            Some(plus) => {
                add::check(x, plus)?;
                let (sum, rstd) = cuda::add_row_factors(&input, &plus.contiguous()?, &w, d, eps)?;
                let sum = add::record_sum(x, plus, sum.into_tensor(x.shape()));
                (sum.clone(), sum, rstd)
            }
        };
        // A new tensor without memory of its own.
        let y = input.reshape(input.shape())?;
        let inputs = NormInputs { x: input.clone(), rstd: rstd.clone(), weight: weight.clone() };
        let y = record_norm(&stream, input, weight, (y, Some(rstd)), eps);
        Ok(UnwrittenNorm { stream, y, inputs })
    }
}

/// Returns the cost of a forward with `n_elements` elements: x is saved, y is recomputed.
pub fn rms_norm_cost(n_elements: u64, dtype: DType) -> Cost {
    Cost { saved_bytes: bytes(n_elements, dtype), ..Cost::default() }
}

/// Records the norm y of x; `input` is x, contiguous.
fn record_norm(x: &Tensor, input: Tensor, w: &Weight, (y, rstd): (Tensor, Option<Tensor>), eps: f32) -> Tensor {
    let (saved, weight) = (input.clone(), w.clone());
    let compute = move || Ok(forward(&saved, &weight, weight.dims()[0], eps)?.0);
    match &rstd {
        #[cfg(any(feature = "cuda", feature = "emulate"))]
        Some(rstd) if input.dtype() == y.dtype() => {
            let norm = NormInputs { x: input.clone(), rstd: rstd.clone(), weight: w.clone() };
            recompute_norm_with(&y, norm, compute);
        }
        _ => recompute_with(&y, compute),
    }
    let (weight, wants_dx) = (w.clone(), requires_grad(x));
    record("rms_norm", [x.into(), w.into()], y, move |dy, context| {
        let saved = SavedNorm { input: &input, weight: &weight, rstd: rstd.as_ref(), eps };
        let context = wants_dx.then_some(context);
        Ok([saved.backward(dy, context)?, None])
    })
}

/// Returns y, and on CUDA rstd = 1 / sqrt(mean(x^2) + eps) of each row.
fn forward(x: &Tensor, w: &Weight, d: usize, eps: f32) -> Result<(Tensor, Option<Tensor>)> {
    on_device!("rms_norm", x, {
        cpu => {
            let mut y = FloatBuf::unwritten(output_dtype(x, w), x.elem_count())?;
            let w = w.value()?;
            let (x_host, w) = (host("rms_norm", x)?, host("rms_norm", &w)?);
            cpu::forward(x_host.floats()?, w.floats()?, y.view(), d, eps);
            Ok((storage::tensor(y, x.shape()), None))
        },
        cuda => {
            let (y, rstd) = cuda::forward(x, &w.value()?, d, eps)?;
            Ok((y.into_tensor(x.shape()), Some(rstd)))
        },
    })
}

struct SavedNorm<'a> {
    input: &'a Tensor,
    weight: &'a Weight,
    /// rstd = 1 / sqrt(mean(x^2) + eps) of each row; saved on CUDA only.
    #[cfg_attr(not(any(feature = "cuda", feature = "emulate")), expect(dead_code, reason = "only CUDA reads it"))]
    rstd: Option<&'a Tensor>,
    eps: f32,
}

impl SavedNorm<'_> {
    /// Adds dw to its sink and returns dx plus x's accumulated gradient. Without a context dx is not computed.
    fn backward(&self, dy: &Tensor, context: Option<&mut BackwardContext<'_>>) -> Result<Option<Tensor>> {
        on_device!("rms_norm", dy, {
            cpu => self.backward_cpu(dy, context),
            cuda => {
                let Some(rstd) = self.rstd else { bail!("rms_norm: the forward was on another device") };
                let dw = self.weight.sink().map(GradSink::grad).transpose()?;
                let wants_dx = context.is_some();
                if dw.is_none() && !wants_dx {
                    return Ok(None);
                }
                let plus = self.accumulated(context)?;
                cuda::backward([self.input, &self.weight.value()?, dy, rstd], plus.as_ref(), dw.as_ref(), wants_dx)
            },
        })
    }

    fn accumulated(&self, context: Option<&mut BackwardContext<'_>>) -> Result<Option<Tensor>> {
        context.map_or(Ok(None), |context| context.accumulated(0, self.input.dtype(), self.input.dims()))
    }

    fn backward_cpu(&self, dy: &Tensor, context: Option<&mut BackwardContext<'_>>) -> Result<Option<Tensor>> {
        let w = self.weight.value()?;
        let (x, w) = (host("rms_norm", self.input)?, host("rms_norm", &w)?);
        let dy = host("rms_norm", dy)?;
        let (x, w, dy) = (x.floats()?, w.floats()?, dy.floats()?);
        if let Some(sink) = self.weight.sink() {
            sink.add("rms_norm", |dw| cpu::add_grad_w(x, dy, dw, self.eps))?;
        }
        if context.is_none() {
            return Ok(None);
        }
        let mut dx = FloatBuf::unwritten(self.input.dtype(), self.input.elem_count())?;
        let plus = self.accumulated(context)?;
        let plus = plus.as_ref().map(|plus| host("rms_norm", plus)).transpose()?;
        let plus = plus.as_ref().map(|plus| plus.floats()).transpose()?;
        cpu::grad_x([x, w, dy], plus, dx.view(), self.eps);
        Ok(Some(storage::tensor(dx, self.input.shape())))
    }
}

/// Returns the dtype of the norm of x.
fn output_dtype(x: &Tensor, w: &Weight) -> DType {
    if x.dtype() == DType::F32 { w.dtype() } else { x.dtype() }
}

fn check(x: &Tensor, w: &Weight) -> Result<usize> {
    check_dtype("rms_norm", "the input", x.dtype())?;
    check_dtype("rms_norm", "the weight", w.dtype())?;
    let Some(&d) = x.dims().last().filter(|&&d| d > 0) else {
        bail!("rms_norm: want an input [.., d], got {:?}", x.dims())
    };
    w.check("rms_norm", &[d])?;
    Ok(d)
}
