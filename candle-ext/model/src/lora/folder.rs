//! PEFT's adapter folder: adapter_config.json and adapter_model.safetensors.

use std::path::Path;

use candle_core::{DType, Tensor};

use super::config::exchanges_parameters;
use super::{BASE_MODEL_RECORD, BaseModelRecord, LoraConfig};
use crate::{
    Model, ModelError, ParamSpec,
    checkpoint::{AuxiliaryFiles, Checkpoint, ShardTensor, StagingFolder, write_json, write_shard},
    config::json::read_object,
};

/// Prefix that PEFT puts before every parameter name.
const PREFIX: &str = "base_model.model.";

/// A memory-mapped PEFT adapter folder.
#[derive(Debug)]
pub struct AdapterFolder {
    /// LoRA configuration.
    pub config: LoraConfig,
    /// LoRA factors, named as by [`Model::adapter_params`].
    pub weights: Checkpoint,
    /// Identity of the base weights, if the folder records it.
    pub base: Option<BaseModelRecord>,
}

impl LoraConfig {
    /// Reads `adapter_config.json` from an adapter folder.
    pub fn read(folder: &Path) -> Result<Self, ModelError> {
        let path = folder.join("adapter_config.json");
        let map = read_object(&path)?;
        let config = Self::from_map(&map).map_err(|e| e.in_file(&path))?;
        let has_exchanged_parameters = !config.target_parameters.is_empty() && exchanges_parameters(&map);
        let weights = Checkpoint::open_file(&folder.join("adapter_model.safetensors"));
        let skips_expert_modules = weights.is_ok_and(|weights| !weights.names().any(is_of_single_expert));
        Ok(Self { has_exchanged_parameters, skips_expert_modules, ..config })
    }
}

impl AdapterFolder {
    /// Opens an adapter folder. [`Checkpoint::check`] with [`Model::adapter_params`] verifies the factors' shapes.
    pub fn open(folder: &Path) -> Result<Self, ModelError> {
        let config = LoraConfig::read(folder)?;
        let has = |name: &str| folder.join(name).is_file();
        if !has("adapter_model.safetensors") && has("adapter_model.bin") {
            let problem =
                "it has adapter_model.bin, a pickle, which is not read; load the adapter with peft, and save it again";
            return Err(ModelError::mismatch(folder, problem));
        }
        let weights = Checkpoint::open_file(&folder.join("adapter_model.safetensors"))?.strip_prefix(PREFIX);
        Ok(Self { config, weights, base: BaseModelRecord::read(folder)? })
    }

    /// Saves the adapter of `model` in `dtype` together with tokenizer and chat template.
    ///
    /// `fetch` returns one factor at a time. The folder appears atomically once all files are on disk.
    pub fn save(
        folder: &Path,
        model: &Model,
        dtype: DType,
        auxiliary_files: AuxiliaryFiles,
        fetch: impl FnMut(&ParamSpec) -> candle_core::Result<Tensor>,
    ) -> Result<(), ModelError> {
        let Some(config) = model.lora() else {
            return Err(ModelError::lora("peft_type", "the model has no adapter to save"));
        };
        let staging = StagingFolder::begin(folder)?;
        let tensors: Vec<_> = model.adapter_params().map(|param| ShardTensor::of_factor(PREFIX, param)).collect();
        write_shard(&staging.folder().join("adapter_model.safetensors"), &tensors, dtype, fetch)?;
        let config = config.with_module_names(model.config())?;
        write_json(&staging.folder().join("adapter_config.json"), &config.to_json())?;
        auxiliary_files.copy_into(staging.folder())?;
        staging.commit()
    }

    /// Verifies that `base` has the weights that the adapter was trained on, if the folder records them.
    ///
    /// # Errors
    /// If the weights differ: the base model was retrained, converted or replaced.
    pub fn check_base(&self, base: &Checkpoint) -> Result<(), ModelError> {
        let Some(BaseModelRecord { model, weights }) = &self.base else { return Ok(()) };
        let found = base.identity();
        if found == *weights {
            return Ok(());
        }
        let folder = self.weights.folder();
        let problem = format!(
            "the adapter was trained on other weights than those in {}: on {model} with the hash {weights}, found {found}; \
             give the base model that it was trained on, or remove {} to use it on these weights",
            base.folder().display(),
            folder.join(BASE_MODEL_RECORD).display(),
        );
        Err(ModelError::mismatch(folder, problem))
    }
}

/// Returns true for the tensor of a module of one expert, such as `mlp.experts.0.gate_proj`.
fn is_of_single_expert(name: &str) -> bool {
    name.split_once(".experts.").is_some_and(|(_, rest)| rest.starts_with(|c: char| c.is_ascii_digit()))
}
