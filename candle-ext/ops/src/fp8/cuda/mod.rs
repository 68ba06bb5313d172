//! FP8 on CUDA: launches of `kernel.cu`, and the matmuls of linear layers.

mod groups;
mod linear;

use candle_core::{DType, Result, Tensor, bail};

use super::format::{FP8_BLOCK, Fp8Format};
use super::recipe::{
    AmaxHistoryPolicy, DelayedScaling, Fp8Formats, Fp8Operand, Fp8Orientation, ScaleRule, largest_number,
};
use super::rounding::Fp8Rounding;
use crate::cuda::gemm::Scaling;
use crate::cuda::{Arg, Blocks, DeviceAddress, FLAT_THREADS, Out, address, columns, gpu, kernels, suffix};
use crate::quantized::ScaleBlock;
use crate::quantized::cuda::dequantize_parts;
use crate::quantized::format::QuantShape;
pub(super) use groups::{GroupInput, Slots};
pub(crate) use linear::{check_sizes, forward, grad_w, grad_x};

kernels!("fp8");

const OP: &str = "fp8_quantize";
/// Elements per thread of an amax, approximately.
const PER_THREAD: usize = 32;
/// Rows and columns of a tile with one scale. The kernel has the same constant.
const TILE: usize = 64;
/// Threads of the kernel that raises one amax.
const WARP: usize = 32;
/// Sizes that cuBLASLt's FP8 matmuls need are multiples of this.
pub(super) const MULTIPLE: usize = 16;

/// Returns the amax of a contiguous tensor, f32 [1].
pub(super) fn amax(x: &Tensor) -> Result<Tensor> {
    let amax = Out::new(gpu("amax", x)?, DType::F32, 1)?;
    finish_amax(x, amax.address, None)?;
    Ok(amax.into_tensor(1))
}

/// Raises the amax of a slot, f32 [1], to that of a matrix.
pub(super) fn raise_amax(slot: &Tensor, amax: &Tensor) -> Result<()> {
    let args = [Arg::Address(address(OP, amax)?), Arg::Address(address(OP, slot)?)];
    // SAFETY: both have one element.
    unsafe { KERNELS.launch(gpu(OP, slot)?, "record_amax", [1, 1, 1], WARP, &args) }
}

/// Returns codes and inverse scale of a contiguous matrix with a given scale.
pub(super) fn quantize(
    x: &Tensor,
    scale: &Tensor,
    format: Fp8Format,
    rounding: Fp8Rounding,
) -> Result<(Tensor, Tensor)> {
    let cast = Cast { codes: Some(x.dims()[0]), transposed: None, record: None };
    let (codes, _, scale_inv) = cast.run(x, address(OP, scale)?, (format, rounding))?;
    Ok((codes.into_tensor(x.shape()), scale_inv))
}

/// Returns codes and inverse scales of a contiguous matrix, with scales from the amax of each block.
pub(super) fn quantize_current(
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
    let block = KernelBlock::of(block)?;
    let [rows, columns] = [x.dims()[0], x.dims()[1]];
    let [n_rows, n_columns] = block.blocks(rows, columns);
    let on = gpu(OP, x)?;
    let codes = Out::new(on, DType::U8, rows * columns)?;
    let scale_inv = Out::new(on, DType::F32, n_rows * n_columns)?;
    let plain = BlockOutput { codes: codes.address, scale_inv: scale_inv.address, strides: [n_columns, 1] };
    let outputs = BlockOutputs { block, padded_rows: rows, plain, transposed: BlockOutput::NONE };
    outputs.run(x, rule, (format, rounding))?;
    Ok((codes.into_tensor(x.shape()), scale_inv.into_tensor(n_rows * n_columns)))
}

/// Returns a matrix in f32, from codes and inverse scales row by row.
pub(super) fn dequantize(
    codes: &Tensor,
    scale_inv: &Tensor,
    format: Fp8Format,
    [block_rows, block_columns]: [usize; 2],
) -> Result<Tensor> {
    let (n, k) = codes.dims2()?;
    let shape = QuantShape { n, k, block_rows, block_columns };
    let addresses = [address(OP, codes)?, address(OP, scale_inv)?];
    // SAFETY: there are n * k codes, and an inverse scale per block.
    unsafe { dequantize_parts(codes, addresses, format.values(), shape, DType::F32) }
}

