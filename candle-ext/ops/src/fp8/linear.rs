//! Linear layer in FP8: both operands of each matmul are quantized, sums are f32.
//!
//! y = Q(x) Q(w)^T + b, dx = Q(dy) Q(w), dw = Q(dy)^T Q(x). t tokens, k inputs, n outputs.

use candle_core::{DType, Result, Tensor};
use half::bf16;

#[cfg(any(feature = "cuda", feature = "emulate"))]
use super::cuda;
use super::layers::Fp8Linear;
use super::matrix::{Fp8Host, Fp8Matrix};
use super::operands::Fp8Operands;
use super::recipe::Fp8Orientation;
use crate::backward::BackwardContext;
use crate::device::on_device;
use crate::floats::{FloatBuf, Floats, FloatsMut};
use crate::gemm::{Accumulate, Mat, Output, Threads, gemm_bf16};
use crate::linear::bias::add_grad_bias;
use crate::linear::cpu::token_blocks;
use crate::recording::{bytes_of_saving, record, requires_grad, save};
use crate::saved::Saved;
use crate::storage::{self, host};
use crate::weight::{GradSink, Weight};
use crate::weight_matmul::{self, Dims, WeightOperand};

struct SavedFp8Linear {
    layer: Fp8Linear,
    /// Input, saved for the gradient of a trainable weight.
    input: Option<SavedFp8Input>,
    /// Dtype and shape of the input; `None` if its gradient is not needed.
    wants_dx: Option<(DType, Vec<usize>)>,
    w: Weight,
    bias: Option<Weight>,
    dims: Dims,
}

/// Input of a layer between forward and backward.
enum SavedFp8Input {
    /// Input that is recomputed, or that other ops save, too. Its codes would take memory, so backward quantizes it again.
    Unquantized(Saved),
    /// Codes of an input that no other op saves.
    Codes(Fp8Operands),
}

/// A linear layer apart from its input. The caller has checked dtypes and shapes.
#[derive(Clone, Copy)]
pub(crate) struct Fp8LinearCall<'a> {
    pub(crate) w: &'a Weight,
    pub(crate) bias: Option<&'a Weight>,
    pub(crate) layer: &'a Fp8Linear,
    pub(crate) out_dtype: DType,
    pub(crate) dims: Dims,
}

/// Computes y = Q(x) Q(w)^T + b.
pub(crate) fn fp8_linear(x: &Tensor, call: Fp8LinearCall<'_>) -> Result<Tensor> {
    let of_input = if call.saves_codes(x) { Fp8Orientation::Both } else { Fp8Orientation::Rowwise };
    call.multiply(x, call.layer.input(x, of_input)?)
}

impl Fp8LinearCall<'_> {
    /// Returns true if backward reads the codes of x that forward has made.
    fn saves_codes(&self, x: &Tensor) -> bool {
        self.w.sink().is_some() && bytes_of_saving(x) > 0
    }

    /// Computes y from the codes of x.
    pub(super) fn multiply(self, x: &Tensor, quantized: Fp8Operands) -> Result<Tensor> {
        let Self { w, bias, layer, out_dtype, dims } = self;
        on_device!("linear", x, {
            cpu => (),
            cuda => cuda::check_sizes(layer.module(), dims)?,
        });
        let is_read_in_backward = w.sink().is_some() || requires_grad(x);
        let of_weight = if is_read_in_backward { Fp8Orientation::Both } else { Fp8Orientation::Rowwise };
        let weight = quantized_weight(layer, w, of_weight)?;
        let (x_rows, w_rows) = (quantized.rowwise()?, weight.rowwise()?);
        let mut shape = x.dims().to_vec();
        if let Some(last) = shape.last_mut() {
            *last = dims.n;
        }
        let y = on_device!("linear", x, {
            cpu => storage::tensor(forward_cpu(x_rows, w_rows, bias, out_dtype, dims)?, shape),
            cuda => {
                let bias = bias.map(Weight::value).transpose()?;
                cuda::forward(x_rows, w_rows, bias.as_ref(), out_dtype, dims)?.reshape(shape)?
            },
        });
        let saved = SavedFp8Linear {
            layer: layer.clone(),
            input: w.sink().map(|_| match self.saves_codes(x) {
                true => SavedFp8Input::Codes(quantized.into_columnwise()),
                false => SavedFp8Input::Unquantized(save(x)),
            }),
            wants_dx: requires_grad(x).then(|| (x.dtype(), x.dims().to_vec())),
            w: w.clone(),
            bias: bias.cloned(),
            dims,
        };
        Ok(record("linear", [x.into(), w.into(), bias.unwrap_or(w).into()], y, move |dy, context| {
            Ok([saved.backward(dy, context)?, None, None])
        }))
    }
}

