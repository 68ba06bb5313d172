//! PEFT's adapter folder: adapter_config.json and adapter_model.safetensors.

use std::path::Path;

use candle_core::{DType, Tensor};
use candlewick_text::quantity::counted;

use super::config::exchanges_parameters;
use super::{BASE_MODEL_RECORD, BaseModelRecord, LoraConfig};
use crate::{
    Config, Model, ModelError, ParamSpec,
    checkpoint::{AuxiliaryFiles, Checkpoint, ShardTensor, StagingFolder, first_names, write_json, write_shard},
    config::json::read_object,
    family::multimodal::{name_in_multimodal_model, name_in_text_model},
    unit::{EMBEDDING, LM_HEAD},
};

/// Prefix that PEFT puts before every parameter name.
const PREFIX: &str = "base_model.model.";

/// Part of a name that PEFT puts between a layer with an adapter and its own tensors.
const BASE_LAYER: &str = ".base_layer";

/// The part of a name that only LoRA factors and other tensors of adapters have.
const FACTOR: &str = ".lora_";

/// Tensors that replace those of the base model with another number of rows after a change of the vocabulary.
const EMBEDDING_LAYERS: [&str; 2] = [EMBEDDING, LM_HEAD];

/// A memory-mapped PEFT adapter folder.
#[derive(Debug)]
pub struct AdapterFolder {
    /// LoRA configuration.
    pub config: LoraConfig,
    /// LoRA factors, named as by [`Model::adapter_params`], and tensors that replace those of the base model.
    pub weights: Checkpoint,
    /// Identity of the base weights, if the folder records it.
    pub base: Option<BaseModelRecord>,
}

impl LoraConfig {
    /// Reads `adapter_config.json` from an adapter folder.
    pub fn read(folder: &Path) -> Result<Self, ModelError> {
        let path = folder.join("adapter_config.json");
        let map = read_object(&path)?;
        let config = Self::from_folder(&map).map_err(|e| e.in_file(&path))?;
        let has_exchanged_parameters = !config.target_parameters.is_empty() && exchanges_parameters(&map);
        let weights = Checkpoint::open_file(&folder.join("adapter_model.safetensors"));
        let skips_expert_modules = weights.is_ok_and(|weights| !weights.names().any(is_of_single_expert));
        Ok(Self { has_exchanged_parameters, skips_expert_modules, ..config })
    }
}

impl AdapterFolder {
    /// Opens an adapter folder. [`Model::check_adapter`] verifies the factors' shapes.
    pub fn open(folder: &Path) -> Result<Self, ModelError> {
        let config = LoraConfig::read(folder)?;
        let has = |name: &str| folder.join(name).is_file();
        if !has("adapter_model.safetensors") && has("adapter_model.bin") {
            let problem =
                "it has adapter_model.bin, a pickle, which is not read; load the adapter with peft, and save it again";
            return Err(ModelError::mismatch(folder, problem));
        }
        let weights = Checkpoint::open_file(&folder.join("adapter_model.safetensors"))?;
        let weights = weights.rename(name_in_model);
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
        let stored_name = if model.config().family().is_multimodal() { name_in_multimodal_peft } else { name_in_peft };
        let tensors: Vec<_> = model.adapter_params().map(|param| ShardTensor::of_factor(stored_name, param)).collect();
        write_shard(&staging.folder().join("adapter_model.safetensors"), &tensors, dtype, fetch)?;
        let modules = || model.adapter_params().filter_map(|param| Some(param.name.split_once(FACTOR)?.0));
        let config = match model.config().family().is_multimodal() {
            true => config.with_multimodal_names(modules()),
            false => config.with_module_names(model.config())?,
        };
        write_json(&staging.folder().join("adapter_config.json"), &config.to_json())?;
        auxiliary_files.copy_into(staging.folder())?;
        staging.commit()
    }

    /// Returns the names of the tensors that replace those of the base model: modules of `modules_to_save`, biases, and the
    /// embedding layers that PEFT saves after a change of the vocabulary, or with `save_embedding_layers`.
    pub fn replacements(&self) -> Vec<&str> {
        self.weights.names().filter(|name| !name.contains(FACTOR)).collect()
    }