/// Updates histories and scales from the amaxes of a step.
pub(super) fn update_delayed(
    amaxes: &Tensor,
    [history, scales]: [&Tensor; 2],
    scaling: DelayedScaling,
    formats: Fp8Formats,
) -> Result<()> {
    const SLOTS_PER_BLOCK: usize = FLAT_THREADS / WARP;
    let n_slots = scales.elem_count();
    let [input, weight, grad_output] = Fp8Operand::ALL.map(|operand| Arg::F32(formats.of(operand).max()));
    let args = [
        Arg::Address(address(OP, amaxes)?),
        Arg::Address(address(OP, history)?),
        Arg::Address(address(OP, scales)?),
        Arg::I32(n_slots as i32),
        Arg::I32(scaling.amax_history_len as i32),
        Arg::I32(i32::from(scaling.amax_compute == AmaxHistoryPolicy::Max)),
        Arg::F32(2f32.powi(scaling.margin)),
        input,
        weight,
        grad_output,
    ];
    let grid = [n_slots.div_ceil(SLOTS_PER_BLOCK), 1, 1];
    // SAFETY: amaxes and scales have n_slots elements, the history rows of amax_history_len for each.
    unsafe { KERNELS.launch(gpu(OP, scales)?, "update_delayed", grid, FLAT_THREADS, &args) }
}

/// Returns the amax of a contiguous tensor and the scale that follows from it, f32 [1] each. The host does not wait.
pub(super) fn current_scale(x: &Tensor, rule: ScaleRule, format: Fp8Format) -> Result<[Tensor; 2]> {
    let on = gpu(OP, x)?;
    let (amax, scale) = (Out::new(on, DType::F32, 1)?, Out::new(on, DType::F32, 1)?);
    finish_amax(x, amax.address, Some((scale.address, rule, format)))?;
    Ok([amax, scale].map(|out| out.into_tensor(1)))
}

/// Returns the scale of a matrix with this amax, f32 [1].
pub(super) fn scale_of_amax(amax: &Tensor, rule: ScaleRule, format: Fp8Format) -> Result<Tensor> {
    let on = gpu(OP, amax)?;
    let (same_amax, scale) = (Out::new(on, DType::F32, 1)?, Out::new(on, DType::F32, 1)?);
    let of_scale = Some((scale.address, rule, format));
    // SAFETY: the only part is the amax, and both outputs have one element.
    unsafe { finish_parts(amax, (address(OP, amax)?, 1), same_amax.address, of_scale)? };
    Ok(scale.into_tensor(1))
}

/// Writes the amax of x, and the scale that follows from it if wanted.
fn finish_amax(x: &Tensor, amax: DeviceAddress, scale: Option<(DeviceAddress, ScaleRule, Fp8Format)>) -> Result<()> {
    let (on, n) = (gpu("amax", x)?, x.elem_count());
    let n_parts = n.div_ceil(PER_THREAD * FLAT_THREADS).clamp(1, columns::BLOCKS);
    let parts = Out::new(on, DType::F32, n_parts)?;
    let args = [Arg::Address(address("amax", x)?), Arg::Address(parts.address), Arg::I64(n as i64)];
    let name = format!("amax_parts_{}", suffix("amax", x.dtype())?);
    // SAFETY: x has n elements; `parts` has one element per block.
    unsafe { KERNELS.launch(on, &name, [n_parts, 1, 1], FLAT_THREADS, &args)? };
    // SAFETY: `parts` has n_parts elements; the callers' outputs have one.
    unsafe { finish_parts(x, (parts.address, n_parts), amax, scale) }
}

/// Writes the largest of the parts of an amax, and the scale that follows from it if wanted, on the device of `x`.
///
/// # Safety
///
/// There are as many f32 parts as the number says. The outputs have one f32.
unsafe fn finish_parts(
    x: &Tensor,
    (parts, n_parts): (DeviceAddress, usize),
    amax: DeviceAddress,
    scale: Option<(DeviceAddress, ScaleRule, Fp8Format)>,
) -> Result<()> {
    let no_scale = (0, ScaleRule { power_of_two: false, amax_epsilon: 0.0 }, Fp8Format::E4m3);
    let (scale, rule, format) = scale.unwrap_or(no_scale);
    let args = [
        Arg::Address(parts),
        Arg::I32(n_parts as i32),
        Arg::Address(amax),
        Arg::Address(scale),
        Arg::F32(format.max()),
        Arg::F32(rule.amax_epsilon),
        Arg::I32(i32::from(rule.power_of_two)),
        Arg::F32(f32::MAX),
    ];
    // SAFETY: the caller's; a zero address means no scale.
    unsafe { KERNELS.launch(gpu("amax", x)?, "finish_amax", [1, 1, 1], FLAT_THREADS, &args) }
}

