//! Noise of routers on CUDA: launches of `router_noise.cuh`.

use candle_core::{Result, Tensor};

use crate::cuda::{Arg, Out, address, gpu, suffix};
use crate::moe::KERNELS;
use crate::moe::router::logits_suffix;

const OP: &str = "router noise";
/// Elements per thread, approximately.
const PER_THREAD: usize = 4;

/// Source of normal numbers that are added to logits.
#[derive(Clone, Copy)]
pub(super) struct Normal {
    /// One number per column instead of one per element.
    pub(super) per_column: bool,
    /// Factor on the logits.
    pub(super) factor: f64,
    pub(super) std: f64,
    pub(super) key: u64,
}

/// Returns x times a number per element, uniform in [1 - eps, 1 + eps).
pub(super) fn jitter(x: &Tensor, eps: f64, key: u64, tokens: &Tensor) -> Result<Tensor> {
    let (on, n) = (gpu(OP, x)?, x.elem_count());
    let y = Out::new(on, x.dtype(), n)?;
    let addresses = [address(OP, x)?, y.address, address(OP, tokens)?].map(Arg::Address);
    let sizes = [Arg::I64(n as i64), Arg::I32(x.dims()[1] as i32)];
    let args = [&addresses[..], &sizes, &[Arg::F64(eps), Arg::U64(key)]].concat();
    let name = format!("jitter_{}", suffix(OP, x.dtype())?);
    // SAFETY: both have n elements, in rows of d, and there is a token per row.
    unsafe { KERNELS.launch_flat(on, &name, n, PER_THREAD, &args)? };
    Ok(y.into_tensor(x.shape()))
}

/// Returns the logits times a factor, plus normal numbers.
pub(super) fn add_normal(logits: &Tensor, Normal { per_column, factor, std, key }: Normal) -> Result<Tensor> {
    let (on, n) = (gpu(OP, logits)?, logits.elem_count());
    let y = Out::new(on, logits.dtype(), n)?;
    let addresses = [address(OP, logits)?, y.address].map(Arg::Address);
    let sizes = [Arg::I64(n as i64), Arg::I32(logits.dims()[1] as i32), Arg::I32(i32::from(per_column))];
    let args = [&addresses[..], &sizes, &[Arg::F64(factor), Arg::F64(std), Arg::U64(key)]].concat();
    let name = format!("add_normal_{}", logits_suffix(logits.dtype()));
    // SAFETY: both have n elements, in rows of e.
    unsafe { KERNELS.launch_flat(on, &name, n, PER_THREAD, &args)? };
    Ok(y.into_tensor(logits.shape()))
}
