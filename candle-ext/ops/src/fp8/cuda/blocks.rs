//! Quantization with a scale per block on CUDA: launches of `blocks.cuh` and `patches.cuh`.

use candle_core::{DType, Result, Tensor, bail};

use super::cast::{CastSource, CodeEncoding, GemmCodes, patch_blocks};
use super::{KERNELS, MULTIPLE, OP, is_stochastic, key_of, name_of};
use crate::cuda::gemm::Scaling;
use crate::cuda::{Arg, Blocks, DeviceAddress, FLAT_THREADS, Gpu, Out, gpu, suffix};
use crate::fp8::format::{FP8_BLOCK, Fp8Format};
use crate::fp8::recipe::{Fp8Operand, ScaleRule, largest_number};
use crate::fp8::rounding::Fp8Rounding;
use crate::quantized::ScaleBlock;

/// Blocks of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KernelBlock {
    /// 1x128; of transposed codes 128x1.
    Rows,
    /// 128x1.
    Columns,
    /// 128x128.
    Tiles,
}

impl KernelBlock {
    pub(super) fn of(block: ScaleBlock) -> Result<Self> {
        match block {
            ScaleBlock::Tile { rows: 1, columns: FP8_BLOCK } => Ok(Self::Rows),
            ScaleBlock::Tile { rows: FP8_BLOCK, columns: 1 } => Ok(Self::Columns),
            ScaleBlock::Tile { rows: FP8_BLOCK, columns: FP8_BLOCK } => Ok(Self::Tiles),
            other => bail!("{OP}: CUDA quantizes blocks of 1x128, 128x1 and 128x128, not {other:?}"),
        }
    }

    /// Returns the number of blocks along the rows and the columns of a matrix.
    fn blocks(self, rows: usize, columns: usize) -> [usize; 2] {
        match self {
            Self::Rows => [rows, columns.div_ceil(FP8_BLOCK)],
            Self::Columns => [rows.div_ceil(FP8_BLOCK), columns],
            Self::Tiles => [rows, columns].map(|n| n.div_ceil(FP8_BLOCK)),
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Rows => "1x128",
            Self::Columns => "128x1",
            Self::Tiles => "128x128",
        }
    }
}

/// Codes with inverse scales per block; zero addresses if they are not wanted.
#[derive(Clone, Copy)]
struct BlockOutput {
    codes: DeviceAddress,
    scale_inv: DeviceAddress,
    /// Strides of the inverse scales between rows and columns of blocks.
    strides: [usize; 2],
}

impl BlockOutput {
    const NONE: Self = Self { codes: 0, scale_inv: 0, strides: [0, 0] };

    fn args(&self) -> [Arg; 4] {
        let [row, column] = self.strides.map(|stride| Arg::I64(stride as i64));
        [Arg::Address(self.codes), Arg::Address(self.scale_inv), row, column]
    }
}

/// Outputs of a matrix, and its rounding.
struct BlockOutputs {
    plain: BlockOutput,
    transposed: BlockOutput,
    rounding: Fp8Rounding,
}

/// Launch that quantizes the matrices of a source with a scale per block.
struct BlockCast<'a> {
    source: CastSource<'a>,
    block: KernelBlock,
    padded_rows: usize,
    rule: ScaleRule,
    format: Fp8Format,
}

impl BlockCast<'_> {
    fn run(&self, outputs: &[BlockOutputs]) -> Result<()> {
        let Self { source, padded_rows, rule, .. } = *self;
        let [rows, columns] = source.sizes();
        let mut args = source.args()?;
        for output in outputs {
            args.extend(output.plain.args());
            args.extend(output.transposed.args());
            args.push(key_of(output.rounding));
        }
        args.extend([rows, padded_rows, columns].map(|n| Arg::I32(n as i32)));
        args.extend([
            is_stochastic(outputs[0].rounding),
            Arg::F32(rule.amax_epsilon),
            Arg::I32(i32::from(rule.power_of_two)),
            Arg::F32(largest_number(source.dtype())),
        ]);
        let (name, blocks) = self.kernel(outputs[0].rounding)?;
        // SAFETY: the matrices are [rows, columns]; the outputs have padded rows and an inverse scale per block; zero addresses
        // mean no output. A tile with rows one word longer fits in shared memory.
        unsafe { KERNELS.launch_blocks(source.gpu()?, &name, blocks, &args) }
    }

    /// Returns name and blocks of the kernel. No kernel reads blocks of 128x1 of row-major codes in patches.
    fn kernel(&self, rounding: Fp8Rounding) -> Result<(String, Blocks)> {
        let ([_, columns], format, block) = (self.source.sizes(), name_of(self.format), self.block.name());
        let uses_patches = self.source.uses_patches(rounding)? && self.block != KernelBlock::Columns;
        let name = match self.source {
            CastSource::Matrix(_) if !uses_patches => {
                let dtype = self.source.dtype();
                let row_bytes = FP8_BLOCK * dtype.size_in_bytes() + 4;
                let blocks = Blocks {
                    grid: [columns.div_ceil(FP8_BLOCK), self.padded_rows.div_ceil(FP8_BLOCK), 1],
                    threads: FLAT_THREADS,
                    shared_bytes: FP8_BLOCK * row_bytes,
                };
                return Ok((format!("blocks_{block}_{format}_{}", suffix(OP, dtype)?), blocks));
            }
            CastSource::Matrix(_) => format!("block_patches_{block}_{format}"),
            CastSource::GatedInput(_) => "block_gated_input".to_owned(),
            CastSource::NormedInput(_) => "block_normed_input".to_owned(),
            CastSource::GatedGrads(_) => format!("block_gated_grads_{format}"),
        };
        Ok((name, patch_blocks([self.padded_rows, columns])))
    }
}

