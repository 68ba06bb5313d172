//! Ops of mixture-of-experts layers: routing, permutation of tokens, grouped matmuls and router losses.

pub mod assignment;
pub mod capacity;
pub mod expert_bias;
pub mod expert_counts;
pub mod expert_labels;
pub mod grouped_linear;
pub mod permute;
pub mod router;
pub mod router_loss;
pub mod router_noise;
pub mod sinkhorn;
pub mod weighted_swiglu;

#[cfg(any(feature = "cuda", feature = "emulate"))]
crate::cuda::kernels!("moe");
