//! `sinkhorn` on CUDA: a launch of `sinkhorn.cuh`.

use candle_core::{DType, Result, Tensor, bail};

use crate::cuda::{Arg, Out, address, gpu};
use crate::moe::KERNELS;
use crate::moe::router::logits_suffix;

const OP: &str = "sinkhorn";
/// Threads of the block, and the most experts.
const THREADS: usize = 512;

/// Returns the balanced matrix.
pub(super) fn balanced(logits: &Tensor) -> Result<Tensor> {
    let (t, e) = logits.dims2()?;
    if e > THREADS {
        bail!("{OP}: on CUDA at most {THREADS} experts, not {e}")
    }
    let on = gpu(OP, logits)?;
    let (cost, of_tokens) = (Out::new(on, DType::F64, t * e)?, Out::new(on, DType::F64, t)?);
    let balanced = Out::new(on, DType::F32, t * e)?;
    let addresses = [address(OP, logits)?, cost.address, of_tokens.address, balanced.address].map(Arg::Address);
    let args = [&addresses[..], &[Arg::I32(t as i32), Arg::I32(e as i32)]].concat();
    let name = format!("sinkhorn_{}", logits_suffix(logits.dtype()));
    // SAFETY: logits, scratch and output are [t, e]; there is a factor per token.
    unsafe { KERNELS.launch(on, &name, [1, 1, 1], THREADS, &args)? };
    Ok(balanced.into_tensor((t, e)))
}
