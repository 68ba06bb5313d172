//! Router losses on CUDA: launches of `router_loss.cuh`.

use candle_core::{DType, Result, Tensor};

use crate::cuda::{Arg, Out, address, gpu};
use crate::moe::KERNELS;
use crate::moe::router::{ScoreFunction, logits_suffix};

const OP: &str = "router loss";
/// Tokens of a block, one per warp.
const WARPS: usize = 4;
/// Most blocks that sum losses.
const MAX_BLOCKS: usize = 1024;

/// Returns the load-balancing loss, or without counts the z-loss.
pub(super) fn sum(logits: &Tensor, counts: Option<&Tensor>, score: ScoreFunction) -> Result<Tensor> {
    let on = gpu(OP, logits)?;
    let n_blocks = logits.dims()[0].div_ceil(WARPS).clamp(1, MAX_BLOCKS);
    let (partial, loss) = (Out::new(on, DType::F64, n_blocks)?, Out::new(on, DType::F32, 1)?);
    let [logits_at, counts_at] = inputs(logits, counts)?;
    let args = [&[logits_at, counts_at, Arg::Address(partial.address)][..], &settings(logits, score)].concat();
    let name = format!("token_losses_{}", logits_suffix(logits.dtype()));
    let of_sum = [Arg::Address(partial.address), Arg::Address(loss.address), Arg::I32(n_blocks as i32)];
    // SAFETY: logits are [t, e], counts [e]; there is a partial sum per block.
    unsafe {
        KERNELS.launch(on, &name, [n_blocks, 1, 1], WARPS * 32, &args)?;
        KERNELS.launch(on, "sum_losses", [1, 1, 1], 32, &of_sum)?;
    }
    Ok(loss.into_tensor(()))
}

/// Returns the gradient of the logits for the upstream gradient `dy`, a scalar on the device.
pub(super) fn backward(logits: &Tensor, counts: Option<&Tensor>, score: ScoreFunction, dy: &Tensor) -> Result<Tensor> {
    let on = gpu(OP, logits)?;
    let t = logits.dims()[0];
    let d_logits = Out::new(on, logits.dtype(), logits.elem_count())?;
    let [logits_at, counts_at] = inputs(logits, counts)?;
    let addresses = [logits_at, counts_at, Arg::Address(address(OP, dy)?), Arg::Address(d_logits.address)];
    let args = [&addresses[..], &settings(logits, score)].concat();
    let name = format!("loss_backward_{}", logits_suffix(logits.dtype()));
    // SAFETY: logits and their gradient are [t, e], counts [e], dy is one f32.
    unsafe { KERNELS.launch(on, &name, [t.div_ceil(WARPS), 1, 1], WARPS * 32, &args)? };
    Ok(d_logits.into_tensor(logits.shape()))
}

fn inputs(logits: &Tensor, counts: Option<&Tensor>) -> Result<[Arg; 2]> {
    let counts = counts.map_or(Ok(0), |counts| address(OP, counts))?;
    Ok([address(OP, logits)?, counts].map(Arg::Address))
}

fn settings(logits: &Tensor, score: ScoreFunction) -> [Arg; 3] {
    let [t, e] = [0, 1].map(|dim| Arg::I32(logits.dims()[dim] as i32));
    [t, e, score.arg()]
}
