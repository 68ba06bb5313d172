//! Expert counts summed over the layers of all pipeline stages.
//!
//! A stage sends its sums after the activations of a chunk. The last stage has those of all layers, and they return with the
//! gradients. So they arrive before the backward of the first layer that reads them.

use candle_core::{DType, Result};
use candlewick_model::{ExpertCountsSummedOverLayers, Model, RouterLoss};

use super::{EngineRouting, RoutingStep};
use crate::pipeline::{HiddenStates, Pipeline};

impl EngineRouting {
    /// Returns empty sums of counts, if a loss of the routers reads them.
    pub(super) fn counts_over_layers(&self, model: &Model) -> Option<ExpertCountsSummedOverLayers> {
        let moe = model.config().moe()?;
        let is_read = self.settings.losses.contains(&RouterLoss::TransformersLoadBalancing);
        is_read.then(|| ExpertCountsSummedOverLayers::new(moe.n_experts, moe.router.top_k))
    }
}

impl RoutingStep<'_> {
    /// Sends what earlier layers have counted to the next model chunk.
    pub(crate) fn send_forward(&self, pipeline: &Pipeline, micro_idx: usize) -> Result<()> {
        let Some(counts) = &self.counts_over_layers else { return Ok(()) };
        pipeline.send_activation(&counts.get(micro_idx, &self.device)?)
    }

    /// Receives what the layers of earlier model chunks have counted.
    pub(crate) fn receive_forward(&self, pipeline: &Pipeline, micro_idx: usize) -> Result<()> {
        let Some(counts) = &self.counts_over_layers else { return Ok(()) };
        counts.set(micro_idx, pipeline.receive_activation(message(counts))?);
        Ok(())
    }

    /// Sends the sums of all layers to the previous model chunk.
    pub(crate) fn send_backward(&self, pipeline: &Pipeline, micro_idx: usize) -> Result<()> {
        let Some(counts) = &self.counts_over_layers else { return Ok(()) };
        pipeline.send_gradient(&counts.get(micro_idx, &self.device)?)
    }

    /// Receives the sums of all layers.
    pub(crate) fn receive_backward(&self, pipeline: &Pipeline, micro_idx: usize) -> Result<()> {
        let Some(counts) = &self.counts_over_layers else { return Ok(()) };
        counts.set(micro_idx, pipeline.receive_gradient(message(counts))?);
        Ok(())
    }
}

fn message(counts: &ExpertCountsSummedOverLayers) -> HiddenStates {
    HiddenStates { dtype: DType::F32, shape: vec![counts.n_experts()] }
}
