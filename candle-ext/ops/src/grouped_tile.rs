//! Output tiles of CUTLASS's grouped GEMMs, and the one that a program sets for all calls.

use std::sync::OnceLock;

static FORCED: OnceLock<GroupedTile> = OnceLock::new();

/// Output tile of a grouped GEMM by CUTLASS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupedTile {
    /// 128 x 128. A warp group stores a tile while another one multiplies the next.
    Narrow,
    /// 128 x 256 by two warp groups.
    Wide,
}

/// Sets the tile of all forwards and gradients of inputs, for measurements. Call it before any computation.
pub fn force_grouped_tile(tile: GroupedTile) {
    let _ = FORCED.set(tile);
}

/// Returns the tile that the program has set.
#[cfg(any(feature = "cuda", feature = "emulate"))]
pub(crate) fn forced() -> Option<GroupedTile> {
    FORCED.get().copied()
}
