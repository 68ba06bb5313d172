//! Instruction sets of packed matmuls: the sizes of their tiles, packing and multiplication.

#[cfg(target_arch = "x86_64")]
use super::accumulate::Accumulate;
#[cfg(target_arch = "x86_64")]
use super::matrix::{Mat, Store};
#[cfg(target_arch = "x86_64")]
use super::packed::CACHE_LINE_BYTES;
#[cfg(target_arch = "x86_64")]
use crate::simd::prefetch;

/// Code that is compiled for each kernel.
pub(super) trait KernelCall<T> {
    /// Runs with one of our kernels.
    #[cfg(target_arch = "x86_64")]
    fn by<K: Kernel<Operand = T>>(self, kernel: K);

    /// Runs with the `gemm` crate, which packs for itself.
    fn by_crate(self);
}

/// Packing and multiplication for one instruction set.
pub(super) trait Kernel: Copy + Send + Sync {
    /// Elements of the operands.
    type Operand: Copy + Send + Sync;
    /// Rows of a tile.
    const MR: usize;
    /// Columns of a tile.
    const NR: usize;
    /// Most terms per partial sum.
    const KC: usize;
    /// Divisor of the terms per partial sum, except for the last one.
    const DEPTH: usize = 1;
    /// Cache lines of a block, which shares the L2 cache with the streamed operand.
    const BLOCK_LINES: usize;
    /// Elements of the shared operand that are packed at once, approximately.
    const MAX_PACKED: usize;

    /// Returns the cache lines of a packed sliver of MR rows with `kc` terms.
    fn lines_a(kc: usize) -> usize;

    /// Returns the cache lines of a packed sliver of NR columns with `kc` terms.
    fn lines_b(kc: usize) -> usize;

    /// Packs a matrix [k, n], the transpose of n rows of a, with n <= MR.
    fn pack_a(self, block: Mat<'_, Self::Operand>, to: &mut [CacheLine]);

    /// Packs a matrix [k, n] of columns of b, with n <= NR.
    fn pack_b(self, block: Mat<'_, Self::Operand>, to: &mut [CacheLine]);

    /// Computes tile = [tile +] scale a b for packed slivers of `kc` terms.
    ///
    /// # Safety
    ///
    /// The slivers must have that many terms. The tile must be valid and owned by this thread, which must have called
    /// [`Kernel::begin`].
    unsafe fn multiply(
        self,
        kc: usize,
        a: &[CacheLine],
        b: &[CacheLine],
        tile: Tile,
        scale: f32,
        accumulate: Accumulate,
    );

    /// Prepares the calling thread for [`Kernel::multiply`].
    fn begin(self) {}

    /// Undoes [`Kernel::begin`] on the calling thread.
    fn end(self) {}
}

/// Cache line of packed numbers.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct CacheLine(pub(super) [u8; CACHE_LINE_BYTES]);

/// Address and valid size of a tile in the output.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub(super) data: *mut f32,
    pub(super) stride: usize,
    pub(super) n_rows: usize,
    pub(super) n_cols: usize,
    /// Streamed only if the tile is overwritten once.
    pub(super) store: Store,
}

impl Tile {
    /// Prefetches the rows, unless their stores bypass the caches.
    #[inline]
    pub(super) fn prefetch(&self) {
        if self.store == Store::Streamed {
            return;
        }
        (0..self.n_rows)
            .for_each(|row| prefetch(self.data.wrapping_add(row * self.stride).cast_const(), 2 * LINE_FLOATS));
    }
}

/// f32 of a cache line.
const LINE_FLOATS: usize = CACHE_LINE_BYTES / size_of::<f32>();
