//! Formats of quantized weights: code values, scale blocks and sizes.

use candle_core::{DType, Result, bail};

/// Storage of a weight's elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WeightStorage {
    /// Floats, in the compute dtype.
    Dense,
    /// f32 in every compute dtype, such as the expert bias of a router.
    F32,
    /// 8-bit codes with scales. Only linear layers accept them, and they are frozen.
    Quantized(&'static QuantFormat),
}

/// 8-bit quantization format: the values of the codes, and the blocks that share a scale.
#[derive(Clone, Copy, Debug)]
pub struct QuantFormat {
    /// Name for error messages.
    pub name: &'static str,
    /// Value of each code, positive and negative. Codes with non-finite values are never chosen.
    pub codes: &'static [f32; 256],
    /// Block of elements that share a scale.
    pub block: ScaleBlock,
    /// Rounding of scales.
    pub scales: ScaleRounding,
}

impl PartialEq for QuantFormat {
    /// Compares the bits of the codes' values: a NaN equals itself.
    fn eq(&self, other: &Self) -> bool {
        let bits = |format: &Self| format.codes.map(f32::to_bits);
        let rest = |format: &Self| (format.name, format.block, format.scales);
        rest(self) == rest(other) && bits(self) == bits(other)
    }
}

/// Elements of a matrix that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleBlock {
    /// The whole matrix (per-tensor scale).
    Tensor,
    /// One row (per-channel scale).
    Row,
    /// One tile (block-wise scale). The last tiles of a row or column may be smaller.
    Tile {
        /// Rows of the tile.
        rows: usize,
        /// Columns of the tile.
        columns: usize,
    },
}

/// Rounding of a block's scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleRounding {
    /// No rounding: the largest magnitude of the block divided by that of the codes.
    Exact,
    /// Next power of two at or above the exact scale. Quantizing a dequantized matrix then changes no bit.
    PowerOfTwo,
}

/// Sizes of a quantized matrix [n, k] and of its blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QuantShape {
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) block_rows: usize,
    pub(crate) block_columns: usize,
}

impl WeightStorage {
    /// Returns the bytes of a weight of `shape`; dense elements have dtype `dense`.
    pub fn n_bytes(&self, shape: &[usize], dense: DType) -> Result<usize> {
        Ok(self.n_elements(shape)? * self.dtype(dense).size_in_bytes())
    }

    /// Returns the dtype of a flat buffer of such weights: u8 for quantized ones, else `dense`.
    pub fn dtype(&self, dense: DType) -> DType {
        match self {
            Self::Dense => dense,
            Self::F32 => DType::F32,
            Self::Quantized(_) => DType::U8,
        }
    }

    /// Returns the number of elements of dtype [`WeightStorage::dtype`] that a weight of `shape` takes.
    pub fn n_elements(&self, shape: &[usize]) -> Result<usize> {
        match self {
            Self::Dense | Self::F32 => Ok(shape.iter().product()),
            Self::Quantized(format) => Ok(format.shape(shape)?.weight_bytes()),
        }
    }
}

impl QuantFormat {
    /// Returns the largest magnitude that both a positive and a negative code reach.
    pub(crate) fn max_code(&self) -> f32 {
        let finite = || self.codes.iter().copied().filter(|code| code.is_finite());
        finite().fold(0.0, f32::max).min(-finite().fold(0.0, f32::min))
    }

    /// Returns true if a split of dim `dim` at index `at` separates no block.
    pub fn splits_at(&self, dim: usize, at: usize) -> bool {
        match (self.block, dim) {
            (ScaleBlock::Tensor, _) | (ScaleBlock::Row, 1..) => false,
            (ScaleBlock::Row, 0) => true,
            (ScaleBlock::Tile { rows, .. }, 0) => at.is_multiple_of(rows),
            (ScaleBlock::Tile { columns, .. }, _) => at.is_multiple_of(columns),
        }
    }

    pub(crate) fn shape(&self, dims: &[usize]) -> Result<QuantShape> {
        let &[n, k] = dims else { bail!("{}: only matrices are quantized, got shape {dims:?}", self.name) };
        let (block_rows, block_columns) = match self.block {
            ScaleBlock::Tensor => (n, k),
            ScaleBlock::Row => (1, k),
            ScaleBlock::Tile { rows, columns } => (rows, columns),
        };
        Ok(QuantShape { n, k, block_rows: block_rows.max(1), block_columns: block_columns.max(1) })
    }
}

impl QuantShape {
    /// Returns the bytes of the whole weight: codes, padding and scales.
    pub(crate) fn weight_bytes(&self) -> usize {
        self.scales_start() + self.n_scales() * size_of::<f32>()
    }

    /// Returns the byte offset of the first scale.
    pub(crate) fn scales_start(&self) -> usize {
        (self.n * self.k).next_multiple_of(size_of::<f32>())
    }

    fn n_scales(&self) -> usize {
        self.n.div_ceil(self.block_rows) * self.blocks_a_row()
    }

    /// Returns the number of blocks per row.
    pub(crate) fn blocks_a_row(&self) -> usize {
        self.k.div_ceil(self.block_columns)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn format(block: ScaleBlock) -> QuantFormat {
        QuantFormat { name: "test", codes: &[0.0; 256], block, scales: ScaleRounding::Exact }
    }

    #[test]
    fn bytes_are_those_of_codes_and_scales() {
        let n_bytes = |block, shape: &[usize]| {
            WeightStorage::Quantized(Box::leak(Box::new(format(block)))).n_bytes(shape, DType::BF16).unwrap()
        };
        assert_eq!(n_bytes(ScaleBlock::Tensor, &[3, 5]), 16 + 4);
        assert_eq!(n_bytes(ScaleBlock::Row, &[3, 5]), 16 + 12);
        assert_eq!(n_bytes(ScaleBlock::Tile { rows: 2, columns: 4 }, &[3, 5]), 16 + 16);
        assert_eq!(WeightStorage::Dense.n_bytes(&[3, 5], DType::BF16).unwrap(), 30);
        let refused = format(ScaleBlock::Row).shape(&[2, 3, 4]).unwrap_err().to_string();
        assert!(refused.contains("only matrices are quantized"), "{refused}");
    }
}
