//! FP8 matrices: codes with the inverse scales of their blocks.

use candle_core::{Result, Tensor, bail};

use super::cpu::{self, BlockSizes};
#[cfg(any(feature = "cuda", feature = "emulate"))]
use super::cuda;
use super::format::Fp8Format;
use super::recipe::{ScaleRule, largest_number};
use super::rounding::Fp8Rounding;
use crate::device::on_device;
use crate::floats::check_dtype;
use crate::quantized::ScaleBlock;
use crate::quantized::cpu::{QuantizedRows, Scales};
use crate::storage::{Host, host};

/// Matrix [rows, columns] in FP8: element = code value * inverse scale of its block.
#[derive(Clone, Debug)]
pub struct Fp8Matrix {
    /// Codes, u8 [rows, columns].
    pub codes: Tensor,
    /// Inverse scale of each block, f32, row by row: [1] for one block.
    pub scale_inv: Tensor,
    /// Format of the codes.
    pub format: Fp8Format,
    /// Elements that share a scale.
    pub block: ScaleBlock,
    pub(super) scale_order: ScaleOrder,
}

/// Order of the inverse scales of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScaleOrder {
    /// Row by row.
    Rows,
    /// As cuBLASLt reads them.
    #[cfg(any(feature = "cuda", feature = "emulate"))]
    CublasLt,
}

/// Returns the largest magnitude of a tensor, f32 [1] on its device; NaN counts as nothing.
pub fn amax(x: &Tensor) -> Result<Tensor> {
    check_dtype("amax", "the tensor", x.dtype())?;
    let x = x.detach().contiguous()?;
    on_device!("amax", x, {
        cpu => Tensor::new(&[cpu::amax(host("amax", &x)?.floats()?)], x.device()),
        cuda => cuda::amax(&x),
    })
}

/// Quantizes a matrix with a given `scale`, f32 [1]. Larger magnitudes than the format's saturate.
pub fn fp8_quantize(x: &Tensor, scale: &Tensor, format: Fp8Format, rounding: Fp8Rounding) -> Result<Fp8Matrix> {
    let x = matrix(x)?;
    let (codes, scale_inv) = on_device!("fp8_quantize", x, {
        cpu => {
            let scale = host("fp8_quantize", scale)?.slice::<f32>()?[0];
            let codes = cpu::encode(host("fp8_quantize", &x)?.floats()?, scale, format, rounding);
            (Tensor::from_vec(codes, x.shape(), x.device())?, Tensor::new(&[1.0 / scale], x.device())?)
        },
        cuda => cuda::quantize(&x, scale, format, rounding)?,
    });
    Ok(Fp8Matrix { codes, scale_inv, format, block: ScaleBlock::Tensor, scale_order: ScaleOrder::Rows })
}

/// Quantizes a matrix in CPU memory like [`fp8_quantize`]. Returns also its amax, f32 [1].
pub(super) fn quantize_with_amax_on_cpu(
    x: &Tensor,
    scale: &Tensor,
    format: Fp8Format,
    rounding: Fp8Rounding,
) -> Result<(Fp8Matrix, Tensor)> {
    let x = matrix(x)?;
    let scale = host("fp8_quantize", scale)?.slice::<f32>()?[0];
    let (codes, amax) = cpu::encode_with_amax(host("fp8_quantize", &x)?.floats()?, scale, format, rounding);
    let codes = Tensor::from_vec(codes, x.shape(), x.device())?;
    let scale_inv = Tensor::new(&[1.0 / scale], x.device())?;
    let (block, scale_order) = (ScaleBlock::Tensor, ScaleOrder::Rows);
    Ok((Fp8Matrix { codes, scale_inv, format, block, scale_order }, Tensor::new(&[amax], x.device())?))
}

/// Quantizes a matrix with scales by `rule` from the amax of each block.
pub fn fp8_quantize_current(
    x: &Tensor,
    block: ScaleBlock,
    rule: ScaleRule,
    format: Fp8Format,
    rounding: Fp8Rounding,
) -> Result<Fp8Matrix> {
    let x = matrix(x)?;
    let largest = largest_number(x.dtype());
    let (codes, scale_inv) = on_device!("fp8_quantize", x, {
        cpu => {
            let elements = host("fp8_quantize", &x)?;
            let elements = elements.floats()?;
            let (codes, scale_inv) = match blocks(block, x.dims()) {
                None => {
                    let scale = rule.scale(cpu::amax(elements), format, f32::MAX);
                    (cpu::encode(elements, scale, format, rounding), vec![1.0 / scale])
                }
                Some(blocks) => cpu::encode_blocks(elements, blocks, format, (rule, largest), rounding),
            };
            let n_scales = scale_inv.len();
            (Tensor::from_vec(codes, x.shape(), x.device())?, Tensor::from_vec(scale_inv, n_scales, x.device())?)
        },
        cuda => cuda::quantize_current(&x, block, rule, format, rounding)?,
    });
    Ok(Fp8Matrix { codes, scale_inv, format, block, scale_order: ScaleOrder::Rows })
}

