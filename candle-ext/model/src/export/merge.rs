//! Merge of a LoRA adapter into its base model, as a Hugging Face folder.

use std::path::Path;

use candle_core::DType;

use super::{MergeReport, MergedModel, SafetensorsExport, TensorCallback};
use crate::ModelError;
use crate::checkpoint::{AuxiliaryFiles, ExpertTensors, StagingFolder, require_empty};

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

impl AdapterMerge<'_> {
    /// Writes the merged model, reads it back and compares every value. The folder appears after that.
    ///
    /// Tokenizer and chat template come from the adapter folder if it has them.
    pub fn run(&self, on_tensor: TensorCallback) -> Result<MergeReport, ModelError> {
        require_empty(self.output)?;
        let model = MergedModel::open(self.base, Some(self.adapter))?;
        let folders: Vec<&Path> = model.folders().iter().map(|folder| folder.as_path()).collect();
        let export = SafetensorsExport {
            auxiliary_files: AuxiliaryFiles { folders: &folders, chat_template: None, files: &[] },
            dtype: self.dtype,
            shard_bytes: self.shard_bytes,
            expert_tensors: ExpertTensors::default(),
        };
        let staging = StagingFolder::begin(self.output)?;
        let report = export.write(&model, staging.folder(), on_tensor)?;
        staging.commit()?;
        Ok(report)
    }
}
