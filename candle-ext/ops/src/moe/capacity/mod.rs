//! Expert capacity: a bound on the rows of each expert, beyond which slots are dropped.

#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;

use candle_core::{Result, Tensor};

use super::assignment::{DROPPED, ExpertAssignment};
use super::router::Routing;
use crate::device::on_device;
use crate::span::span;
use crate::storage::host;

const OP: &str = "limit_capacity";

/// Choice of the slots that an expert beyond its capacity keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropPolicy {
    /// Slots with the highest weights; of equal ones, the first.
    Weights,
    /// Slots of the first tokens.
    Position,
}

/// Returns the capacity of an expert: ceil(t * k / e * factor) for t tokens with k of e experts each, and at most t, because a
/// token selects an expert once.
pub fn expert_capacity(n_tokens: usize, top_k: usize, n_experts: usize, factor: f64) -> usize {
    let of_factor = ((n_tokens * top_k) as f64 / n_experts as f64 * factor).ceil() as usize;
    of_factor.min(n_tokens)
}

/// Drops slots of experts with more than `capacity` rows.
///
/// The weights of the remaining slots stay as they are, as in Megatron-LM. A dropped slot gets the expert
/// [`DROPPED`], and its weight no gradient.
pub fn limit_capacity(routing: &Routing, capacity: usize, policy: DropPolicy) -> Result<Routing> {
    let _span = span(OP, "forward");
    let assignment = &routing.assignment;
    let experts = on_device!(OP, assignment.experts, {
        cpu => limited(routing, capacity, policy)?,
        cuda => cuda::limited(routing, capacity, policy == DropPolicy::Weights)?,
    });
    let assignment = ExpertAssignment::new(&experts, assignment.n_experts())?;
    Ok(Routing { weights: routing.weights.clone(), assignment })
}

/// Returns the experts with those of dropped slots replaced.
fn limited(routing: &Routing, capacity: usize, policy: DropPolicy) -> Result<Tensor> {
    let Routing { weights, assignment } = routing;
    let weights = weights.contiguous()?;
    let (weights, order, offsets) = (host(OP, &weights)?, host(OP, &assignment.order)?, host(OP, &assignment.offsets)?);
    let (weights, order, offsets) = (weights.slice::<f32>()?, order.slice::<u32>()?, offsets.slice::<u32>()?);
    let mut experts = host(OP, &assignment.experts)?.slice::<u32>()?.to_vec();
    for range in offsets.windows(2).map(|pair| pair[0] as usize..pair[1] as usize) {
        let mut slots = order[range].to_vec();
        if policy == DropPolicy::Weights {
            slots.sort_by(|a, b| weights[*b as usize].total_cmp(&weights[*a as usize]));
        }
        slots.iter().skip(capacity).for_each(|slot| experts[*slot as usize] = DROPPED);
    }
    Tensor::from_vec(experts, assignment.experts.shape(), assignment.experts.device())
}