impl Fp8Matrix {
    /// Creates an operand of cuBLASLt's matmuls, with inverse scales in the order of
    /// [`Scaling`](crate::cuda::gemm::Scaling).
    #[cfg(any(feature = "cuda", feature = "emulate"))]
    pub(crate) fn in_order_of_cublas_lt(
        codes: Tensor,
        scale_inv: Tensor,
        format: Fp8Format,
        block: ScaleBlock,
    ) -> Self {
        Self { codes, scale_inv, format, block, scale_order: ScaleOrder::CublasLt }
    }

    /// Returns the matrix in f32: each code value times its inverse scale, rounded once.
    pub fn dequantize(&self) -> Result<Tensor> {
        let (rows, columns) = self.codes.dims2()?;
        if self.scale_order != ScaleOrder::Rows {
            bail!("fp8_dequantize: the inverse scales are not in the order of rows")
        }
        on_device!("fp8_dequantize", self.codes, {
            cpu => {
                let elements = Fp8Host::lock(self)?;
                let mut out = vec![0.0; rows * columns];
                elements.rows()?.read_into(&mut out);
                Tensor::from_vec(out, (rows, columns), self.codes.device())
            },
            cuda => cuda::dequantize(&self.codes, &self.scale_inv, self.format, self.block_sizes()),
        })
    }

    /// Returns rows and columns of a block, at least 1.
    fn block_sizes(&self) -> [usize; 2] {
        let dims = self.codes.dims();
        let [rows, columns] = match blocks(self.block, dims) {
            None => [dims[0], dims[1]],
            Some(blocks) => [blocks.block_rows, blocks.block_columns],
        };
        [rows.max(1), columns.max(1)]
    }
}

/// Read lock on an FP8 matrix in CPU memory.
pub(super) struct Fp8Host<'a> {
    codes: Host<'a>,
    scale_inv: Host<'a>,
    matrix: &'a Fp8Matrix,
}

impl<'a> Fp8Host<'a> {
    pub(super) fn lock(matrix: &'a Fp8Matrix) -> Result<Self> {
        let (codes, scale_inv) = (host("fp8", &matrix.codes)?, host("fp8", &matrix.scale_inv)?);
        Ok(Self { codes, scale_inv, matrix })
    }

    /// Borrows the rows with their scales.
    pub(super) fn rows(&self) -> Result<QuantizedRows<'_>> {
        self.rows_with(Scales::Floats(self.scale_inv.slice()?))
    }

    /// Borrows the rows as exact operands of a matmul, and returns the factor of its result.
    ///
    /// With one scale the rows are code values, and the factor is the inverse scale.
    pub(super) fn operand(&self) -> Result<(QuantizedRows<'_>, f32)> {
        match self.matrix.block {
            ScaleBlock::Tensor => Ok((self.rows_with(Scales::One)?, self.scale_inv.slice::<f32>()?[0])),
            _ => Ok((self.rows()?, 1.0)),
        }
    }

    fn rows_with<'s>(&'s self, scales: Scales<'s>) -> Result<QuantizedRows<'s>> {
        let (dims, blocks) = (self.matrix.codes.dims(), self.matrix.block_sizes());
        Ok(QuantizedRows::from_parts(self.codes.slice()?, self.matrix.format.values(), scales, dims, blocks))
    }
}

/// Returns the blocks of a matrix; `None` if it is one block.
fn blocks(block: ScaleBlock, dims: &[usize]) -> Option<BlockSizes> {
    let columns = dims[1];
    match block {
        ScaleBlock::Tensor => None,
        ScaleBlock::Row => Some(BlockSizes { columns, block_rows: 1, block_columns: columns.max(1) }),
        ScaleBlock::Tile { rows, columns: block_columns } => {
            Some(BlockSizes { columns, block_rows: rows, block_columns })
        }
    }
}

fn matrix(x: &Tensor) -> Result<Tensor> {
    check_dtype("fp8_quantize", "the matrix", x.dtype())?;
    if x.rank() != 2 {
        bail!("fp8_quantize: want a matrix [rows, columns], got {:?}", x.dims())
    }
    x.detach().contiguous()
}
