//! Upcycling of a dense checkpoint to a mixture of experts (arXiv:2410.07524), one tensor at a time.

mod config;
mod tensors;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::DType;

use crate::checkpoint::{AuxiliaryFiles, Checkpoint, CheckpointExport, ExpertTensors, StagingFolder, WrittenTensors};
use crate::{Config, Family, Model, ModelError, ParamSpec, TensorCallback};
pub use config::{UpcycledExperts, UpcycledRouter};
use config::{check_experts, moe_config};
use tensors::{UpcycledTensor, tensors};

/// Output of an upcycling.
#[derive(Clone, Copy, Debug)]
pub struct UpcyclingOutput<'a> {
    /// Output folder. It must be empty or missing.
    pub folder: &'a Path,
    /// Dtype of the weights on disk; `None` for that of the dense model.
    pub dtype: Option<DType>,
    /// Maximum size of a safetensors shard, in bytes.
    pub shard_bytes: u64,
}

/// An upcycling of a dense model to a mixture of experts.
///
/// Each expert is a copy of the dense MLP, or of a slice of it. The router is random. The upcycled model computes the
/// function of the dense model.
pub struct Upcycling {
    folder: PathBuf,
    checkpoint: Checkpoint,
    model: Model,
    experts: UpcycledExperts,
    tensors: Vec<UpcycledTensor>,
    seed: u64,
}

/// Report of an upcycling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpcyclingReport {
    /// Family of the upcycled model.
    pub family: Family,
    /// Dtype of the weights on disk.
    pub dtype: DType,
    /// Number of parameters written.
    pub n_params: usize,
    /// Intermediate size of an expert.
    pub expert_size: usize,
    /// Number of layers with experts.
    pub n_moe_layers: usize,
    /// Number of layers.
    pub n_layers: usize,
}

impl Upcycling {
    /// Opens the dense model and derives the upcycled one. The router's initial values depend on `seed`.
    ///
    /// # Errors
    /// If the model is no dense model of a supported family, or the sizes do not divide.
    pub fn open(dense: &Path, experts: UpcycledExperts, seed: u64) -> Result<Self, ModelError> {
        let in_file = |error: ModelError| error.in_file(&dense.join("config.json"));
        let dense_model = Model::new(Config::read(dense)?, None)?;
        check_experts(dense_model.config(), &experts)?;
        let model = Model::new(moe_config(dense_model.config(), &experts).map_err(in_file)?, None)?;
        let checkpoint = Checkpoint::open(dense)?;
        checkpoint.check(dense_model.base_params())?;
        let tensors = tensors(&dense_model, &model, &experts);
        Ok(Self { folder: dense.to_path_buf(), checkpoint, model, experts, tensors, seed })
    }

    /// Returns the config of the upcycled model.
    pub fn config(&self) -> &Config {
        self.model.config()
    }

    /// Returns the size of the upcycled weights on disk, in bytes.
    pub fn n_bytes(&self, dtype: Option<DType>) -> u64 {
        self.n_params() as u64 * self.dtype(dtype).size_in_bytes() as u64
    }

    /// Writes the upcycled model, reads it back and compares every value.
    ///
    /// At most one matrix of the dense model is in memory, in f32. Each tensor counts twice in `on_tensor`: written and
    /// compared.
    pub fn write(&self, output: &UpcyclingOutput, on_tensor: TensorCallback) -> Result<UpcyclingReport, ModelError> {
        let staging = StagingFolder::begin_new(output.folder)?;
        let dtype = self.dtype(output.dtype);
        let export = CheckpointExport {
            folder: staging.folder(),
            config: self.model.config(),
            auxiliary_files: AuxiliaryFiles { folders: &[&self.folder], chat_template: None, files: &[] },
            dtype,
            shard_bytes: output.shard_bytes,
            expert_tensors: ExpertTensors::default(),
        };
        let by_name: HashMap<&str, _> =
            self.tensors.iter().map(|tensor| (tensor.param.name.as_str(), tensor)).collect();
        let n_tensors = self.tensors.len();
        let mut n_done = 0;
        let value = |param: &ParamSpec| {
            n_done += 1;
            on_tensor(n_done, 2 * n_tensors);
            self.value(by_name[param.name.as_str()]).map_err(candle_core::Error::wrap)
        };
        export.write(None, self.tensors.iter().map(|tensor| &tensor.param), value)?;
        let on_compared = |n_done| on_tensor(n_tensors + n_done, 2 * n_tensors);
        self.verify(staging.folder(), dtype, &on_compared)?;
        staging.commit()?;
        let config = self.model.config();
        Ok(UpcyclingReport {
            family: config.family(),
            dtype,
            n_params: self.n_params(),
            expert_size: config.moe().map_or(0, |moe| moe.expert_size),
            n_moe_layers: config.moe().map_or(0, |moe| moe.layers.iter().filter(|has_experts| **has_experts).count()),
            n_layers: config.n_layers(),
        })
    }

    fn verify(&self, folder: &Path, dtype: DType, on_tensor: &dyn Fn(usize)) -> Result<(), ModelError> {
        let written = WrittenTensors::open(folder, self.model.config(), dtype)?;
        for (idx, tensor) in self.tensors.iter().enumerate() {
            on_tensor(idx + 1);
            written.verify(&tensor.param, &self.value(tensor)?)?;
        }
        Ok(())
    }

    fn value(&self, tensor: &UpcycledTensor) -> Result<candle_core::Tensor, ModelError> {
        tensor.value(&self.checkpoint, self.seed, self.experts.granularity)
    }

    fn dtype(&self, dtype: Option<DType>) -> DType {
        dtype.or(self.checkpoint.float_dtype()).unwrap_or(DType::F32)
    }

    fn n_params(&self) -> usize {
        self.tensors.iter().map(|tensor| tensor.param.numel()).sum()
    }
}
