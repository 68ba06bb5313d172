//! `embedding` on CUDA: launches of `kernel.cu`.

use candle_core::{DType, Result, Tensor, bail};

use crate::cuda::{Arg, Gpu, Out, address, gpu, kernels, suffix};

kernels!("embedding");

const OP: &str = "embedding";
const THREADS: usize = 256;
/// Keys that a block sorts, one per thread.
const TILE: usize = 512;
/// Sorted runs merged at once.
const FAN_IN: usize = 32;
/// Most rows of a trained table: an id must fit into the upper bits of a sort key.
const MAX_ROWS: usize = 1 << 23;
/// Columns per block of the sum.
const COLUMNS: usize = 1024;
const SUM_THREADS: usize = 128;

/// Returns y: a row of w [v, d] for each id.
pub(super) fn gather(ids: &Tensor, w: &Tensor) -> Result<Out> {
    let on = gpu(OP, w)?;
    let (t, (v, d)) = (ids.elem_count(), w.dims2()?);
    let y = Out::new(on, w.dtype(), t * d)?;
    let args = [
        Arg::Address(address(OP, ids)?),
        Arg::Address(address(OP, w)?),
        Arg::Address(y.address),
        Arg::I32(v as i32),
        Arg::I32(d as i32),
    ];
    let threads = (d / 8).next_multiple_of(32).clamp(32, 1024);
    let name = format!("gather_{}", suffix(OP, w.dtype())?);
    // SAFETY: there are t ids, w has v rows of d elements, y has t.
    unsafe { KERNELS.launch(on, &name, [t, 1, 1], threads, &args)? };
    Ok(y)
}

/// Adds dy_i to dw[ids_i] for a table of v rows, except for `padding`.
pub(super) fn scatter_add(ids: &Tensor, dy: &Tensor, dw: &Tensor, v: usize, padding: Option<u32>) -> Result<()> {
    let on = gpu(OP, dy)?;
    let (t, d) = (ids.elem_count(), dw.elem_count() / v.max(1));
    if v >= MAX_ROWS {
        bail!("{OP}: on CUDA a trained table of fewer than {MAX_ROWS} rows, not {v}")
    }
    let keys = sorted_keys(on, ids, v, padding)?;
    let args = [
        Arg::Address(keys.address),
        Arg::Address(address(OP, dy)?),
        Arg::Address(address(OP, dw)?),
        Arg::I64(t as i64),
        Arg::I32(v as i32),
        Arg::I32(d as i32),
    ];
    let name = format!("add_rows_{}_{}", suffix(OP, dy.dtype())?, suffix(OP, dw.dtype())?);
    // SAFETY: there are t keys, each of a position in dy, which has t rows of d elements; dw has v.
    unsafe { KERNELS.launch(on, &name, [t, d.div_ceil(COLUMNS), 1], SUM_THREADS, &args) }
}

/// Returns the id and position of each token as t sorted 64-bit keys; ids without a gradient become v.
fn sorted_keys(on: Gpu, ids: &Tensor, v: usize, padding: Option<u32>) -> Result<Out> {
    let t = ids.elem_count();
    let (mut keys, mut spare) = (Out::new(on, DType::I64, t)?, Out::new(on, DType::I64, t)?);
    let args = [
        Arg::Address(address(OP, ids)?),
        Arg::Address(keys.address),
        Arg::I64(t as i64),
        Arg::I32(v as i32),
        // No table has a row of this index.
        Arg::I32(padding.unwrap_or(u32::MAX) as i32),
    ];
    // SAFETY: there are t ids and t keys.
    unsafe { KERNELS.launch(on, "sort_tiles", [t.div_ceil(TILE), 1, 1], TILE, &args)? };
    let mut run = TILE;
    while run < t {
        let args = [Arg::Address(keys.address), Arg::Address(spare.address), Arg::I64(t as i64), Arg::I64(run as i64)];
        // SAFETY: both have t keys.
        unsafe { KERNELS.launch(on, "merge_runs", [t.div_ceil(THREADS), 1, 1], THREADS, &args)? };
        (keys, spare) = (spare, keys);
        run *= FAN_IN;
    }
    Ok(keys)
}
