//! `rope` on CUDA: launches of `kernel.cu`.

pub(super) mod split;

use candle_core::{Result, Tensor};

use super::heads::{HeadSlice, RopeHeads, RotationDirection};
use crate::cuda::{Arg, DeviceAddress, Out, address, gpu, kernels, suffix};

kernels!("rope");

const OP: &str = "rope";

/// Returns heads of `x`, rotated by the f32 tables [t, r/2], contiguous: [t, n, k].
pub(super) fn rotated(
    (x, from): (&Tensor, HeadSlice),
    table: Option<[&Tensor; 2]>,
    n_tokens: usize,
    heads: RopeHeads,
    direction: RotationDirection,
) -> Result<Out> {
    let y = Out::new(gpu(OP, x)?, x.dtype(), n_tokens * heads.n * heads.dim)?;
    // SAFETY: y holds the heads of all tokens.
    unsafe { launch((x, from), table, (y.address, heads.slice()), (n_tokens, heads), direction)? };
    Ok(y)
}

/// Launches the rotation kernel.
///
/// # Safety
///
/// `y` must hold the heads of all tokens in its slice.
unsafe fn launch(
    (x, from): (&Tensor, HeadSlice),
    table: Option<[&Tensor; 2]>,
    (y, to): (DeviceAddress, HeadSlice),
    (n_tokens, RopeHeads { n, dim }): (usize, RopeHeads),
    direction: RotationDirection,
) -> Result<()> {
    let at = |slice: HeadSlice| (slice.first * x.dtype().size_in_bytes()) as DeviceAddress;
    let ([cos, sin], n_pairs) = match table {
        Some([cos, sin]) => ([address(OP, cos)?, address(OP, sin)?], cos.dim(1)?),
        None => ([0, 0], dim / 2),
    };
    let args = [
        Arg::Address(address(OP, x)? + at(from)),
        Arg::Address(cos),
        Arg::Address(sin),
        Arg::Address(y + at(to)),
        Arg::I32(n as i32),
        Arg::I32(dim as i32),
        Arg::I32(n_pairs as i32),
        Arg::I64(from.stride as i64),
        Arg::I64(to.stride as i64),
        Arg::F32(direction.sign()),
    ];
    // Eight pairs per thread, within the block size limits.
    let threads = (n * dim / 16).next_multiple_of(32).clamp(32, 256);
    let name = format!("rotate_{}", suffix(OP, x.dtype())?);
    // SAFETY: x and y have rows of their strides for each token; the tables are [t, n_pairs].
    unsafe { KERNELS.launch(gpu(OP, x)?, &name, [n_tokens, 1, 1], threads, &args) }
}
