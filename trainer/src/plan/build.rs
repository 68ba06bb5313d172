//! Construction of a plan's model.

use candlewick_model::{Config, Model, ModelError};
use candlewick_ops::{FP8_WEIGHT_FORMAT, WeightStorage};

use super::run::Plan;
use crate::recipe::BaseStorage;

impl Plan {
    /// Builds the model of a config, with the plan's adapter, storage of frozen weights, residual stream and FP8 layers.
    pub fn build_model(&self, config: Config) -> Result<Model, ModelError> {
        let model = Model::new(config, self.model.adapter.clone())?;
        let model = match self.model.quantize_base {
            Some(BaseStorage::Fp8) => model.with_frozen_storage(WeightStorage::Quantized(&FP8_WEIGHT_FORMAT)),
            None => model,
        };
        let model = if self.model.fp32_residual_connection { model.with_f32_residual() } else { model };
        Ok(match &self.fp8 {
            Some(fp8) => {
                let modules = fp8.modules(model.config());
                model.with_fp8(&modules)
            }
            None => model,
        })
    }
}
