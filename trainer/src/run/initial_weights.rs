//! The weights that a plan starts from: a checkpoint, an adapter, or random ones.

use std::path::Path;

use anyhow::{Result, anyhow};
use candlewick_inference::weights::{self, WeightSource, load_weights};
use candlewick_model::checkpoint::Checkpoint;
use candlewick_model::{AdapterFolder, ModelError};
use candlewick_parallel::Engine;
use candlewick_text::hub::{Hub, HubError, ModelFiles};

use crate::exit::ExitCode;
use crate::plan::{Plan, WeightInit};

/// The opened files of the initial weights. Only their headers are read.
pub(super) struct InitialWeights {
    base: Option<Checkpoint>,
    adapter: Option<AdapterFolder>,
    seed: u64,
}

impl InitialWeights {
    /// Opens the plan's checkpoint in `model_folder`, and its adapter.
    pub(super) fn open(plan: &Plan, model_folder: Option<&Path>) -> Result<Self, ModelError> {
        let model_folder = model_folder.filter(|_| plan.model.init == WeightInit::Load);
        let folder_and_config = model_folder.zip(plan.model.config.as_ref());
        let base = folder_and_config.map(|(folder, config)| Checkpoint::of_model(folder, config)).transpose()?;
        let adapter = plan.model.adapter_folder.as_deref().map(AdapterFolder::open).transpose()?;
        if let Some(adapter) = &adapter {
            adapter.check_trainable()?;
            base.as_ref().map_or(Ok(()), |base| adapter.check_base(base))?;
        }
        Ok(Self { base, adapter, seed: plan.seed })
    }

    /// Sets the weights of an engine. Returns notes for the user.
    pub(super) fn load(&self, engine: &Engine) -> Result<Vec<String>, ModelError> {
        let [base, adapter] = self.sources();
        load_weights(engine, base, adapter)
    }

    /// Returns the sources of the base weights and of the adapter.
    fn sources(&self) -> [WeightSource<'_>; 2] {
        let seed = self.seed;
        let random = WeightSource::Random { seed };
        let base = self.base.as_ref();
        [
            base.map_or(random, |checkpoint| WeightSource::CheckpointOrRandomMtp { checkpoint, seed }),
            self.adapter.as_ref().map_or(random, |adapter| WeightSource::Checkpoint(&adapter.weights)),
        ]
    }
}

/// Checks the names, shapes and dtypes of the tensors that a run would load, as far as the model is on this machine. Reads the headers of
/// the weights files. Returns notes for the user. `hub` must not use the network.
pub fn check_weights(plan: &Plan, hub: &Hub) -> Result<Vec<String>> {
    let Some(config) = plan.model.config.clone() else { return Ok(Vec::new()) };
    let name = plan.model.name_or_path.as_deref().filter(|_| plan.model.init == WeightInit::Load);
    let folder = match name.map(|name| hub.model(name, plan.model.revision.as_deref(), ModelFiles::All)) {
        Some(Err(
            error @ (HubError::InvalidId { .. } | HubError::PathNotFound { .. } | HubError::NotAModel { .. }),
        )) => {
            return Err(error.into());
        }
        Some(Err(error @ HubError::LockedFileDamaged { .. })) => {
            return Err(anyhow!("failed to {error}").context(ExitCode::Data));
        }
        // Weights that the cache lacks are downloaded when the run starts.
        found => found.and_then(Result::ok),
    };
    let initial = InitialWeights::open(plan, folder.as_deref())?;
    let [base, adapter] = initial.sources();
    Ok(weights::check_weights(&plan.build_model(config)?, base, adapter)?)
}
