//! Auxiliary losses of the router.

use candle_core::{Result, Tensor};
use candlewick_ops::{self as ops, Routing, ScoreFunction};

use crate::ForwardContext;

/// Auxiliary loss of the routers. Each layer adds the loss summed over its tokens to the tape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterLoss {
    /// Load-balancing loss of Switch Transformer: e * sum over experts of (share of the selections) * (mean score).
    LoadBalancing,
    /// Square of the log-sum-exp of the logits (ST-MoE).
    Z,
}

impl RouterLoss {
    /// All losses.
    pub const ALL: [Self; 2] = [Self::LoadBalancing, Self::Z];

    /// Returns the name in metrics, as in Megatron-LM.
    pub fn name(self) -> &'static str {
        match self {
            Self::LoadBalancing => "load_balancing_loss",
            Self::Z => "z_loss",
        }
    }

    /// Adds the loss of f32 logits [t, e] to the tape.
    pub(crate) fn record(
        self,
        logits_te: &Tensor,
        routing: &Routing,
        score: ScoreFunction,
        context: &ForwardContext,
    ) -> Result<()> {
        let loss = match self {
            Self::LoadBalancing => {
                let counts_e = context.parallel_ops.sum_over_micro_batch(&routing.assignment.counts()?)?;
                let n_experts = counts_e.dim(0)? as f64;
                let shares_e = counts_e.broadcast_div(&counts_e.sum_all()?)?.affine(n_experts, 0.0)?;
                ops::load_balancing_loss(logits_te, &shares_e, score)?
            }
            Self::Z => ops::router_z_loss(logits_te)?,
        };
        ops::auxiliary_loss(self.name(), &loss)
    }
}
