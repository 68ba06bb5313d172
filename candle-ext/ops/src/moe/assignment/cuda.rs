//! Sort of slots on CUDA: launches of `sort.cuh`.

use candle_core::{DType, Result, Tensor, bail};

use crate::cuda::{Arg, Out, address, gpu};
use crate::moe::KERNELS;

const OP: &str = "expert assignment";
/// Slots per block of the sort.
const TILE: usize = 256;
/// Threads of a block that scans counts. The block that scans buckets has one thread per expert, and one for dropped slots.
const SCAN_THREADS: usize = 1024;
/// Buckets of a block that scans tiles: one per lane of a warp.
const SCAN_BUCKETS: usize = 32;
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
        let blocks = [(e + 1).div_ceil(SCAN_BUCKETS), 1, 1];
        KERNELS.launch(on, "scan_tiles", blocks, SCAN_THREADS, &[counts, offsets_at, tiles, e_arg])?;
        KERNELS.launch(on, "scan_buckets", [1, 1, 1], SCAN_THREADS, &[offsets_at, e_arg])?;
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::cuda::emulator::emulate;

    /// Scans counts that differ for every tile and bucket, and compares each with a sum.
    #[track_caller]
    fn check_scan(n_tiles: usize, e: usize) {
        let count = |tile: usize, bucket: usize| (7 * tile + 13 * bucket) as u32 % 11;
        let all: Vec<u32> = (0..n_tiles * (e + 1)).map(|place| count(place / (e + 1), place % (e + 1))).collect();
        let counts = Tensor::new(all, &Device::Cpu).unwrap();
        let on = gpu(OP, &counts).unwrap();
        let offsets = Out::new(on, DType::U32, e + 1).unwrap();
        let (at, offsets_at) = (Arg::Address(address(OP, &counts).unwrap()), Arg::Address(offsets.address));
        let (tiles, e_arg) = (Arg::I32(n_tiles as i32), Arg::I32(e as i32));
        let blocks = [(e + 1).div_ceil(SCAN_BUCKETS), 1, 1];
        // SAFETY: there are e + 1 counts per tile, and e + 1 offsets.
        emulate(|| unsafe {
            KERNELS.launch(on, "scan_tiles", blocks, SCAN_THREADS, &[at, offsets_at, tiles, e_arg]).unwrap();
            KERNELS.launch(on, "scan_buckets", [1, 1, 1], SCAN_THREADS, &[offsets_at, e_arg]).unwrap();
        });
        let (found, mut row) = (counts.to_vec1::<u32>().unwrap(), 0);
        let offsets = offsets.into_tensor(e + 1).to_vec1::<u32>().unwrap();
        for bucket in 0..=e {
            assert_eq!(offsets[bucket], row, "bucket {bucket}");
            let mut earlier = 0;
            for tile in 0..n_tiles {
                assert_eq!(found[tile * (e + 1) + bucket], earlier, "tile {tile}, bucket {bucket}");
                earlier += count(tile, bucket);
            }
            row += earlier;
        }
    }

    #[test]
    fn counts_of_any_number_of_tiles_and_buckets_are_scanned() {
        for (n_tiles, e) in [(1, 1), (15, 31), (17, 32), (512, 8), (513, 40), (1100, 3), (2, 1023)] {
            check_scan(n_tiles, e);
        }
    }
}