impl SavedFp8Linear {
    /// Quantizes dy once, adds dw and db to their sinks and returns dx. Computes dx first if an exchange waits for it.
    fn backward(self, dy: &Tensor, context: &mut BackwardContext<'_>) -> Result<Option<Tensor>> {
        if self.dims.t == 0 {
            return self.wants_dx.map(|(dtype, shape)| Tensor::zeros(shape, dtype, dy.device())).transpose();
        }
        let orientation = match (&self.wants_dx, &self.input) {
            (Some(_), Some(_)) => Fp8Orientation::Both,
            (None, Some(_)) => Fp8Orientation::Columnwise,
            (_, None) => Fp8Orientation::Rowwise,
        };
        let quantized = self.layer.grad_output(dy, orientation)?;
        if !context.defers() {
            self.add_grads(dy, &quantized)?;
            return self.grad_x(&quantized, context);
        }
        let (dx, dy) = (self.grad_x(&quantized, context)?, dy.clone());
        context.defer(move || self.add_grads(&dy, &quantized))?;
        Ok(dx)
    }

    fn add_grads(&self, dy: &Tensor, quantized: &Fp8Operands) -> Result<()> {
        if let (Some(sink), Some(input)) = (self.w.sink(), &self.input) {
            let x = match input {
                SavedFp8Input::Codes(codes) => codes.clone(),
                SavedFp8Input::Unquantized(input) => on_device!("linear", dy, {
                    cpu => self.layer.saved_input(input, Fp8Orientation::Columnwise)?,
                    cuda => self.layer.saved_input_on_gpu(input, Fp8Orientation::Columnwise)?,
                }),
            };
            let (x, dy) = (x.columnwise()?, quantized.columnwise()?);
            on_device!("linear", dy.codes, {
                cpu => grad_w_cpu(dy, x, sink, self.dims)?,
                cuda => {
                    let (dw, accumulate) = sink.grad_to_write()?;
                    cuda::grad_w(dy, x, (&dw, accumulate), self.dims)?;
                },
            });
        }
        match self.bias.as_ref().and_then(Weight::sink) {
            Some(sink) => add_grad_bias(dy, sink),
            None => Ok(()),
        }
    }

    #[cfg_attr(
        not(any(feature = "cuda", feature = "emulate")),
        expect(unused_variables, reason = "only CUDA adds to the accumulated gradient")
    )]
    fn grad_x(&self, dy: &Fp8Operands, context: &mut BackwardContext<'_>) -> Result<Option<Tensor>> {
        let Some((dtype, shape)) = &self.wants_dx else { return Ok(None) };
        let w = quantized_weight(&self.layer, &self.w, Fp8Orientation::Columnwise)?;
        let (dy, w) = (dy.rowwise()?, w.columnwise()?);
        on_device!("linear", dy.codes, {
            cpu => Ok(Some(storage::tensor(grad_x_cpu(dy, w, *dtype, self.dims)?, shape.as_slice()))),
            cuda => {
                let sum = match cuda::adds_to_sum(dy, self.dims) {
                    true => context.accumulated(0, *dtype, shape)?,
                    false => None,
                };
                Ok(Some(cuda::grad_x(dy, w, sum.as_ref(), *dtype, self.dims)?.reshape(shape.as_slice())?))
            },
        })
    }
}

/// Returns the quantized weight, from the copy in its buffer if there is one.
pub(super) fn quantized_weight(layer: &Fp8Linear, w: &Weight, orientation: Fp8Orientation) -> Result<Fp8Operands> {
    w.fp8_copy(|copy| copy.for_matmuls(orientation), |stored| layer.quantized_weight(stored, orientation))
}

fn forward_cpu(x: &Fp8Matrix, w: &Fp8Matrix, bias: Option<&Weight>, out_dtype: DType, dims: Dims) -> Result<FloatBuf> {
    let mut y = FloatBuf::unwritten(out_dtype, dims.t * dims.n)?;
    let (x, w) = (Fp8Host::lock(x)?, Fp8Host::lock(w)?);
    let bias_dtype = bias.map_or(out_dtype, Weight::dtype);
    if let Some(exact) = Bf16Operands::exact(&x, &w)?.filter(|_| out_dtype != DType::F16 && bias_dtype == out_dtype) {
        let accumulate = match bias.map(Weight::value).transpose()? {
            Some(bias) => {
                let bias = host("linear", &bias)?;
                repeat_row(bias.floats()?, y.view());
                Accumulate::Add
            }
            None => Accumulate::Overwrite,
        };
        let (x, w) = (Mat::new(&exact.a, dims.t, dims.k), Mat::new(&exact.b, dims.n, dims.k));
        gemm_bf16(Output::new(y.view(), dims.t, dims.n), accumulate, x, w.t(), exact.factor, Threads::All);
        return Ok(y);
    }
    let ((x, x_factor), (w, w_factor)) = (x.operand()?, w.operand()?);
    let bias = bias.map(Weight::value).transpose()?;
    let bias = bias.as_ref().map(|bias| host("linear", bias)).transpose()?;
    let mut bias_f32 = Vec::new();
    let bias = match &bias {
        Some(bias) => Some(bias.floats()?.widened(&mut bias_f32)),
        None => None,
    };
    let mut x_f32 = Vec::new();
    write_blocks(y.view(), dims.n, dims, |rows, y, dims| {
        let accumulate = match bias {
            Some(bias) => {
                y.chunks_exact_mut(dims.n.max(1)).for_each(|row| row.copy_from_slice(bias));
                Accumulate::Add
            }
            None => Accumulate::Overwrite,
        };
        let x = x.rows(rows).widened(&mut x_f32);
        weight_matmul::forward(x, WeightOperand::Quantized(w), y, accumulate, x_factor * w_factor, dims);
    });
    Ok(y)
}

