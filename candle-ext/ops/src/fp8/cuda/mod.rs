//! FP8 on CUDA: launches of `kernel.cu`, and the matmuls of linear layers.

mod blocks;
mod cast;
mod groups;
mod linear;
mod plain;

use candle_core::{DType, Result, Tensor, bail};

use super::format::{FP8_BLOCK, Fp8Format};
use super::recipe::{AmaxHistoryPolicy, DelayedScaling, Fp8Formats, Fp8Operand, Fp8Orientation, ScaleRule};
use super::rounding::Fp8Rounding;
use crate::cuda::gemm::Scaling;
use crate::cuda::{Arg, DeviceAddress, FLAT_THREADS, Out, address, columns, gpu, kernels, suffix};
use crate::quantized::cuda::dequantize_parts;
use crate::quantized::format::QuantShape;
pub(super) use blocks::block_operands;
pub(super) use cast::{CastScale, CastSource, CodeEncoding, GemmCodes, cast_operands, current_scales};
pub(super) use groups::{GpuGroupCodes, GroupInput, GroupScales, Slots};
pub(crate) use linear::{adds_to_sum, check_sizes, forward, grad_w, grad_x};
pub(super) use plain::{quantize, quantize_current};

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
    if !reads_codes(codes)? {
        bail!("{OP}: cannot transpose [{rows}, {columns}] codes at {from:#x}: want multiples of {MULTIPLE}")
    }
    let transposed = Out::new(on, DType::U8, rows * columns)?;
    let args = [Arg::Address(from), Arg::Address(transposed.address), Arg::I32(rows as i32), Arg::I32(columns as i32)];
    let grid = [columns.div_ceil(TILE).max(1), rows.div_ceil(TILE).max(1), 1];
    // SAFETY: both have rows * columns codes, aligned to 16 bytes; the grid has a block per tile.
    unsafe { KERNELS.launch(on, "transpose_codes", grid, FLAT_THREADS, &args)? };
    Ok(transposed.into_tensor((columns, rows)))
}

/// Returns the scales of blocks of 128x128 of a matrix [rows, columns] in the order of cuBLASLt: of the transposed
/// matrix for columnwise operands, else of the matrix itself.
///
/// # Safety
///
/// The address must hold the f32 scales of all blocks, row by row, on the device of `owner`.
pub(super) unsafe fn ordered_scales(
    owner: &Tensor,
    scales: DeviceAddress,
    [rows, columns]: [usize; 2],
    orientation: Fp8Orientation,
) -> Result<Tensor> {
    let blocks_a_row = columns.div_ceil(FP8_BLOCK);
    let ([outer, inner], strides) = match orientation.is_columnwise() {
        false => ([rows, columns], [blocks_a_row, 1]),
        true => ([columns, rows], [1, blocks_a_row]),
    };
    let (n, [padded, _]) = Scaling::Block128.layout(outer, inner);
    let on = gpu(OP, owner)?;
    let ordered = Out::new(on, DType::F32, n)?;
    let sizes = [n, padded, inner.div_ceil(FP8_BLOCK), strides[0], strides[1]].map(|size| Arg::I32(size as i32));
    let args: Vec<Arg> = [scales, ordered.address].map(Arg::Address).into_iter().chain(sizes).collect();
    // SAFETY: the caller's; `ordered` has n elements.
    unsafe { KERNELS.launch_flat(on, "order_scales", n, 1, &args)? };
    Ok(ordered.into_tensor(n))
}

/// Returns true if matmuls and [`transpose`] can read codes [rows, columns] at their address.
pub(super) fn reads_codes(codes: &Tensor) -> Result<bool> {
    let (rows, columns) = codes.dims2()?;
    Ok([rows, columns, address(OP, codes)? as usize].iter().all(|n| n.is_multiple_of(MULTIPLE)))
}

/// Returns the key of a rounding; 0 if it is to nearest.
fn key_of(rounding: Fp8Rounding) -> Arg {
    Arg::U64(if let Fp8Rounding::Stochastic { key } = rounding { key } else { 0 })
}

/// Returns 1 for stochastic rounding, and 0 for rounding to nearest.
fn is_stochastic(rounding: Fp8Rounding) -> Arg {
    Arg::I32(i32::from(rounding != Fp8Rounding::Nearest))
}

fn rounding_args(rounding: Fp8Rounding) -> [Arg; 2] {
    [key_of(rounding), is_stochastic(rounding)]
}

fn name_of(format: Fp8Format) -> &'static str {
    match format {
        Fp8Format::E4m3 => "e4m3",
        Fp8Format::E5m2 => "e5m2",
    }
}
