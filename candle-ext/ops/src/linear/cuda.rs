//! `linear` on CUDA: cuBLASLt's products, and our kernel for the bias gradient.

use candle_core::{DType, Result, Tensor, bail};

use crate::cuda::gemm::{Gemm, Matrix};
use crate::cuda::{Arg, Out, address, gpu, kernels, same_dtype, suffix};
use crate::product::Dims;

kernels!("linear");

const OP: &str = "linear";
const WARP: usize = 32;
const THREADS: usize = 256;

/// Parts of the rows whose sums are added one after another: fixed, so that the result is the same every time.
const PARTS: usize = 16;

/// y = x w^T + b in `out_dtype`
pub(super) fn forward(x: &Tensor, w: &Tensor, bias: Option<&Tensor>, out_dtype: DType, dims: Dims) -> Result<Out> {
    same_dtype(OP, x, w)?;
    if let Some(bias) = bias.filter(|bias| bias.dtype() != out_dtype) {
        bail!("{OP}: on CUDA the bias must have the output's format {out_dtype:?}, not {:?}", bias.dtype())
    }
    let on = gpu(OP, x)?;
    let y = Out::new(on, out_dtype, dims.t * dims.n)?;
    let gemm = Gemm {
        m: dims.t,
        n: dims.n,
        k: dims.k,
        a: Matrix::plain(address(OP, x)?),
        b: Matrix::transposed(address(OP, w)?),
        dtype: x.dtype(),
        c: y.address,
        c_dtype: out_dtype,
        accumulate: false,
        bias: bias.map(|bias| address(OP, bias)).transpose()?,
    };
    // SAFETY: x is [t, k], w [n, k], the bias [n], y a new [t, n].
    unsafe { gemm.run(on)? };
    Ok(y)
}

/// dx = dy w
pub(super) fn grad_x(dy: &Tensor, w: &Tensor, dtype: DType, dims: Dims) -> Result<Out> {
    let dy = dy.to_dtype(dtype)?;
    same_dtype(OP, &dy, w)?;
    let on = gpu(OP, &dy)?;
    let dx = Out::new(on, dtype, dims.t * dims.k)?;
    let gemm = Gemm {
        m: dims.t,
        n: dims.k,
        k: dims.n,
        a: Matrix::plain(address(OP, &dy)?),
        b: Matrix::plain(address(OP, w)?),
        dtype,
        c: dx.address,
        c_dtype: dtype,
        accumulate: false,
        bias: None,
    };
    // SAFETY: dy is [t, n], w [n, k], dx a new [t, k].
    unsafe { gemm.run(on)? };
    Ok(dx)
}

/// dw += dy^T x
pub(super) fn add_grad_w(dy: &Tensor, x: &Tensor, dw: &Tensor, dims: Dims) -> Result<()> {
    let dy = dy.to_dtype(x.dtype())?;
    let gemm = Gemm {
        m: dims.n,
        n: dims.k,
        k: dims.t,
        a: Matrix::transposed(address(OP, &dy)?),
        b: Matrix::plain(address(OP, x)?),
        dtype: x.dtype(),
        c: address(OP, dw)?,
        c_dtype: DType::F32,
        accumulate: true,
        bias: None,
    };
    // SAFETY: dy is [t, n], x [t, k], dw a gradient [n, k] in f32.
    unsafe { gemm.run(gpu(OP, x)?) }
}

/// db += the sum of dy over rows
pub(super) fn add_grad_bias(dy: &Tensor, db: &Tensor, dims: Dims) -> Result<()> {
    let (on, n) = (gpu(OP, dy)?, dims.n);
    let partial = Out::new(on, DType::F32, PARTS * n)?;
    let args =
        [Arg::Address(address(OP, dy)?), Arg::Address(partial.address), Arg::I32(dims.t as i32), Arg::I32(n as i32)];
    let name = format!("partial_sums_{}", suffix(OP, dy.dtype())?);
    // SAFETY: dy has t rows of n elements, partial PARTS.
    unsafe { KERNELS.launch(on, &name, [n.div_ceil(WARP), PARTS, 1], THREADS, &args)? };
    let args =
        [Arg::Address(partial.address), Arg::Address(address(OP, db)?), Arg::I32(PARTS as i32), Arg::I32(n as i32)];
    // SAFETY: partial has PARTS rows of n elements, db one.
    unsafe { KERNELS.launch(on, "add_parts", [n.div_ceil(THREADS), 1, 1], THREADS, &args) }
}
