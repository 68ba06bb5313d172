//! Weights stored in FP8 as operands of matmuls, without dequantization.
//!
//! A stored weight has codes in E4M3 and a scale, a power of two, for each 128x128 elements: an operand of blockwise scaling with
//! such scales. Quantizing its values again would change none of them.

use candle_core::{Result, Tensor};

#[cfg(any(feature = "cuda", feature = "emulate"))]
use super::cuda;
use super::format::{FP8_WEIGHT_FORMAT, Fp8Format};
use super::matrix::{Fp8Matrix, ScaleOrder};
use super::operands::Fp8Operands;
use super::recipe::{Fp8Orientation, ScaleRule};
#[cfg(any(feature = "cuda", feature = "emulate"))]
use crate::cuda::address;
use crate::device::on_device;
use crate::transfer::to_host;
use crate::weight::StoredWeight;

/// Returns the operands of a stored weight, which share its codes. A GPU copies the transposed ones, if a matmul reads them.
///
/// Returns `None` for another storage, other scales, or sizes that a GPU's matmuls cannot read.
#[cfg_attr(not(any(feature = "cuda", feature = "emulate")), expect(unused_variables, reason = "only CUDA copies"))]
pub(super) fn stored_operands(
    stored: &StoredWeight,
    rule: ScaleRule,
    format: Fp8Format,
    orientation: Fp8Orientation,
) -> Result<Option<Fp8Operands>> {
    let StoredWeight::Quantized { bytes, format: storage, shape } = stored else { return Ok(None) };
    let is_same = **storage == FP8_WEIGHT_FORMAT && format == Fp8Format::E4m3;
    if !is_same || !rule.power_of_two || rule.amax_epsilon > 0.0 {
        return Ok(None);
    }
    let (sizes, &[n, k]) = (storage.shape(shape)?, shape);
    let codes = bytes.narrow(0, 0, n * k)?.reshape((n, k))?;
    let scales = bytes.narrow(0, sizes.scales_start(), bytes.elem_count() - sizes.scales_start())?;
    on_device!("fp8", codes, {
        cpu => {
            let scales = to_host(&scales)?.to_vec1::<u8>()?;
            let scales: Vec<f32> = scales.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
            let scale_inv = Tensor::new(scales, codes.device())?;
            let matrix = Fp8Matrix { codes, scale_inv, format, block: storage.block, scale_order: ScaleOrder::Rows };
            Ok(Some(Fp8Operands { rowwise: Some(matrix.clone()), columnwise: Some(matrix) }))
        },
        cuda => {
            if !cuda::reads_codes(&codes)? {
                return Ok(None);
            }
            let at = address("fp8", &scales)?;
            let matrix = |codes: Tensor, orientation| -> Result<Fp8Matrix> {
                // SAFETY: a stored weight has the scales of all blocks of 128x128 after its codes, row by row.
                let scale_inv = unsafe { cuda::ordered_scales(&scales, at, [n, k], orientation)? };
                Ok(Fp8Matrix::in_order_of_cublas_lt(codes, scale_inv, format, storage.block))
            };
            let transposed = match orientation.is_columnwise() {
                true => Some(matrix(cuda::transpose(&codes)?, Fp8Orientation::Columnwise)?),
                false => None,
            };
            Ok(Some(Fp8Operands { rowwise: Some(matrix(codes, Fp8Orientation::Rowwise)?), columnwise: transposed }))
        },
    })
}
