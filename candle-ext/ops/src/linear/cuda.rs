//! `linear` on CUDA: matmuls by cuBLASLt, bias gradient by `kernel.cu`.

use candle_core::{DType, Result, Tensor, bail};

use crate::cuda::gemm::{Gemm, Matrix};
use crate::cuda::{DeviceAddress, Out, address, columns, gpu, kernels, same_dtype};
use crate::gemm::Accumulate;
use crate::gemm_output::with_output;
use crate::weight_matmul::Dims;

kernels!("linear");

const OP: &str = "linear";

/// Terms of a matmul besides its operands: factor * a b + plus + bias, rounded once.
#[derive(Clone, Copy)]
pub(super) struct GemmTerms<'a> {
    pub(super) factor: f32,
    /// Addend of the output's shape and dtype.
    pub(super) plus: Option<&'a Tensor>,
    /// Bias row, which only the forward has.
    pub(super) bias: Option<&'a Tensor>,
}

impl<'a> GemmTerms<'a> {
    /// The matmul alone.
    pub(super) const NONE: Self = Self { factor: 1.0, plus: None, bias: None };

    fn plus(&self) -> Result<Option<DeviceAddress>> {
        self.plus.map(|plus| address(OP, plus)).transpose()
    }
}

/// Returns y = factor * x w^T + plus + bias in `out_dtype`.
pub(super) fn forward(x: &Tensor, w: &Tensor, terms: GemmTerms<'_>, out_dtype: DType, dims: Dims) -> Result<Out> {
    same_dtype(OP, x, w)?;
    let bias = terms.bias;
    if let Some(bias) = bias.filter(|bias| bias.dtype() != out_dtype) {
        bail!("{OP}: on CUDA the bias must have the output's dtype {out_dtype:?}, not {:?}", bias.dtype())
    }
    let on = gpu(OP, x)?;
    let y = Out::new(on, out_dtype, dims.t * dims.n)?;
    let gemm = Gemm {
        a: Matrix::plain(address(OP, x)?),
        b: Matrix::transposed(address(OP, w)?),
        c: y.address,
        c_dtype: out_dtype,
        factor: terms.factor,
        plus: terms.plus()?,
        bias: bias.map(|bias| address(OP, bias)).transpose()?,
        ..Gemm::new([dims.t, dims.n, dims.k], x.dtype())
    };
    // SAFETY: x is [t, k], w [n, k], the bias [n], the addend [t, n] in the output's dtype, y a new [t, n].
    unsafe { gemm.run(on)? };
    Ok(y)
}

/// Adds x w^T to n columns of `base`, in place.
pub(super) fn add_to_columns(x: &Tensor, w: &Tensor, (base, first): (&Tensor, usize), dims: Dims) -> Result<()> {
    same_dtype(OP, x, w)?;
    let c = address(OP, base)? + (first * base.dtype().size_in_bytes()) as DeviceAddress;
    let gemm = Gemm {
        a: Matrix::plain(address(OP, x)?),
        b: Matrix::transposed(address(OP, w)?),
        c,
        c_stride: Some(base.dim(1)?),
        plus: Some(c),
        ..Gemm::new([dims.t, dims.n, dims.k], x.dtype())
    };
    // SAFETY: x is [t, k], w [n, k]; the caller has checked that base has t rows with n columns from `first` on.
    unsafe { gemm.run(gpu(OP, x)?) }
}

/// Returns a tensor [.., n] as an operand. Its rows may be columns of a wider matrix.
fn operand(x: &Tensor) -> Result<Matrix> {
    if x.is_contiguous() {
        return Ok(Matrix::plain(address(OP, x)?));
    }
    match x.stride() {
        &[stride, 1] => Ok(Matrix::plain(address(OP, &x.narrow(0, 0, 1)?)?).with_row_stride(stride)),
        strides => bail!("{OP}: want contiguous rows, got strides {strides:?}"),
    }
}

/// Returns dx = factor * dy w + plus.
pub(super) fn grad_x(dy: &Tensor, w: &Tensor, terms: GemmTerms<'_>, dtype: DType, dims: Dims) -> Result<Out> {
    let dy = dy.to_dtype(dtype)?;
    same_dtype(OP, &dy, w)?;
    let on = gpu(OP, &dy)?;
    let dx = Out::new(on, dtype, dims.t * dims.k)?;
    let gemm = Gemm {
        a: operand(&dy)?,
        b: Matrix::plain(address(OP, w)?),
        c: dx.address,
        factor: terms.factor,
        plus: terms.plus()?,
        ..Gemm::new([dims.t, dims.k, dims.n], dtype)
    };
    // SAFETY: dy is [t, n], w [n, k], the sum [t, k], dx a new [t, k].
    unsafe { gemm.run(on)? };
    Ok(dx)
}

/// Computes dw = [dw +] factor * dy^T x for at least one token.
pub(super) fn grad_w(
    dy: &Tensor,
    x: &Tensor,
    factor: f32,
    (dw, accumulate): (&Tensor, Accumulate),
    dims: Dims,
) -> Result<()> {
    let dy = dy.to_dtype(x.dtype())?;
    with_output(x.dtype(), dw, |dw| {
        let gemm = Gemm {
            a: Matrix { is_transposed: true, ..operand(&dy)? },
            b: Matrix::plain(address(OP, x)?),
            c: address(OP, dw)?,
            c_dtype: dw.dtype(),
            factor,
            plus: (accumulate == Accumulate::Add).then(|| address(OP, dw)).transpose()?,
            ..Gemm::new([dims.n, dims.k, dims.t], x.dtype())
        };
        // SAFETY: dy is [t, n], x [t, k], dw a gradient [n, k].
        unsafe { gemm.run(gpu(OP, x)?) }
    })
}

/// Adds the sum of dy over rows to db.
pub(super) fn add_grad_bias(dy: &Tensor, db: &Tensor) -> Result<()> {
    let n = db.elem_count();
    // SAFETY: dy has rows of n elements.
    unsafe { columns::add_sums(&KERNELS, gpu(OP, dy)?, dy, [dy.elem_count() / n.max(1), n], db) }
}
