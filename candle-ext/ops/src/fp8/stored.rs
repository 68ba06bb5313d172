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
use crate::cuda::gemm::Scaling;
use crate::device::on_device;
use crate::transfer::to_host_contiguous;
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
    let scales =
        to_host_contiguous(&bytes.narrow(0, sizes.scales_start(), bytes.elem_count() - sizes.scales_start())?)?;
    let scales: Vec<f32> =
        scales.to_vec1::<u8>()?.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    on_device!("fp8", codes, {
        cpu => {
            let scale_inv = Tensor::new(scales, codes.device())?;
            let matrix = Fp8Matrix { codes, scale_inv, format, block: storage.block, scale_order: ScaleOrder::Rows };
            Ok(Some(Fp8Operands { rowwise: Some(matrix.clone()), columnwise: Some(matrix) }))
        },
        cuda => {
            if !cuda::reads_codes(&codes)? {
                return Ok(None);
            }
            let blocks_a_row = sizes.blocks_a_row();
            let matrix = |codes: Tensor, is_transposed: bool| -> Result<Fp8Matrix> {
                let [outer, inner] = if is_transposed { [k, n] } else { [n, k] };
                let (n_scales, [of_outer, of_inner]) = Scaling::Block128.layout(outer, inner);
                let mut ordered = vec![0.0f32; n_scales];
                for (i, scale) in scales.iter().enumerate() {
                    let (row, column) = (i / blocks_a_row, i % blocks_a_row);
                    let (outer, inner) = if is_transposed { (column, row) } else { (row, column) };
                    ordered[outer * of_outer + inner * of_inner] = *scale;
                }
                let scale_inv = Tensor::new(ordered, codes.device())?;
                Ok(Fp8Matrix::in_order_of_cublas_lt(codes, scale_inv, format, storage.block))
            };
            let transposed = match orientation.is_columnwise() {
                true => Some(matrix(cuda::transpose(&codes)?, true)?),
                false => None,
            };
            Ok(Some(Fp8Operands { rowwise: Some(matrix(codes, false)?), columnwise: transposed }))
        },
    })
}
