//! A model to export: its base weights with a LoRA adapter merged in, one tensor at a time.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};

use crate::checkpoint::{CarriedTensors, Checkpoint};
use crate::{AdapterFolder, Config, Model, ModelError, ParamSpec};

/// Values of parameters on disk, in any format.
pub trait ParamValues {
    /// Returns the f32 value of a parameter, in its shape.
    fn value(&self, param: &ParamSpec) -> Result<Tensor, ModelError>;

    /// Returns the dtype of the weights on disk, if it is known.
    fn dtype(&self) -> Option<DType>;
}

impl ParamValues for Checkpoint {
    fn value(&self, param: &ParamSpec) -> Result<Tensor, ModelError> {
        self.param(param, DType::F32, &Device::Cpu)
    }

    fn dtype(&self) -> Option<DType> {
        self.float_dtype()
    }
}

/// A model whose values are base weights, with an adapter merged in if there is one.
pub struct MergedModel {
    /// The model with its adapter.
    model: Model,
    /// LoRA factors by name.
    factors: HashMap<String, ParamSpec>,
    base: Box<dyn ParamValues>,
    adapter: Option<Box<dyn ParamValues>>,
    /// Folders of tokenizer and generation files; the first that has them counts.
    folders: Vec<PathBuf>,
    carried: Option<CarriedTensors>,
}

impl MergedModel {
    /// Opens a model folder, and an adapter folder on it if there is one.
    ///
    /// # Errors
    /// If tensors are missing or have other shapes, or the adapter was trained on other weights.
    pub fn open(folder: &Path, adapter: Option<&Path>) -> Result<Self, ModelError> {
        let folders = adapter.into_iter().chain([folder]).map(Path::to_path_buf).collect();
        let adapter = adapter.map(AdapterFolder::open).transpose()?;
        let (config, base) = match &adapter {
            Some(adapter) => adapter.open_base(folder)?,
            None => Checkpoint::open_with_config(folder)?,
        };
        let carried = CarriedTensors::open(folder, &config)?;
        let model = Model::new(config, adapter.as_ref().map(|adapter| adapter.config.clone()))?;
        base.check(model.base_params())?;
        adapter.as_ref().map_or(Ok(()), |adapter| model.check_adapter(&adapter.weights))?;
        let adapter = adapter.map(|adapter| Box::new(adapter.weights) as Box<dyn ParamValues>);
        Ok(Self::new(model, Box::new(base), adapter, folders).with_carried(carried))
    }

    /// Sets the carried tensors of a multimodal model.
    pub fn with_carried(self, carried: Option<CarriedTensors>) -> Self {
        Self { carried, ..self }
    }

    /// Returns the carried tensors of a multimodal model.
    pub fn carried(&self) -> Option<&CarriedTensors> {
        self.carried.as_ref()
    }

    /// Creates a model from the sources of its values. `adapter` has the LoRA factors of `model`.
    pub fn new(
        model: Model,
        base: Box<dyn ParamValues>,
        adapter: Option<Box<dyn ParamValues>>,
        folders: Vec<PathBuf>,
    ) -> Self {
        let factors = model.adapter_params().map(|param| (param.name.clone(), param.clone())).collect();
        Self { model, factors, base, adapter, folders, carried: None }
    }

    /// Returns the config.
    pub fn config(&self) -> &Config {
        self.model.config()
    }

    /// Returns the folders of tokenizer and generation files, in the order in which they are searched.
    pub fn folders(&self) -> &[PathBuf] {
        &self.folders
    }

    /// Returns the parameters, without LoRA factors.
    pub fn params(&self) -> impl Iterator<Item = &ParamSpec> {
        self.model.base_params()
    }

    /// Returns the number of elements of an export.
    pub fn n_elements(&self) -> usize {
        self.model.n_exported_elements()
    }

    /// Returns the dtype of the base weights on disk, else of config.json, else F32.
    pub fn dtype(&self) -> DType {
        self.base.dtype().or(self.config().dtype()).unwrap_or(DType::F32)
    }

    /// Returns true if the adapter changes the parameter.
    pub fn is_adapted(&self, param: &ParamSpec) -> bool {
        self.model.adapters_on(&param.name).next().is_some()
    }

    /// Returns the f32 value of a parameter without the adapter.
    pub(super) fn base_value(&self, param: &ParamSpec) -> Result<Tensor, ModelError> {
        self.base.value(param)
    }

    /// Returns the f32 value of a parameter with the adapter merged in.
    pub fn value(&self, param: &ParamSpec) -> Result<Tensor, ModelError> {
        let read = |name: &str| match (self.factors.get(name), &self.adapter) {
            (Some(factor), Some(adapter)) => adapter.value(factor),
            _ => self.base.value(param),
        };
        Ok(self.model.merged(&param.name, |name| read(name).map_err(candle_core::Error::wrap))?)
    }
}
