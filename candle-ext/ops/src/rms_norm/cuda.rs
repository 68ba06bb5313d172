//! `rms_norm` on CUDA: launches of `kernel.cu`.

use candle_core::{DType, Result, Tensor};

use crate::cuda::{Arg, Out, address, columns, gpu, kernels, same_dtype, suffix};

kernels!("rms_norm");

const OP: &str = "rms_norm";
const WARP: usize = 32;

/// Threads of a block that computes a row: eight elements each, as far as that goes.
fn row_threads(d: usize) -> usize {
    (d / 8).next_multiple_of(WARP).clamp(WARP, 1024)
}

/// Returns y and 1 / sqrt(mean(x^2) + eps) of each row, f32 [t].
pub(super) fn forward(x: &Tensor, w: &Tensor, d: usize, eps: f32) -> Result<(Out, Tensor)> {
    same_dtype(OP, x, w)?;
    let on = gpu(OP, x)?;
    let t = x.elem_count() / d;
    let (y, rstd) = (Out::new(on, x.dtype(), x.elem_count())?, Out::new(on, DType::F32, t)?);
    let args = [
        Arg::Address(address(OP, x)?),
        Arg::Address(address(OP, w)?),
        Arg::Address(y.address),
        Arg::Address(rstd.address),
        Arg::I32(d as i32),
        Arg::F32(eps),
    ];
    let name = format!("forward_{}", suffix(OP, x.dtype())?);
    // SAFETY: x and y have t rows of d elements, w one, rstd t elements.
    unsafe { KERNELS.launch(on, &name, [t, 1, 1], row_threads(d), &args)? };
    Ok((y, rstd.into_tensor(t)))
}

/// Returns dx.
pub(super) fn grad_x(x: &Tensor, w: &Tensor, dy: &Tensor, rstd: &Tensor) -> Result<Tensor> {
    let on = gpu(OP, x)?;
    let (t, d) = (rstd.elem_count(), w.elem_count());
    let dx = Out::new(on, x.dtype(), x.elem_count())?;
    let args = [
        Arg::Address(address(OP, x)?),
        Arg::Address(address(OP, w)?),
        Arg::Address(address(OP, dy)?),
        Arg::Address(address(OP, rstd)?),
        Arg::Address(dx.address),
        Arg::I32(d as i32),
    ];
    let name = format!("grad_x_{}", suffix(OP, x.dtype())?);
    // SAFETY: x, dy and dx have t rows of d elements, w one, rstd t elements.
    unsafe { KERNELS.launch(on, &name, [t, 1, 1], row_threads(d), &args)? };
    Ok(dx.into_tensor(x.shape()))
}

/// dw += the sum of dy n over rows.
pub(super) fn add_grad_w(x: &Tensor, dy: &Tensor, rstd: &Tensor, dw: &Tensor) -> Result<()> {
    let inputs = [address(OP, x)?, address(OP, dy)?, address(OP, rstd)?];
    let sizes = [rstd.elem_count(), dw.elem_count()];
    let name = format!("partial_grad_w_{}", suffix(OP, x.dtype())?);
    // SAFETY: x and dy have t rows of d elements, rstd t elements, dw d.
    unsafe { columns::add_sums(&KERNELS, gpu(OP, x)?, &name, &inputs, sizes, dw) }
}
