//! Comparison of written tensors with the values that were computed for them.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor, WithDType};
use candlewick_ops::{self as ops, to_host};
use half::{bf16, f16};
use rayon::prelude::*;

use super::element::{Element, with_elements};
use super::{Checkpoint, dtype_on_disk};
use crate::{Config, ModelError, ParamSpec};

/// A checkpoint that was written with rounding to a dtype, read back.
pub(crate) struct WrittenTensors {
    folder: PathBuf,
    checkpoint: Checkpoint,
    dtype: DType,
}

impl WrittenTensors {
    /// Opens the folder that was written with `dtype`.
    pub(crate) fn open(folder: &Path, config: &Config, dtype: DType) -> Result<Self, ModelError> {
        Ok(Self { folder: folder.to_path_buf(), checkpoint: Checkpoint::of_model(folder, config)?, dtype })
    }

    /// Returns the written values in the dtype on disk.
    ///
    /// # Errors
    /// If one is not finite, or differs from the f32 value `exact`, rounded to the dtype on disk.
    pub(crate) fn verify(&self, param: &ParamSpec, exact: &Tensor) -> Result<Tensor, ModelError> {
        let dtype = dtype_on_disk(param, self.dtype);
        let found = self.checkpoint.param(param, dtype, &Device::Cpu)?;
        let compared = match dtype {
            DType::BF16 => compare::<bf16>(&found, exact),
            DType::F16 => compare::<f16>(&found, exact),
            _ => compare::<f32>(&found, exact),
        };
        let wrong = |problem: &str| ModelError::mismatch(&self.folder, format!("tensor `{}` {problem}", param.name));
        match compared? {
            WrittenValues::Equal => Ok(found),
            WrittenValues::NotFinite => Err(wrong(&format!(
                "has values that are not finite in {:?}; check the input weights for NaN, or write with --dtype f32 or bf16",
                self.dtype
            ))),
            WrittenValues::Different => {
                Err(wrong("was written with other values than computed; check the disk, and run the command again"))
            }
        }
    }
}

/// Result of a comparison, the better one first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum WrittenValues {
    Equal,
    Different,
    NotFinite,
}

/// Compares values on disk with f32 values, rounded. No copy of either is made.
fn compare<T: Element + WithDType>(found: &Tensor, exact: &Tensor) -> candle_core::Result<WrittenValues> {
    let of_pair = |(found, exact): (&T, &f32)| match (found.to_f32(), T::from_f32(*exact).to_f32()) {
        (found, _) if !found.is_finite() => WrittenValues::NotFinite,
        (found, exact) if found == exact => WrittenValues::Equal,
        _ => WrittenValues::Different,
    };
    with_elements(found, |found| {
        with_elements(exact, |exact| found.par_iter().zip(exact).map(of_pair).max().unwrap_or(WrittenValues::Equal))
    })?
}

/// Returns the sum of squares, accumulated in f64.
pub(crate) fn sum_of_squares(tensor: &Tensor) -> Result<f64, ModelError> {
    Ok(to_host(&ops::sum_of_squares(tensor)?)?.to_scalar()?)
}
