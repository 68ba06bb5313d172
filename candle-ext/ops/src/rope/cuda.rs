//! `rope` on CUDA: launches of `kernel.cu`.

use candle_core::{Result, Tensor};

use super::Turn;
use crate::cuda::{Arg, Out, address, gpu, kernels, suffix};

kernels!("rope");

const OP: &str = "rope";

/// Rotates x [t, h, k] by the f32 tables [t, k/2].
pub(super) fn rotate(x: &Tensor, cos: &Tensor, sin: &Tensor, turn: Turn) -> Result<Out> {
    let on = gpu(OP, x)?;
    let (t, h, k) = x.dims3()?;
    let y = Out::new(on, x.dtype(), x.elem_count())?;
    let args = [
        Arg::Address(address(OP, x)?),
        Arg::Address(address(OP, cos)?),
        Arg::Address(address(OP, sin)?),
        Arg::Address(y.address),
        Arg::I32(h as i32),
        Arg::I32(k as i32),
        Arg::F32(turn.sign()),
    ];
    // Eight pairs each, as far as that goes.
    let threads = (h * k / 16).next_multiple_of(32).clamp(32, 256);
    let name = format!("rotate_{}", suffix(OP, x.dtype())?);
    // SAFETY: x and y are [t, h, k], the tables [t, k/2].
    unsafe { KERNELS.launch(on, &name, [t, 1, 1], threads, &args)? };
    Ok(y)
}