/// Returns row-major codes and inverse scales of a contiguous matrix, with scales from the amax of each block.
pub(super) fn quantize_blocks(
    x: &Tensor,
    block: ScaleBlock,
    rule: ScaleRule,
    format: Fp8Format,
    rounding: Fp8Rounding,
) -> Result<(Tensor, Tensor)> {
    let (block, on) = (KernelBlock::of(block)?, gpu(OP, x)?);
    let [rows, columns] = [x.dims()[0], x.dims()[1]];
    let [n_rows, n_columns] = block.blocks(rows, columns);
    let codes = Out::new(on, DType::U8, rows * columns)?;
    let scale_inv = Out::new(on, DType::F32, n_rows * n_columns)?;
    let plain = BlockOutput { codes: codes.address, scale_inv: scale_inv.address, strides: [n_columns, 1] };
    let launch = BlockCast { source: CastSource::Matrix(x), block, padded_rows: rows, rule, format };
    launch.run(&[BlockOutputs { plain, transposed: BlockOutput::NONE, rounding }])?;
    Ok((codes.into_tensor(x.shape()), scale_inv.into_tensor(n_rows * n_columns)))
}

/// Quantizes the matrices of a source with scales per block, as `cast_operands` does.
pub(in crate::fp8) fn block_operands<const N: usize>(
    source: CastSource<'_>,
    roundings: [Fp8Rounding; N],
    (rule, operand): (ScaleRule, Fp8Operand),
    CodeEncoding { format, orientation }: CodeEncoding,
) -> Result<[[Option<GemmCodes>; 2]; N]> {
    let ([rows, columns], on) = (source.sizes(), source.gpu()?);
    let padded_rows = rows.next_multiple_of(MULTIPLE);
    let block = if operand == Fp8Operand::Weight { KernelBlock::Tiles } else { KernelBlock::Rows };
    let codes = |sizes, is_wanted: bool| is_wanted.then(|| GemmBlocks::new(on, sizes, block)).transpose();
    let (mut outputs, mut all) = (Vec::new(), Vec::new());
    for rounding in roundings {
        let rowwise = codes([padded_rows, columns], orientation.is_rowwise())?;
        let columnwise = codes([columns, padded_rows], orientation.is_columnwise())?;
        outputs.push(BlockOutputs {
            plain: rowwise.as_ref().map_or(BlockOutput::NONE, |rowwise| rowwise.output(rowwise.strides)),
            transposed: columnwise.as_ref().map_or(BlockOutput::NONE, |columnwise| {
                let [outer, inner] = columnwise.strides;
                columnwise.output([inner, outer])
            }),
            rounding,
        });
        all.push([rowwise, columnwise]);
    }
    BlockCast { source, block, padded_rows, rule, format }.run(&outputs)?;
    match all.try_into() {
        Ok(all) => Ok(<[_; N]>::map(all, |codes: [Option<GemmBlocks>; 2]| {
            codes.map(|codes| codes.map(GemmBlocks::into_codes))
        })),
        Err(_) => unreachable!("there are codes per rounding"),
    }
}

/// Codes [outer, inner] with scales in cuBLASLt's order. Matmuls sum over the inner dim.
struct GemmBlocks {
    codes: Out,
    scale_inv: Out,
    n_scales: usize,
    sizes: [usize; 2],
    /// Strides of the scales between blocks of the outer and of the inner dim.
    strides: [usize; 2],
    block: KernelBlock,
}

impl GemmBlocks {
    fn new(on: Gpu, sizes: [usize; 2], block: KernelBlock) -> Result<Self> {
        let scaling = if block == KernelBlock::Tiles { Scaling::Block128 } else { Scaling::Vector128 };
        let (n_scales, strides) = scaling.layout(sizes[0], sizes[1]);
        let codes = Out::new(on, DType::U8, sizes[0] * sizes[1])?;
        Ok(Self { codes, scale_inv: Out::new(on, DType::F32, n_scales)?, n_scales, sizes, strides, block })
    }

    fn output(&self, strides: [usize; 2]) -> BlockOutput {
        BlockOutput { codes: self.codes.address, scale_inv: self.scale_inv.address, strides }
    }

    fn into_codes(self) -> GemmCodes {
        let rows = if self.block == KernelBlock::Tiles { FP8_BLOCK } else { 1 };
        GemmCodes {
            codes: self.codes.into_tensor(self.sizes.to_vec()),
            scale_inv: self.scale_inv.into_tensor(self.n_scales),
            block: ScaleBlock::Tile { rows, columns: FP8_BLOCK },
        }
    }
}
