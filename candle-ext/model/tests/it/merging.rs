//! Merge of an adapter into a folder, for tests.

use std::path::Path;

use candle_core::DType;
use candlewick_model::checkpoint::{AuxiliaryFiles, ExpertTensors};
use candlewick_model::{MergeReport, MergedModel, ModelError, SafetensorsExport};

/// Merges an adapter into its base model and writes the new folder `output`, in several files.
pub(crate) fn merge(
    output: &Path,
    base: &Path,
    adapter: &Path,
    dtype: Option<DType>,
) -> Result<MergeReport, ModelError> {
    let model = MergedModel::open(base, Some(adapter))?;
    std::fs::create_dir(output).unwrap();
    let folders: Vec<&Path> = model.folders().iter().map(AsRef::as_ref).collect();
    let auxiliary_files = AuxiliaryFiles { folders: &folders, ..AuxiliaryFiles::default() };
    SafetensorsExport { auxiliary_files, dtype, shard_bytes: 4000, expert_tensors: ExpertTensors::default() }.write(
        &model,
        output,
        &|_, _| (),
    )
}
