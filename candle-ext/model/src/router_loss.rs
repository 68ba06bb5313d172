//! Auxiliary losses of the router.

use candle_core::{Result, Tensor};
use candlewick_ops::{self as ops, ScoreFunction};

/// Auxiliary loss of the routers. Each layer adds the loss summed over its tokens to the tape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterLoss {
    /// Load-balancing loss of Switch Transformer: e * sum over experts of (fraction of the selections) * (mean score).
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

    /// Adds the loss of f32 logits [t, e] and of the micro-batch's selections f32 [e], summed over the tokens that are no padding, to the tape.
    pub(crate) fn record(
        self,
        logits_te: &Tensor,
        counts_e: &Tensor,
        score: ScoreFunction,
        valid_rows: Option<&Tensor>,
    ) -> Result<()> {
        let logits_te = &match valid_rows {
            Some(rows) => ops::select_rows(logits_te, rows)?,
            None => logits_te.clone(),
        };
        let loss = match self {
            Self::LoadBalancing => {
                let n_experts = counts_e.dim(0)? as f64;
                let total = counts_e.sum_all()?.maximum(1f32)?;
                let fractions_e = counts_e.broadcast_div(&total)?.affine(n_experts, 0.0)?;
                ops::load_balancing_loss(logits_te, &fractions_e, score)?
            }
            Self::Z => ops::router_z_loss(logits_te)?,
        };
        ops::auxiliary_loss(self.name(), &loss)
    }
}
