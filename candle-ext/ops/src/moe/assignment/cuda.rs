//! Sort of slots on CUDA: launches of `sort.cuh`.

use candle_core::{DType, Result, Tensor, bail};

use crate::cuda::{Arg, Out, address, gpu};
use crate::moe::KERNELS;

const OP: &str = "expert assignment";
/// Slots per block of the sort.
const TILE: usize = 256;
/// Threads of the block that scans the counts: one per expert, and one for dropped slots.
const SCAN_THREADS: usize = 1024;
const THREADS: usize = 256;

/// Offsets, order and rows.
pub(super) struct SortedOnDevice {
    pub(super) offsets: Tensor,
    pub(super) order: Tensor,
    pub(super) rows: Tensor,
}

/// Sorts the slots of `experts`, stably. Experts that are not below `e` count as dropped.
pub(super) fn sort(experts: &Tensor, e: usize) -> Result<SortedOnDevice> {
    if e >= SCAN_THREADS {
        bail!("{OP}: on CUDA at most {} experts, not {e}", SCAN_THREADS - 1)
    }
    let on = gpu(OP, experts)?;
    let n = experts.elem_count();
    let n_tiles = n.div_ceil(TILE);
    let counts = Out::new(on, DType::U32, n_tiles * (e + 1))?;
    let [offsets, order, rows] = [e + 1, n, n].map(|len| Out::new(on, DType::U32, len));
    let (offsets, order, rows) = (offsets?, order?, rows?);
    let experts = Arg::Address(address(OP, experts)?);
    let [counts, offsets_at, order_at, rows_at] =
        [&counts, &offsets, &order, &rows].map(|out| Arg::Address(out.address));
    let [n_arg, tiles, e_arg] = [n, n_tiles, e].map(|size| Arg::I32(size as i32));
    let grid = [n_tiles, 1, 1];
    // SAFETY: there are n experts, orders and rows, e + 1 offsets, and e + 1 counts per tile.
    unsafe {
        KERNELS.launch(on, "count_experts", grid, TILE, &[experts, counts, n_arg, e_arg])?;
        KERNELS.launch(on, "scan_counts", [1, 1, 1], SCAN_THREADS, &[counts, offsets_at, tiles, e_arg])?;
        let args = [experts, counts, offsets_at, order_at, rows_at, n_arg, e_arg];
        KERNELS.launch(on, "place_slots", grid, TILE, &args)?;
    }
    let [order, rows] = [order, rows].map(|out| out.into_tensor(n));
    Ok(SortedOnDevice { offsets: offsets.into_tensor(e + 1), order, rows })
}

/// Moves rows so that each expert begins at a multiple of `multiple`.
pub(super) fn pad(from: &SortedOnDevice, multiple: usize, n_rows: usize) -> Result<SortedOnDevice> {
    let on = gpu(OP, &from.rows)?;
    let (n, e) = (from.rows.elem_count(), from.offsets.elem_count() - 1);
    let [offsets, order, rows] = [e + 1, n_rows, n].map(|len| Out::new(on, DType::U32, len));
    let (offsets, order, rows) = (offsets?, order?, rows?);
    let [from_offsets, from_rows] = [&from.offsets, &from.rows].map(|tensor| address(OP, tensor).map(Arg::Address));
    let (from_offsets, from_rows) = (from_offsets?, from_rows?);
    let [offsets_at, order_at, rows_at] = [&offsets, &order, &rows].map(|out| Arg::Address(out.address));
    let [n_arg, e_arg, multiple, n_rows_arg] = [n, e, multiple, n_rows].map(|size| Arg::I32(size as i32));
    // SAFETY: there are n slots, e + 1 offsets of either kind, and n_rows rows in the order.
    unsafe {
        KERNELS.launch(on, "pad_offsets", [1, 1, 1], 32, &[from_offsets, offsets_at, e_arg, multiple])?;
        KERNELS.launch(on, "clear_order", [n_rows.div_ceil(THREADS), 1, 1], THREADS, &[order_at, n_rows_arg])?;
        let args = [from_offsets, offsets_at, from_rows, order_at, rows_at, n_arg, e_arg];
        KERNELS.launch(on, "move_rows", [n.div_ceil(THREADS), 1, 1], THREADS, &args)?;
    }
    Ok(SortedOnDevice {
        offsets: offsets.into_tensor(e + 1),
        order: order.into_tensor(n_rows),
        rows: rows.into_tensor(n),
    })
}
