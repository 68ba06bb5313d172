//! Hugging Face folder of a merged model, verified value by value.

use std::path::Path;

use candle_core::DType;

use super::{MergedModel, TensorCallback};
use crate::checkpoint::{AuxiliaryFiles, CheckpointExport, ExpertTensors, WrittenTensors, sum_of_squares};
use crate::{ModelError, ParamGroupKind, ParamSpec};

/// A Hugging Face folder to write.
#[derive(Clone, Copy, Debug)]
pub struct SafetensorsExport<'a> {
    /// Files besides the weights.
    pub auxiliary_files: AuxiliaryFiles<'a>,
    /// Dtype of the weights on disk; `None` for that of the model.
    pub dtype: Option<DType>,
    /// Maximum size of a safetensors shard, in bytes.
    pub shard_bytes: u64,
    /// Tensors of the routed experts.
    pub expert_tensors: ExpertTensors,
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

impl SafetensorsExport<'_> {
    /// Writes the model into an existing folder, reads it back and compares every value.
    ///
    /// At most one f32 tensor, its update and its values on disk are in memory. Each tensor counts twice in `on_tensor`: written and compared.
    pub fn write(
        &self,
        model: &MergedModel,
        folder: &Path,
        on_tensor: TensorCallback,
    ) -> Result<MergeReport, ModelError> {
        let dtype = self.dtype.unwrap_or(model.dtype());
        let Self { auxiliary_files, shard_bytes, expert_tensors, .. } = *self;
        let config = model.config();
        let export = CheckpointExport { folder, config, auxiliary_files, dtype, shard_bytes, expert_tensors };
        let n_tensors = model.params().count();
        let mut n_done = 0;
        export.write(model.carried(), model.params(), |param| {
            n_done += 1;
            on_tensor(n_done, 2 * n_tensors);
            model.value(param).map_err(candle_core::Error::wrap)
        })?;
        model.carried().map_or(Ok(()), |carried| carried.verify(folder, config))?;
        verify(model, folder, dtype, &|n_done| on_tensor(n_tensors + n_done, 2 * n_tensors))
    }
}

fn verify(
    model: &MergedModel,
    folder: &Path,
    dtype: DType,
    on_tensor: &dyn Fn(usize),
) -> Result<MergeReport, ModelError> {
    let written = WrittenTensors::open(folder, model.config(), dtype)?;
    let (mut n_matrices, mut n_params) = (0, 0);
    let (mut lost, mut changed) = (0.0, 0.0);
    for (idx, param) in model.params().enumerate() {
        on_tensor(idx + 1);
        let exact = model.value(param)?;
        let found = written.verify(param, &exact)?;
        n_params += param.numel();
        if model.is_adapted(param) {
            n_matrices += n_matrices_of(param);
            lost += sum_of_squares(&(found.to_dtype(DType::F32)? - &exact)?)?;
            changed += sum_of_squares(&(&exact - model.base_value(param)?)?)?;
        }
    }
    let rounding = if changed > 0.0 { (lost / changed).sqrt() } else { 0.0 };
    Ok(MergeReport { dtype, n_matrices, n_params, rounding })
}

/// Returns the number of matrices that a parameter stacks: the experts' of a layer, else 1.
fn n_matrices_of(param: &ParamSpec) -> usize {
    match (param.group, param.hub.as_deref()) {
        (ParamGroupKind::Expert, Some(hub)) => hub.fused_shape[0],
        _ => 1,
    }
}