/// Returns row-major codes [rows, columns] transposed: [columns, rows]. Both are multiples of 16, as is the address.
pub(super) fn transpose(codes: &Tensor) -> Result<Tensor> {
    let (rows, columns) = codes.dims2()?;
    let (on, from) = (gpu(OP, codes)?, address(OP, codes)?);
    if ![rows, columns, from as usize].iter().all(|n| n.is_multiple_of(MULTIPLE)) {
        bail!("{OP}: cannot transpose [{rows}, {columns}] codes at {from:#x}: want multiples of {MULTIPLE}")
    }
    let transposed = Out::new(on, DType::U8, rows * columns)?;
    let args = [Arg::Address(from), Arg::Address(transposed.address), Arg::I32(rows as i32), Arg::I32(columns as i32)];
    let grid = [columns.div_ceil(TILE).max(1), rows.div_ceil(TILE).max(1), 1];
    // SAFETY: both have rows * columns codes, aligned to 16 bytes; the grid has a block per tile.
    unsafe { KERNELS.launch(on, "transpose_codes", grid, FLAT_THREADS, &args)? };
    Ok(transposed.into_tensor((columns, rows)))
}

/// Outputs of a quantization with one scale.
struct Cast {
    /// Rows of the codes [rows, columns], with padding.
    codes: Option<usize>,
    /// Rows that are columns of the transposed codes [columns, rows], with padding; a multiple of 16.
    transposed: Option<usize>,
    /// Amaxes to raise: that of the matrix, and its slot.
    record: Option<[DeviceAddress; 2]>,
}

impl Cast {
    /// Returns codes, transposed codes and the inverse scale. Outputs that are not wanted have no elements.
    fn run(
        &self,
        x: &Tensor,
        scale: DeviceAddress,
        (format, rounding): (Fp8Format, Fp8Rounding),
    ) -> Result<(Out, Out, Tensor)> {
        let [rows, columns] = [x.dims()[0], x.dims()[1]];
        let on = gpu(OP, x)?;
        let out = |rows: Option<usize>| Out::new(on, DType::U8, rows.unwrap_or(0) * columns);
        let (codes, transposed, scale_inv) = (out(self.codes)?, out(self.transposed)?, Out::new(on, DType::F32, 1)?);
        let at = |out: &Out, is_wanted: bool| Arg::Address(if is_wanted { out.address } else { 0 });
        let padded_rows = self.codes.or(self.transposed).unwrap_or(rows);
        let [amax, slot] = self.record.unwrap_or([0, 0]).map(Arg::Address);
        let [key, is_stochastic] = rounding_args(rounding);
        let args = [
            Arg::Address(address(OP, x)?),
            Arg::Address(scale),
            Arg::Address(scale_inv.address),
            at(&codes, self.codes.is_some()),
            at(&transposed, self.transposed.is_some()),
            amax,
            slot,
            Arg::I32(rows as i32),
            Arg::I32(padded_rows as i32),
            Arg::I32(columns as i32),
            key,
            is_stochastic,
        ];
        let name = format!("cast_{}_{}", name_of(format), suffix(OP, x.dtype())?);
        // At least one block, which writes the inverse scale.
        let grid = [columns.div_ceil(TILE).max(1), padded_rows.div_ceil(TILE).max(1), 1];
        // SAFETY: x is [rows, columns]; the codes have padded rows; zero addresses mean no output.
        unsafe { KERNELS.launch(on, &name, grid, FLAT_THREADS, &args)? };
        Ok((codes, transposed, scale_inv.into_tensor(1)))
    }
}

/// Codes along the sum of a matmul, and their inverse scales in cuBLASLt's order.
pub(super) struct GemmCodes {
    pub(super) codes: Tensor,
    pub(super) scale_inv: Tensor,
    pub(super) block: ScaleBlock,
}

/// Quantizes a contiguous matrix [rows, columns] with one scale for cuBLASLt. Returns rowwise codes [padded rows, columns] and
/// columnwise ones [columns, padded rows]; padding is zero.
///
/// The amax of the matrix raises those of `record`.
pub(super) fn cast_operands(
    x: &Tensor,
    scale: &Tensor,
    record: Option<[&Tensor; 2]>,
    orientation: Fp8Orientation,
    encoding: (Fp8Format, Fp8Rounding),
) -> Result<[Option<GemmCodes>; 2]> {
    let (columns, padded) = (x.dims()[1], x.dims()[0].next_multiple_of(MULTIPLE));
    let record = match record {
        Some([amax, slot]) => Some([address(OP, amax)?, address(OP, slot)?]),
        None => None,
    };
    let cast = Cast {
        codes: orientation.is_rowwise().then_some(padded),
        transposed: orientation.is_columnwise().then_some(padded),
        record,
    };
    let (codes, transposed, scale_inv) = cast.run(x, address(OP, scale)?, encoding)?;
    let of = |codes: Out, shape: (usize, usize)| GemmCodes {
        codes: codes.into_tensor(shape),
        scale_inv: scale_inv.clone(),
        block: ScaleBlock::Tensor,
    };
    Ok([
        orientation.is_rowwise().then(|| of(codes, (padded, columns))),
        orientation.is_columnwise().then(|| of(transposed, (columns, padded))),
    ])
}

