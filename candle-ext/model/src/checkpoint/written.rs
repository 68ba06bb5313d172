//! Comparison of written tensors with the values that were computed for them.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use candlewick_ops::{self as ops, to_host};

use super::{Checkpoint, dtype_on_disk};
use crate::{ModelError, ParamSpec};

/// A checkpoint that was written with rounding to a dtype, read back.
pub(crate) struct WrittenTensors {
    folder: PathBuf,
    checkpoint: Checkpoint,
    dtype: DType,
}

impl WrittenTensors {
    /// Opens the folder that was written with `dtype`.
    pub(crate) fn open(folder: &Path, dtype: DType) -> Result<Self, ModelError> {
        Ok(Self { folder: folder.to_path_buf(), checkpoint: Checkpoint::open(folder)?, dtype })
    }

    /// Returns the written values in f32.
    ///
    /// # Errors
    /// If one is not finite, or differs from the f32 value `exact`, rounded to the dtype on disk.
    pub(crate) fn verify(&self, param: &ParamSpec, exact: &Tensor) -> Result<Tensor, ModelError> {
        let found = self.checkpoint.param(param, DType::F32, &Device::Cpu)?;
        let wrong = |problem: &str| ModelError::mismatch(&self.folder, format!("tensor `{}` {problem}", param.name));
        if !sum_of_squares(&found)?.is_finite() {
            return Err(wrong(&format!(
                "has values that are not finite in {:?}; check the input weights for NaN, or write with --dtype f32 or bf16",
                self.dtype
            )));
        }
        let want = exact.to_dtype(dtype_on_disk(param, self.dtype))?.to_dtype(DType::F32)?;
        if sum_of_squares(&(&found - &want)?)? != 0.0 {
            return Err(wrong(
                "was written with other values than computed; check the disk, and run the command again",
            ));
        }
        Ok(found)
    }
}

/// Returns the sum of squares, accumulated in f64.
pub(crate) fn sum_of_squares(tensor: &Tensor) -> Result<f64, ModelError> {
    Ok(to_host(&ops::sum_of_squares(tensor)?)?.to_scalar()?)
}