fn grad_x_cpu(dy: &Fp8Matrix, w: &Fp8Matrix, dtype: DType, dims: Dims) -> Result<FloatBuf> {
    let mut dx = FloatBuf::unwritten(dtype, dims.t * dims.k)?;
    let (dy, w) = (Fp8Host::lock(dy)?, Fp8Host::lock(w)?);
    if let Some(exact) = Bf16Operands::exact(&dy, &w)?.filter(|_| dtype != DType::F16) {
        let (dy, w) = (Mat::new(&exact.a, dims.t, dims.n), Mat::new(&exact.b, dims.n, dims.k));
        gemm_bf16(Output::new(dx.view(), dims.t, dims.k), Accumulate::Overwrite, dy, w, exact.factor, Threads::All);
        return Ok(dx);
    }
    let ((dy, dy_factor), (w, w_factor)) = (dy.operand()?, w.operand()?);
    let mut dy_f32 = Vec::new();
    write_blocks(dx.view(), dims.k, dims, |rows, dx, dims| {
        let dy = dy.rows(rows).widened(&mut dy_f32);
        weight_matmul::grad_x(dy, WeightOperand::Quantized(w), &[dims.n], dx, dy_factor * w_factor, dims);
    });
    Ok(dx)
}

fn grad_w_cpu(dy: &Fp8Matrix, x: &Fp8Matrix, sink: &GradSink, dims: Dims) -> Result<()> {
    let (dy, x) = (Fp8Host::lock(dy)?, Fp8Host::lock(x)?);
    if let Some(exact) = Bf16Operands::exact(&dy, &x)? {
        let (dy, x) = (Mat::new(&exact.a, dims.t, dims.n), Mat::new(&exact.b, dims.t, dims.k));
        return sink.add_or_write("linear", |dw, accumulate| {
            gemm_bf16(Output::new(dw, dims.n, dims.k), accumulate, dy.t(), x, exact.factor, Threads::All);
        });
    }
    let ((dy, dy_factor), (x, x_factor)) = (dy.operand()?, x.operand()?);
    let (mut dy_f32, mut x_f32) = (Vec::new(), Vec::new());
    sink.add_or_write("linear", |dw, accumulate| {
        dw.change_in_f32(accumulate, |dw| {
            for (rows, dims) in token_blocks(dims) {
                let accumulate = if rows.start == 0 { accumulate } else { Accumulate::Add };
                let (dy, x) = (dy.rows(rows.clone()).widened(&mut dy_f32), x.rows(rows).widened(&mut x_f32));
                weight_matmul::grad_w(dy, x, dw, accumulate, dy_factor * x_factor, dims);
            }
        });
    })
}

/// Both operands of a matmul in bf16, and the factor of the sums.
struct Bf16Operands {
    a: Vec<bf16>,
    b: Vec<bf16>,
    factor: f32,
}

impl Bf16Operands {
    /// Returns the operands if every element is exact in bf16.
    ///
    /// The values of codes are exact, also times a power of two. The sums are then those of bf16 units, where a processor
    /// has them.
    fn exact(a: &Fp8Host<'_>, b: &Fp8Host<'_>) -> Result<Option<Self>> {
        let ((a, a_factor), (b, b_factor)) = (a.operand()?, b.operand()?);
        let both = a.try_to_bf16().zip(b.try_to_bf16());
        Ok(both.map(|(a, b)| Self { a, b, factor: a_factor * b_factor }))
    }
}

/// Copies a row into each row of a matrix of the same dtype.
fn repeat_row(row: Floats<'_>, to: FloatsMut<'_>) {
    let mut wide = Vec::new();
    let row = row.widened_here(&mut wide);
    to.chunks(row.len()).into_iter().for_each(|mut to| to.write(0, row));
}

/// Computes an output [t, width] in blocks of tokens, each rounded once if the output is not f32.
fn write_blocks(
    mut out: FloatsMut<'_>,
    width: usize,
    dims: Dims,
    mut compute: impl FnMut(std::ops::Range<usize>, &mut [f32], Dims),
) {
    let mut out_f32 = Vec::new();
    for (rows, dims) in token_blocks(dims) {
        let elements = rows.start * width..rows.end * width;
        if let FloatsMut::F32(out) = &mut out {
            compute(rows, &mut out[elements], dims);
        } else {
            out_f32.resize(dims.t * width, 0.0);
            compute(rows, &mut out_f32, dims);
            out.write(elements.start, &out_f32);
        }
    }
}
