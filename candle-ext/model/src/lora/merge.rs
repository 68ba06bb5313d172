//! Merge of a LoRA adapter into its base model, one tensor at a time.

use std::path::Path;

use candle_core::{DType, Device, Tensor};

use super::{AdapterFolder, AdapterSpec};
use crate::{
    Config, Model, ModelError, ParamSpec,
    checkpoint::{AuxiliaryFiles, Checkpoint, CheckpointExport, WrittenTensors, require_empty, sum_of_squares},
};

/// A merge of a LoRA adapter into its base model.
#[derive(Clone, Copy, Debug)]
pub struct AdapterMerge<'a> {
    /// Folder of the base model.
    pub base: &'a Path,
    /// Adapter folder.
    pub adapter: &'a Path,
    /// Output folder. It must be empty or missing.
    pub output: &'a Path,
    /// Dtype of the merged weights on disk; `None` for that of the base model.
    pub dtype: Option<DType>,
    /// Maximum size of a safetensors shard, in bytes.
    pub shard_bytes: u64,
}

/// Report of a merge.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MergeReport {
    /// Dtype of the merged weights on disk.
    pub dtype: DType,
    /// Number of merged weight matrices.
    pub n_matrices: usize,
    /// Number of parameters written.
    pub n_params: usize,
    /// Relative rounding error: norm of the rounding to `dtype` over norm of the LoRA update.
    pub rounding: f64,
}

impl AdapterMerge<'_> {
    /// Writes the merged model, reads it back and compares every value.
    ///
    /// Tokenizer and chat template come from the adapter folder if it has them. At most one f32 tensor and its update
    /// are in memory.
    pub fn run(&self) -> Result<MergeReport, ModelError> {
        require_empty(self.output)?;
        let source = Source::open(self.base, self.adapter)?;
        let dtype = self.dtype.or(source.base.float_dtype()).unwrap_or(DType::F32);
        let folders = [self.adapter, self.base];
        let export = CheckpointExport {
            folder: self.output,
            config: source.model.config(),
            auxiliary_files: AuxiliaryFiles { folders: &folders, chat_template: None, files: &[] },
            dtype,
            shard_bytes: self.shard_bytes,
        };
        export.save(source.model.base_params(), |param| source.merged(param).map_err(candle_core::Error::wrap))?;
        // The folder was empty before, so a failed merge can be deleted.
        self.verify(&source, dtype).inspect_err(|_| drop(std::fs::remove_dir_all(self.output)))
    }

    fn verify(&self, source: &Source, dtype: DType) -> Result<MergeReport, ModelError> {
        let written = WrittenTensors::open(self.output, dtype)?;
        let (mut n_matrices, mut n_params) = (0, 0);
        let (mut lost, mut changed) = (0.0, 0.0);
        for param in source.model.base_params() {
            let exact = source.merged(param)?;
            let found = written.verify(param, &exact)?;
            n_params += param.numel();
            if source.adapter_on(param).is_some() {
                n_matrices += 1;
                lost += sum_of_squares(&(&found - &exact)?)?;
                changed += sum_of_squares(&(&exact - source.read(param)?)?)?;
            }
        }
        let rounding = if changed > 0.0 { (lost / changed).sqrt() } else { 0.0 };
        Ok(MergeReport { dtype, n_matrices, n_params, rounding })
    }
}

/// A memory-mapped base model and adapter.
struct Source {
    model: Model,
    base: Checkpoint,
    adapter: Checkpoint,
}

impl Source {
    fn open(base: &Path, adapter: &Path) -> Result<Self, ModelError> {
        let adapter = AdapterFolder::open(adapter)?;
        let model = Model::new(Config::read(base)?, Some(adapter.config.clone()))?;
        let base = Checkpoint::open(base)?;
        adapter.check_base(&base)?;
        base.check(model.base_params())?;
        adapter.weights.check(model.adapter_params())?;
        Ok(Self { model, base, adapter: adapter.weights })
    }

    fn adapter_on(&self, param: &ParamSpec) -> Option<&AdapterSpec> {
        let module = param.name.strip_suffix(".weight")?;
        self.model.adapters().find(|adapter| adapter.module == module)
    }

    /// Returns the base value of a parameter, in f32.
    fn read(&self, param: &ParamSpec) -> Result<Tensor, ModelError> {
        self.base.param(param, DType::F32, &Device::Cpu)
    }

    /// Returns the merged value of a parameter, in f32.
    fn merged(&self, param: &ParamSpec) -> Result<Tensor, ModelError> {
        let base = self.read(param)?;
        let Some(adapter) = self.adapter_on(param) else { return Ok(base) };
        let [n_out, n_in] = param.shape[..] else {
            return Err(ModelError::mismatch(Path::new(&param.name), "an adapter sits on a tensor that is no matrix"));
        };
        let factor = |name: String, shape: [usize; 2]| self.adapter.tensor(&name, &shape, DType::F32, &Device::Cpu);
        let (a, b) = (factor(adapter.a_name(), [adapter.r, n_in])?, factor(adapter.b_name(), [n_out, adapter.r])?);
        Ok(super::merge_lora(&base, &a, &b, adapter.scaling)?)
    }
}
