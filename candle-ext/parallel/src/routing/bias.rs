//! Updates of the routers' expert biases.

use candle_core::{Result, Tensor};
use candlewick_model::Model;
use candlewick_ops::{GradScaler, expert_bias_change};

use super::EngineRouting;
use crate::params::ParamStore;

impl EngineRouting {
    /// Moves the expert bias of each layer toward the experts with few tokens, unless `scaler` skipped the step.
    ///
    /// `totals` are the step's totals over all ranks, which begin with the counts of the experts, for each MoE layer. All
    /// ranks must pass equal totals. Does not wait for the device.
    pub(crate) fn update_biases(
        &self,
        model: &Model,
        store: &ParamStore,
        totals: &[Tensor],
        scaler: &GradScaler,
    ) -> Result<()> {
        let rate = self.settings.bias_update_rate;
        if rate == 0.0 {
            return Ok(());
        }
        let applied = scaler.applied()?;
        let layers = model.layers().filter_map(|layer| Some((layer, layer.n_experts()?)));
        for ((layer, n_experts), total) in layers.zip(totals) {
            if let Some(name) = layer.expert_bias_name() {
                let change = expert_bias_change(&total.narrow(0, 0, n_experts)?, rate)?.broadcast_mul(&applied)?;
                store.add_to_buffer(layer.layer_idx + 1, &name, &change)?;
            }
        }
        Ok(())
    }
}