/// Blocks of a kernel.
#[derive(Clone, Copy, PartialEq, Eq)]
enum KernelBlock {
    /// 1x128; of transposed codes 128x1.
    Rows,
    /// 128x1.
    Columns,
    /// 128x128.
    Tiles,
}

impl KernelBlock {
    fn of(block: ScaleBlock) -> Result<Self> {
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

    fn name(self) -> &'static str {
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

/// Outputs of a quantization with a scale per block.
struct BlockOutputs {
    block: KernelBlock,
    padded_rows: usize,
    plain: BlockOutput,
    transposed: BlockOutput,
}

impl BlockOutputs {
    fn run(&self, x: &Tensor, rule: ScaleRule, (format, rounding): (Fp8Format, Fp8Rounding)) -> Result<()> {
        let [rows, columns] = [x.dims()[0], x.dims()[1]];
        let mut args = vec![Arg::Address(address(OP, x)?)];
        args.extend(self.plain.args());
        args.extend(self.transposed.args());
        args.extend([rows, self.padded_rows, columns].map(|n| Arg::I32(n as i32)));
        args.extend([
            Arg::F32(rule.amax_epsilon),
            Arg::I32(i32::from(rule.power_of_two)),
            Arg::F32(largest_number(x.dtype())),
        ]);
        args.extend(rounding_args(rounding));
        let name = format!("blocks_{}_{}_{}", self.block.name(), name_of(format), suffix(OP, x.dtype())?);
        let row_bytes = FP8_BLOCK * x.dtype().size_in_bytes() + 4;
        let blocks = Blocks {
            grid: [columns.div_ceil(FP8_BLOCK), self.padded_rows.div_ceil(FP8_BLOCK), 1],
            threads: FLAT_THREADS,
            shared_bytes: FP8_BLOCK * row_bytes,
        };
        // SAFETY: x is [rows, columns]; the outputs have padded rows and an inverse scale per block; zero addresses mean
        // no output. A tile with rows one word longer fits in shared memory.
        unsafe { KERNELS.launch_blocks(gpu(OP, x)?, &name, blocks, &args) }
    }
}

/// Quantizes a matrix with scales per block, as [`cast_operands`] does.
pub(super) fn block_operands(
    x: &Tensor,
    rule: ScaleRule,
    operand: Fp8Operand,
    orientation: Fp8Orientation,
    encoding: (Fp8Format, Fp8Rounding),
) -> Result<[Option<GemmCodes>; 2]> {
    let [rows, columns] = [x.dims()[0], x.dims()[1]];
    let padded_rows = rows.next_multiple_of(MULTIPLE);
    let block = if operand == Fp8Operand::Weight { KernelBlock::Tiles } else { KernelBlock::Rows };
    let rowwise = orientation.is_rowwise().then(|| GemmBlocks::new(x, [padded_rows, columns], block)).transpose()?;
    let columnwise =
        orientation.is_columnwise().then(|| GemmBlocks::new(x, [columns, padded_rows], block)).transpose()?;
    let outputs = BlockOutputs {
        block,
        padded_rows,
        plain: rowwise.as_ref().map_or(BlockOutput::NONE, |rowwise| rowwise.output(rowwise.strides)),
        transposed: columnwise.as_ref().map_or(BlockOutput::NONE, |columnwise| {
            let [outer, inner] = columnwise.strides;
            columnwise.output([inner, outer])
        }),
    };
    outputs.run(x, rule, encoding)?;
    Ok([rowwise, columnwise].map(|blocks| blocks.map(GemmBlocks::into_codes)))
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
    fn new(x: &Tensor, sizes: [usize; 2], block: KernelBlock) -> Result<Self> {
        let on = gpu(OP, x)?;
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

fn rounding_args(rounding: Fp8Rounding) -> [Arg; 2] {
    match rounding {
        Fp8Rounding::Nearest => [Arg::U64(0), Arg::I32(0)],
        Fp8Rounding::Stochastic { key } => [Arg::U64(key), Arg::I32(1)],
    }
}

fn name_of(format: Fp8Format) -> &'static str {
    match format {
        Fp8Format::E4m3 => "e4m3",
        Fp8Format::E5m2 => "e5m2",
    }
}
