//! `linear` on CUDA: matmuls by cuBLASLt, bias gradient by `kernel.cu`.

use candle_core::{DType, Result, Tensor, bail};

use crate::cuda::gemm::{Gemm, Matrix};
use crate::cuda::{Out, address, columns, gpu, kernels, same_dtype};
use crate::gemm::Accumulate;
use crate::gemm_output::with_output;
use crate::weight_matmul::Dims;

kernels!("linear");

const OP: &str = "linear";

/// Returns y = x w^T + b in `out_dtype`.
pub(super) fn forward(x: &Tensor, w: &Tensor, bias: Option<&Tensor>, out_dtype: DType, dims: Dims) -> Result<Out> {
    same_dtype(OP, x, w)?;
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
        bias: bias.map(|bias| address(OP, bias)).transpose()?,
        ..Gemm::new([dims.t, dims.n, dims.k], x.dtype())
    };
    // SAFETY: x is [t, k], w [n, k], the bias [n], y a new [t, n].
    unsafe { gemm.run(on)? };
    Ok(y)
}

/// Returns dx = dy w, plus a `sum` of the same shape and dtype.
pub(super) fn grad_x(dy: &Tensor, w: &Tensor, sum: Option<&Tensor>, dtype: DType, dims: Dims) -> Result<Out> {
    let dy = dy.to_dtype(dtype)?;
    same_dtype(OP, &dy, w)?;
    let on = gpu(OP, &dy)?;
    let dx = Out::new(on, dtype, dims.t * dims.k)?;
    let gemm = Gemm {
        a: Matrix::plain(address(OP, &dy)?),
        b: Matrix::plain(address(OP, w)?),
        c: dx.address,
        plus: sum.map(|sum| address(OP, sum)).transpose()?,
        ..Gemm::new([dims.t, dims.k, dims.n], dtype)
    };
    // SAFETY: dy is [t, n], w [n, k], the sum [t, k], dx a new [t, k].
    unsafe { gemm.run(on)? };
    Ok(dx)
}

/// Computes dw = [dw +] dy^T x for at least one token.
pub(super) fn grad_w(dy: &Tensor, x: &Tensor, (dw, accumulate): (&Tensor, Accumulate), dims: Dims) -> Result<()> {
    let dy = dy.to_dtype(x.dtype())?;
    with_output(x.dtype(), dw, |dw| {
        let gemm = Gemm {
            a: Matrix::transposed(address(OP, &dy)?),
            b: Matrix::plain(address(OP, x)?),
            c: address(OP, dw)?,
            c_dtype: dw.dtype(),
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
