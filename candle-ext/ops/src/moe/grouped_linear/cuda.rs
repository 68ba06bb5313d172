//! `grouped_linear` on CUDA: launches of `grouped.cuh`. Sizes of groups stay on the device.

use candle_core::{Result, Tensor};

use crate::cuda::{Arg, Out, address, gpu, same_dtype, suffix};
use crate::gemm::Accumulate;
use crate::moe::KERNELS;
use crate::weight_matmul::Dims;

const OP: &str = "grouped_linear";
/// Rows and columns of an output tile.
const SIDE: usize = 64;
const THREADS: usize = 256;

/// Returns y = x w^T, group by group.
pub(super) fn forward(x: &Tensor, w: &Tensor, offsets: &Tensor, dims: Dims) -> Result<Tensor> {
    multiply("grouped_forward", x, w, offsets, [dims.t, dims.n, dims.k])
}

/// Returns dx = dy w, group by group.
pub(super) fn grad_x(dy: &Tensor, w: &Tensor, offsets: &Tensor, dims: Dims) -> Result<Tensor> {
    multiply("grouped_grad_x", dy, w, offsets, [dims.t, dims.k, dims.n])
}

/// Multiplies a [n, terms] with the weights of its groups, into [n, columns].
fn multiply(name: &str, a: &Tensor, w: &Tensor, offsets: &Tensor, sizes: [usize; 3]) -> Result<Tensor> {
    same_dtype(OP, a, w)?;
    let (on, e) = (gpu(OP, a)?, offsets.elem_count() - 1);
    let [n, columns, terms] = sizes;
    let y = Out::new(on, a.dtype(), n * columns)?;
    let addresses = [address(OP, a)?, address(OP, w)?, address(OP, offsets)?, y.address];
    let sizes = [n, e, columns, terms].map(|size| Arg::I32(size as i32));
    let args = [&addresses.map(Arg::Address)[..], &sizes].concat();
    let name = format!("{name}_{}", suffix(OP, a.dtype())?);
    // Each group, and the rows after the last, may have one tile that is not full.
    let grid = [n / SIDE + e + 1, columns.div_ceil(SIDE), 1];
    // SAFETY: a has n rows of `terms` elements, w a matrix of terms * columns elements per group, y n rows; offsets [e + 1]
    // are at most n.
    unsafe { KERNELS.launch(on, &name, grid, THREADS, &args)? };
    Ok(y.into_tensor((n, columns)))
}

/// Computes dw = [dw +] dy^T x of each group.
pub(super) fn grad_w(
    dy: &Tensor,
    x: &Tensor,
    offsets: &Tensor,
    (dw, accumulate): (&Tensor, Accumulate),
    dims: Dims,
) -> Result<()> {
    let (on, e) = (gpu(OP, x)?, offsets.elem_count() - 1);
    let addresses = [address(OP, dy)?, address(OP, x)?, address(OP, offsets)?, address(OP, dw)?];
    let overwrites = i32::from(accumulate == Accumulate::Overwrite);
    let sizes = [Arg::I32(dims.n as i32), Arg::I32(dims.k as i32), Arg::I32(overwrites)];
    let args = [&addresses.map(Arg::Address)[..], &sizes].concat();
    let name = format!("grouped_grad_w_{}_{}", suffix(OP, x.dtype())?, suffix(OP, dw.dtype())?);
    let grid = [dims.k.div_ceil(SIDE), dims.n.div_ceil(SIDE), e];
    // SAFETY: dy and x have t rows of n and k elements, dw n * k elements per group.
    unsafe { KERNELS.launch(on, &name, grid, THREADS, &args) }
}