    /// Opens config and weights of the base model in a folder. Tensors of the adapter replace those of the base model, and the
    /// rows of its embedding layers the vocabulary size. [`Model::check_adapter`] reports tensors that the base model lacks.
    ///
    /// # Errors
    /// If the adapter was trained on other weights, or a tensor does not fit.
    pub fn open_base(&self, folder: &Path) -> Result<(Config, Checkpoint), ModelError> {
        let (config, mut base) = Checkpoint::open_with_config(folder)?;
        self.check_base(&base)?;
        let embeddings = self.embedding_layers();
        let n_rows = self.n_embeddings(&config)?.unwrap_or(config.vocab_size());
        if !config.tied() && n_rows != config.vocab_size() && embeddings.len() < EMBEDDING_LAYERS.len() {
            let (first, n_tokens) = (embeddings[0], config.vocab_size());
            let problem = format!(
                "`{first}` has {n_rows} rows and the other embedding layer is that of the base model, with {n_tokens}; save \
                 the adapter again with both (`save_embedding_layers=True`)"
            );
            return Err(ModelError::mismatch(self.weights.folder(), problem));
        }
        let mut names = self.replacements();
        names.retain(|name| base.shape(name).is_some() || EMBEDDING_LAYERS.contains(name));
        if names.is_empty() {
            return Ok((config, base));
        }
        self.check_shapes(&names, &base)?;
        // Of tied layers, the adapter may store one.
        let tied = EMBEDDING_LAYERS.as_slice();
        let removed = if config.tied() && !embeddings.is_empty() { tied } else { &[] };
        base.replace(removed, &self.weights, &names)?;
        Ok((config.with_vocab_size(n_rows), base))
    }

    /// Returns the names of the embedding layers among the replacements.
    fn embedding_layers(&self) -> Vec<&'static str> {
        EMBEDDING_LAYERS.into_iter().filter(|name| self.weights.shape(name).is_some()).collect()
    }

    /// Verifies that tensors besides embedding layers have the shapes of the base model.
    fn check_shapes(&self, names: &[&str], base: &Checkpoint) -> Result<(), ModelError> {
        let shapes = names.iter().map(|name| (name, self.weights.shape(name), base.shape(name)));
        for (name, found, wanted) in shapes.filter(|(name, ..)| !EMBEDDING_LAYERS.contains(name)) {
            if found != wanted {
                let (found, wanted) = (found.unwrap_or_default(), wanted.unwrap_or_default());
                let problem = format!("tensor `{name}` has shape {found:?}, but the base model has {wanted:?}");
                return Err(ModelError::mismatch(self.weights.folder(), problem));
            }
        }
        Ok(())
    }

    /// Returns the number of rows of the embedding layers; `None` without any. A vocabulary without the padding of the base
    /// model has fewer rows.
    fn n_embeddings(&self, config: &Config) -> Result<Option<usize>, ModelError> {
        let (n_tokens, width) = (config.vocab_size(), config.hidden_size());
        let mut n_rows = None;
        for name in self.embedding_layers() {
            let shape = self.weights.shape(name).unwrap_or_default();
            match *shape {
                [rows, columns] if columns == width && rows > 0 && n_rows.is_none_or(|n| n == rows) => {
                    n_rows = Some(rows);
                }
                _ => {
                    let wanted = match n_rows {
                        Some(n) => format!("the other embedding layer has [{n}, {width}]"),
                        None => format!("the base model has [{n_tokens}, {width}]; only the number of rows may differ"),
                    };
                    let problem = format!("tensor `{name}` has shape {shape:?}, but {wanted}");
                    return Err(ModelError::mismatch(self.weights.folder(), problem));
                }
            }
        }
        Ok(n_rows)
    }

    /// Verifies that the adapter replaces no tensor of the base model. Such tensors would not be trained and saved with it.
    ///
    /// # Errors
    /// If it replaces some.
    pub fn check_trainable(&self) -> Result<(), ModelError> {
        let names = self.replacements();
        if names.is_empty() {
            return Ok(());
        }
        let problem = format!(
            "the adapter replaces {} of its base model ({}), and training from it would lose them; merge it with `trainer \
             merge`, and train a new adapter on the merged model",
            counted(names.len(), "tensor"),
            first_names(&names)
        );
        Err(ModelError::mismatch(self.weights.folder(), problem))
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

impl Model {
    /// Checks that the weights of an adapter folder have all LoRA factors, and no other tensor except those that replace a
    /// tensor of this model.
    ///
    /// # Errors
    /// If a factor is missing or has another shape, or another tensor would be ignored.
    pub fn check_adapter(&self, weights: &Checkpoint) -> Result<(), ModelError> {
        let mut others: Vec<&str> = self.base_params().map(|param| param.name.as_str()).collect();
        others.extend(EMBEDDING_LAYERS);
        weights.check_adapter(self.adapter_params(), &others)
    }
}

/// Returns PEFT's name of a text model's factor.
fn name_in_peft(own: &str) -> String {
    format!("{PREFIX}{own}")
}

/// Returns PEFT's name of a factor in the text of a multimodal model.
fn name_in_multimodal_peft(own: &str) -> String {
    name_in_peft(&name_in_multimodal_model(own))
}

/// Returns the name without PEFT's prefix, and that of a replacement without the marker of a layer with an adapter.
fn name_in_model(name: &str) -> String {
    let name = name_in_text_model(name.strip_prefix(PREFIX).unwrap_or(name));
    if name.contains(FACTOR) { name } else { name.replace(BASE_LAYER, "") }
}

/// Returns true for the tensor of a module of one expert, such as `mlp.experts.0.gate_proj`.
fn is_of_single_expert(name: &str) -> bool {
    name.split_once(".experts.").is_some_and(|(_, rest)| rest.starts_with(|c: char| c.is_ascii_digit()))
}
