//! Outputs of GEMMs in dtypes that cuBLASLt does not have.

use candle_core::{DType, Result, Tensor};

use crate::in_place::copy_into;

/// Calls `compute` with `dw`, the output of a GEMM. With f32 `inputs` the output must be f32: then `compute` gets an f32 copy,
/// which is rounded to `dw`.
pub(crate) fn with_output(inputs: DType, dw: &Tensor, compute: impl FnOnce(&Tensor) -> Result<()>) -> Result<()> {
    if inputs != DType::F32 || dw.dtype() == DType::F32 {
        return compute(dw);
    }
    let wide = dw.to_dtype(DType::F32)?;
    compute(&wide)?;
    copy_into(dw, &wide)
}
