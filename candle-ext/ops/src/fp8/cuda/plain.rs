//! Quantization to row-major codes on CUDA.

use candle_core::{Result, Tensor};

use super::blocks::quantize_blocks;
use super::cast::{CastLayout, CastScale, CastSource, cast};
use super::current_scale;
use crate::fp8::format::Fp8Format;
use crate::fp8::recipe::ScaleRule;
use crate::fp8::rounding::Fp8Rounding;
use crate::quantized::ScaleBlock;

/// Returns codes and inverse scale of a contiguous matrix with a given scale.
pub(in crate::fp8) fn quantize(
    x: &Tensor,
    scale: &Tensor,
    format: Fp8Format,
    rounding: Fp8Rounding,
) -> Result<(Tensor, Tensor)> {
    let layout = CastLayout { codes: Some(x.dims()[0]), transposed: None };
    let scale = CastScale { scale, record: None, rounding };
    let [output] = cast(CastSource::Matrix(x), layout, [scale], format)?;
    Ok((output.codes.into_tensor(x.shape()), output.scale_inv))
}

/// Returns codes and inverse scales of a contiguous matrix, with scales from the amax of each block.
pub(in crate::fp8) fn quantize_current(
    x: &Tensor,
    block: ScaleBlock,
    rule: ScaleRule,
    format: Fp8Format,
    rounding: Fp8Rounding,
) -> Result<(Tensor, Tensor)> {
    if block == ScaleBlock::Tensor {
        let [_, scale] = current_scale(x, rule, format)?;
        return quantize(x, &scale, format, rounding);
    }
    quantize_blocks(x, block, rule, format, rounding)
}
