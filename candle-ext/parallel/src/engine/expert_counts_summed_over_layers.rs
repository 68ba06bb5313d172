//! Expert counts summed over the layers of all pipeline stages.
//!
//! A stage sends its sums after the activations of a chunk. The last stage has those of all layers, and they return with the
//! gradients. So they arrive before the backward of the first layer that reads them.

use candle_core::{DType, Result};
use candlewick_model::{ExpertCountsSummedOverLayers, RouterLoss};

use super::Engine;
use crate::pipeline::HiddenStates;

/// Summed counts of a micro-batch that stages exchange; `None` if no loss reads them.
#[derive(Clone, Copy)]
pub(super) struct MicroCounts<'a> {
    pub(super) counts: Option<&'a ExpertCountsSummedOverLayers>,
    pub(super) micro_idx: usize,
}

impl Engine {
    /// Returns empty sums of counts, if a loss of the routers reads them.
    pub(super) fn expert_counts_summed_over_layers(&self) -> Option<ExpertCountsSummedOverLayers> {
        let moe = self.model.config().moe()?;
        let is_read = self.router.losses.contains(&RouterLoss::TransformersLoadBalancing);
        is_read.then(|| ExpertCountsSummedOverLayers::new(moe.n_experts, moe.router.top_k))
    }

    /// Sends the sums so far to the next model chunk.
    pub(super) fn send_counts_forward(&self, of_micro: MicroCounts<'_>) -> Result<()> {
        let Some(counts) = of_micro.counts else { return Ok(()) };
        self.pipeline.send_activation(&counts.get(of_micro.micro_idx, &self.device)?)
    }

    /// Receives the sums of the earlier model chunks.
    pub(super) fn receive_counts_forward(&self, of_micro: MicroCounts<'_>) -> Result<()> {
        let Some(counts) = of_micro.counts else { return Ok(()) };
        counts.set(of_micro.micro_idx, self.pipeline.receive_activation(message(counts))?);
        Ok(())
    }

    /// Sends the sums of all layers to the previous model chunk.
    pub(super) fn send_counts_backward(&self, of_micro: MicroCounts<'_>) -> Result<()> {
        let Some(counts) = of_micro.counts else { return Ok(()) };
        self.pipeline.send_gradient(&counts.get(of_micro.micro_idx, &self.device)?)
    }

    /// Receives the sums of all layers.
    pub(super) fn receive_counts_backward(&self, of_micro: MicroCounts<'_>) -> Result<()> {
        let Some(counts) = of_micro.counts else { return Ok(()) };
        counts.set(of_micro.micro_idx, self.pipeline.receive_gradient(message(counts))?);
        Ok(())
    }
}

fn message(counts: &ExpertCountsSummedOverLayers) -> HiddenStates {
    HiddenStates { dtype: DType::F32, shape: vec![counts.n_experts()] }
}
