//! Auxiliary losses of the router.

/// Auxiliary loss of the routers. Each layer adds the loss summed over its tokens to the tape.
///
/// The load-balancing losses are those of Switch Transformer: e * sum over experts of (fraction of the selections) * (mean
/// score). They differ in the tokens that the fractions count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RouterLoss {
    /// Load-balancing loss with the fractions of each micro-batch.
    LoadBalancing,
    /// Load-balancing loss with the fractions of each sequence (DeepSeek-V2, DeepSeek-V3).
    SequenceLoadBalancing,
    /// Load-balancing loss with the fractions of all micro-batches and ranks of the step so far (Qiu et al., 2025,
    /// <https://arxiv.org/abs/2501.11873>).
    GlobalLoadBalancing,
    /// Load-balancing loss with the fractions of each micro-batch, summed over layers, times k. transformers' `load_balancing_loss_func`.
    TransformersLoadBalancing,
    /// Square of the log-sum-exp of the logits (ST-MoE).
    Z,
}

impl RouterLoss {
    /// All losses.
    pub const ALL: [Self; 5] = [
        Self::LoadBalancing,
        Self::SequenceLoadBalancing,
        Self::GlobalLoadBalancing,
        Self::TransformersLoadBalancing,
        Self::Z,
    ];

    /// Returns the name in metrics, as in Megatron-LM.
    pub fn name(self) -> &'static str {
        match self {
            Self::LoadBalancing => "load_balancing_loss",
            Self::SequenceLoadBalancing => "seq_load_balancing_loss",
            Self::GlobalLoadBalancing => "global_load_balancing_loss",
            Self::TransformersLoadBalancing => "transformers_load_balancing_loss",
            Self::Z => "z_loss",
        }
    }
}
