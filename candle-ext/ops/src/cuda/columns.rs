//! Sums over the rows of a matrix: the gradients of norms and biases.
//!
//! Rows are split into parts, whose sums are added in order. The number of parts depends on the shape alone, so the
//! result is deterministic. An op that uses this module has kernels `add_parts_f32` and `add_parts_bf16`.

use candle_core::{DType, Result, Tensor, bail};

use super::{Arg, DeviceAddress, FLAT_THREADS, Gpu, Kernels, Out, address, suffix};

/// Blocks of a grid: four for each multiprocessor of an H100.
pub(crate) const BLOCKS: usize = 528;

/// Lanes of a warp.
const LANES: usize = 32;

/// Fewest rows of a part.
const LEAST_ROWS: usize = 32;

/// Bytes of the widest load.
const WIDEST: u64 = 16;

/// Returns the elements per load for rows of d elements at these addresses: 16 bytes if all rows are aligned, else 1.
pub(crate) fn width(dtype: DType, d: usize, rows: &[DeviceAddress]) -> usize {
    let width = WIDEST as usize / dtype.size_in_bytes();
    if d.is_multiple_of(width) && rows.iter().all(|row| row.is_multiple_of(WIDEST)) { width } else { 1 }
}

/// Adds the sums over the rows of `x` [t, n] to `total` [n].
///
/// The op must have kernels `partial_sums_*` and `partial_sums_wide_*`, which call `sum_columns` of common.cuh.
///
/// # Safety
///
/// `x` must have t rows of n columns.
pub(crate) unsafe fn add_sums(
    kernels: &Kernels,
    on: Gpu,
    x: &Tensor,
    [t, n]: [usize; 2],
    total: &Tensor,
) -> Result<()> {
    let (op, x_at) = (kernels.op, address(kernels.op, x)?);
    let width = width(x.dtype(), n, &[x_at]);
    let n_blocks = n.div_ceil(LANES * width);
    let n_parts = (BLOCKS / n_blocks.max(1)).clamp(1, t.div_ceil(LEAST_ROWS).max(1));
    let parts = Out::new(on, DType::F32, n_parts * n)?;
    let args = [Arg::Address(x_at), Arg::Address(parts.address), Arg::I32(t as i32), Arg::I32(n as i32)];
    let name = format!("partial_sums_{}{}", if width > 1 { "wide_" } else { "" }, suffix(op, x.dtype())?);
    // SAFETY: the caller guarantees that x is valid; `parts` has a row of n elements for each part.
    unsafe { kernels.launch(on, &name, [n_blocks, n_parts, 1], FLAT_THREADS, &args)? };
    // SAFETY: as above.
    unsafe { add_parts(kernels, on, parts.address, [n_parts, n], total) }
}

/// Adds the sums of `n_parts` rows of f32 to `total` [n].
///
/// # Safety
///
/// `parts` must have `n_parts` rows of n elements.
pub(crate) unsafe fn add_parts(
    kernels: &Kernels,
    on: Gpu,
    parts: DeviceAddress,
    [n_parts, n]: [usize; 2],
    total: &Tensor,
) -> Result<()> {
    let op = kernels.op;
    if total.elem_count() != n {
        bail!("{op}: the gradient has {} elements, want {n}", total.elem_count())
    }
    let args = [Arg::Address(parts), Arg::Address(address(op, total)?), Arg::I32(n_parts as i32), Arg::I32(n as i32)];
    let name = format!("add_parts_{}", suffix(op, total.dtype())?);
    // SAFETY: the caller guarantees valid parts; total has n elements of the dtype in the name.
    unsafe { kernels.launch(on, &name, [n.div_ceil(LANES), 1, 1], FLAT_THREADS, &args) }
}
