//! `limit_capacity` on CUDA: a launch of `capacity.cuh`.

use candle_core::{DType, Result, Tensor};

use crate::cuda::{Arg, Out, address, gpu};
use crate::moe::KERNELS;
use crate::moe::router::Routing;

const OP: &str = "limit_capacity";
const THREADS: usize = 256;

/// Returns the experts with those of dropped slots replaced. An expert keeps its slots with the highest weights if
/// `by_weight`, otherwise its first.
pub(super) fn limited(routing: &Routing, capacity: usize, by_weight: bool) -> Result<Tensor> {
    let Routing { weights, assignment } = routing;
    let (on, n) = (gpu(OP, &assignment.experts)?, assignment.n_rows());
    let experts = Out::new(on, DType::U32, assignment.n_slots())?;
    let weights = weights.contiguous()?;
    let inputs = [&weights, &assignment.experts, &assignment.order, &assignment.offsets];
    let mut args: Vec<Arg> =
        inputs.into_iter().map(|tensor| address(OP, tensor).map(Arg::Address)).collect::<Result<_>>()?;
    args.push(Arg::Address(experts.address));
    let capacity = i32::try_from(capacity).unwrap_or(i32::MAX);
    let sizes = [n as i32, assignment.n_experts() as i32, capacity, i32::from(by_weight)];
    args.extend(sizes.map(Arg::I32));
    // SAFETY: there are as many weights and experts as slots, n rows in the order, and e + 1 offsets.
    unsafe { KERNELS.launch(on, "limit_capacity", [n.div_ceil(THREADS), 1, 1], THREADS, &args)? };
    Ok(experts.into_tensor(assignment.experts.shape()))
}
