//! Router losses on CUDA: launches of `router_loss.cuh`.

use candle_core::{DType, Result, Tensor};

use super::inputs::BalanceInputs;
use crate::cuda::{Arg, Out, address, gpu};
use crate::moe::KERNELS;
use crate::moe::router::{ScoreFunction, logits_suffix};

const OP: &str = "router loss";
/// Tokens of a block, one per warp.
const WARPS: usize = 4;
/// Most blocks that sum losses.
const MAX_BLOCKS: usize = 1024;

/// Returns the load-balancing loss.
pub(super) fn sum(logits: &Tensor, balance: &BalanceInputs) -> Result<Tensor> {
    let on = gpu(OP, logits)?;
    let n_blocks = logits.dims()[0].div_ceil(WARPS).clamp(1, MAX_BLOCKS);
    let (partial, loss) = (Out::new(on, DType::F64, n_blocks)?, Out::new(on, DType::F32, 1)?);
    let inputs = inputs(logits, Some(balance))?;
    let args = [&inputs[..], &[Arg::Address(partial.address)], &settings(logits, Some(balance))].concat();
    let name = format!("token_losses_{}", logits_suffix(logits.dtype()));
    let of_sum = [Arg::Address(partial.address), Arg::Address(loss.address), Arg::I32(n_blocks as i32)];
    // SAFETY: logits are [t, e], counts [s, e], sequences [t] below s; there is a partial sum per block.
    unsafe {
        KERNELS.launch(on, &name, [n_blocks, 1, 1], WARPS * 32, &args)?;
        KERNELS.launch(on, "sum_losses", [1, 1, 1], 32, &of_sum)?;
    }
    Ok(loss.into_tensor(()))
}

/// Returns the load-balancing loss for sums of normalized scores, f64 [e, and more], and factors f32 [e].
pub(super) fn balance_loss(sums: &Tensor, factors: &Tensor) -> Result<Tensor> {
    let on = gpu(OP, sums)?;
    let loss = Out::new(on, DType::F32, 1)?;
    let addresses = [address(OP, sums)?, address(OP, factors)?, loss.address].map(Arg::Address);
    let args = [&addresses[..], &[Arg::I32(factors.elem_count() as i32)]].concat();
    // SAFETY: there are at least as many sums as factors.
    unsafe { KERNELS.launch(on, "balance_loss", [1, 1, 1], 32, &args)? };
    Ok(loss.into_tensor(()))
}

/// Returns e * (fraction of each count in its row), for counts f32 [s, e].
pub(super) fn balance_factors(counts: &Tensor) -> Result<Tensor> {
    let on = gpu(OP, counts)?;
    let [s, e] = [0, 1].map(|dim| counts.dims()[dim]);
    let factors = Out::new(on, DType::F32, s * e)?;
    let args = [Arg::Address(address(OP, counts)?), Arg::Address(factors.address), Arg::I32(e as i32)];
    // SAFETY: counts and factors are [s, e].
    unsafe { KERNELS.launch(on, "balance_factors", [s, 1, 1], 32, &args)? };
    Ok(factors.into_tensor((s, e)))
}

/// Returns the gradient of the logits for the upstream gradient `dy`, a scalar on the device.
pub(super) fn backward(logits: &Tensor, balance: Option<&BalanceInputs>, dy: &Tensor) -> Result<Tensor> {
    let on = gpu(OP, logits)?;
    let t = logits.dims()[0];
    let d_logits = Out::new(on, logits.dtype(), logits.elem_count())?;
    let of_grads = [address(OP, dy)?, d_logits.address].map(Arg::Address);
    let args = [&inputs(logits, balance)?[..], &of_grads, &settings(logits, balance)].concat();
    let name = format!("loss_backward_{}", logits_suffix(logits.dtype()));
    // SAFETY: logits and their gradient are [t, e], counts [s, e], sequences [t] below s, dy is one f32.
    unsafe { KERNELS.launch(on, &name, [t.div_ceil(WARPS), 1, 1], WARPS * 32, &args)? };
    Ok(d_logits.into_tensor(logits.shape()))
}

fn inputs(logits: &Tensor, balance: Option<&BalanceInputs>) -> Result<[Arg; 3]> {
    let of = |tensor: Option<&Tensor>| tensor.map_or(Ok(0), |tensor| address(OP, tensor));
    let counts = of(balance.map(|balance| &balance.counts))?;
    let sequences = of(balance.and_then(|balance| balance.sequences.as_ref()))?;
    Ok([address(OP, logits)?, counts, sequences].map(Arg::Address))
}

fn settings(logits: &Tensor, balance: Option<&BalanceInputs>) -> [Arg; 3] {
    let [t, e] = [0, 1].map(|dim| Arg::I32(logits.dims()[dim] as i32));
    [t, e, balance.map_or(ScoreFunction::Softmax, |balance| balance.score).arg()]
}
