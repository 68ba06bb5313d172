//! Quantization of a weight of which each rank has a shard: codes of its part, with the scale of the whole weight.

use candle_core::{Result, Tensor, bail};

use super::layers::Fp8Linear;
use super::matrix::fp8_quantize;
use super::operands::{Fp8Operands, ScaleSource, scale_of_amax};
use super::recipe::Fp8Operand;
use super::rounding::Fp8Rounding;

/// Columns of the matrix as which a part is quantized, if its length allows: full tiles of the CUDA kernel.
const COLUMNS: usize = 128;

impl Fp8Linear {
    /// Records the amax of a part of the weight, f32 [1], for the next update of delayed scaling.
    pub fn record_weight_amax(&self, amax: &Tensor) -> Result<()> {
        self.raise_amax(Fp8Operand::Weight, amax)
    }

    /// Returns the scale of the weight in this step, f32 [1], from the amax of the whole weight, f32 [1]. Delayed scaling reads
    /// the amax in its first step alone.
    ///
    /// Fails with blockwise scaling.
    pub fn weight_scale(&self, amax: &Tensor) -> Result<Tensor> {
        self.with_scales(Fp8Operand::Weight, amax, |amax, source| match source {
            ScaleSource::Fixed { scale } | ScaleSource::Delayed { scale, .. } => Ok(scale.clone()),
            ScaleSource::First { rule, .. } | ScaleSource::Current(rule) => {
                scale_of_amax(amax, rule, self.format(Fp8Operand::Weight))
            }
            ScaleSource::Blockwise(..) => bail!(
                "{}: fp8_param_gather: shards of a weight divide the blocks of blockwise scaling; use delayed or current \
                 scaling, or turn fp8_param_gather off",
                self.module()
            ),
        })
    }

    /// Returns the codes of a part of the weight, u8 [n] of n elements, with the [scale](Self::weight_scale) of the whole
    /// weight.
    pub fn quantize_part(&self, part: &Tensor, scale: &Tensor) -> Result<Tensor> {
        let n = part.elem_count();
        let columns = if n.is_multiple_of(COLUMNS) { COLUMNS } else { n.max(1) };
        let rows = part.reshape((n / columns, columns))?;
        let matrix = fp8_quantize(&rows, scale, self.format(Fp8Operand::Weight), Fp8Rounding::Nearest)?;
        if let Some(stats) = self.step_stats() {
            self.add_sums(Fp8Operand::Weight, &rows, &matrix, &stats)?;
        }
        matrix.codes.flatten_all()
    }

    /// Returns the weight of the codes of all its parts, u8 [rows, columns], with its scale.
    pub fn weight_from_codes(&self, codes: Tensor, scale: &Tensor) -> Result<Fp8Operands> {
        Fp8Operands::from_codes(codes, scale, self.format(Fp8Operand::Weight))
    }
}
