//! Cache blocking around a kernel that multiplies packed slivers.
//!
//! All threads pack the smaller operand once; they share it. The other operand is split into blocks. Each thread packs
//! a block into its L2 cache and multiplies it with the whole shared operand.
//!
//! The scheme is Goto's (Anatomy of High-Performance Matrix Multiplication, 2008), except that each thread packs its
//! own blocks. Threads never split a sum, and partial sums depend on the sizes alone. The result is therefore
//! independent of the number of threads.

use std::cell::RefCell;
use std::ops::Range;

use half::bf16;
use rayon::prelude::*;

use super::accumulate::Accumulate;
use super::matrix::{Mat, Output, Store, Threads};
use super::packed::{CACHE_LINE_BYTES, SUMS};
use crate::floats::write_bf16;
use crate::simd::{prefetch, vectorised};

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

/// FLOPs below which a single thread computes the GEMM: waking another one would take longer.
const PARALLEL_FROM: usize = 1 << 20;
/// Fewest blocks per thread. More blocks balance the load better.
const BLOCKS: usize = 2;

thread_local! {
    static SHARED: RefCell<Vec<CacheLine>> = const { RefCell::new(Vec::new()) };
    static BLOCK: RefCell<Vec<CacheLine>> = const { RefCell::new(Vec::new()) };
    static BLOCK_SUMS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Computes out = [out +] scale a b. The shapes must agree, and no dimension may be 0.
pub(super) fn gemm<K: Kernel>(
    kernel: K,
    out: Output<'_>,
    accumulate: Accumulate,
    a: Mat<'_, K::Operand>,
    b: Mat<'_, K::Operand>,
    scale: f32,
    threads: Threads,
) {
    let is_parallel = threads == Threads::All && a.rows * b.cols * a.cols >= PARALLEL_FROM;
    let n_threads = if is_parallel { rayon::current_num_threads() } else { 1 };
    let kc = terms_per_part::<K>(a.cols);
    let product = BlockedGemm { kernel, out: out.into(), a, b, kc, scale, accumulate };
    // Taken out of the thread-local: while it waits for other threads, this one may run another GEMM.
    let mut shared = SHARED.take();
    product.run(&mut shared, n_threads);
    SHARED.set(shared);
}

/// Returns the terms of each partial sum but the last, of `k` terms in all.
pub(super) fn terms_per_part<K: Kernel>(k: usize) -> usize {
    even_parts(k, K::KC).next_multiple_of(K::DEPTH)
}

/// Splits `whole` into ranges of at most `size`.
fn parts(whole: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    let end = whole.end;
    whole.step_by(size).map(move |start| start..(start + size).min(end))
}

/// Returns the size of nearly equal parts, the fewest of at most `max` that cover `n`.
fn even_parts(n: usize, max: usize) -> usize {
    n.div_ceil(n.div_ceil(max))
}

/// Output, shared by tasks that write disjoint parts.
#[derive(Clone, Copy)]
struct Out {
    data: OutData,
    row_stride: usize,
    store: Store,
}

#[derive(Clone, Copy)]
enum OutData {
    F32(*mut f32),
    Bf16(*mut bf16),
}

impl From<Output<'_>> for Out {
    fn from(out: Output<'_>) -> Self {
        match out {
            Output::F32(out) => {
                Self { data: OutData::F32(out.data.as_mut_ptr()), row_stride: out.row_stride, store: out.store }
            }
            Output::Bf16(out) => {
                Self { data: OutData::Bf16(out.data.as_mut_ptr()), row_stride: out.row_stride, store: out.store }
            }
        }
    }
}

// SAFETY: only `BlockedGemm::block` uses it; its caller keeps the parts disjoint.
unsafe impl Send for Out {}
// SAFETY: as above.
unsafe impl Sync for Out {}

struct BlockedGemm<'a, K: Kernel> {
    kernel: K,
    out: Out,
    a: Mat<'a, K::Operand>,
    b: Mat<'a, K::Operand>,
    kc: usize,
    scale: f32,
    accumulate: Accumulate,
}

/// Operand of a matmul.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    A,
    B,
}

/// Packed slivers of one operand: a range of its rows or columns, and a range of terms.
struct Packed<'a> {
    side: Side,
    /// Rows of a, or columns of b.
    range: Range<usize>,
    terms: Range<usize>,
    slivers: &'a [CacheLine],
}

impl<K: Kernel> BlockedGemm<'_, K> {
    fn run(&self, buffer: &mut Vec<CacheLine>, n_threads: usize) {
        let (m, n, k) = (self.a.rows, self.b.cols, self.a.cols);
        let (shared, n_shared, n_blocked) = if m <= n { (Side::A, m, n) } else { (Side::B, n, m) };
        // Sums that are rounded stay in their block until they have all terms.
        let fewest_terms = if self.is_rounded() { k } else { self.kc };
        let max_shared = (K::MAX_PACKED / fewest_terms).max(1).next_multiple_of(width::<K>(shared));
        for range in parts(0..n_shared, max_shared) {
            let max_terms = (K::MAX_PACKED / range.len() / self.kc).max(1) * self.kc;
            let max_terms = max_terms.max(fewest_terms);
            for terms in parts(0..k, max_terms) {
                let slivers = self.pack(shared, &range, &terms, buffer, n_threads);
                let shared = Packed { side: shared, range: range.clone(), terms, slivers };
                self.multiply(&shared, n_blocked, n_threads);
            }
        }
    }

    /// Returns true if sums are rounded to the output's dtype.
    fn is_rounded(&self) -> bool {
        matches!(self.out.data, OutData::Bf16(_))
    }

    /// Packs all slivers of a range of an operand into a buffer, which grows if needed, and returns them.
    fn pack<'p>(
        &self,
        side: Side,
        range: &Range<usize>,
        terms: &Range<usize>,
        buffer: &'p mut Vec<CacheLine>,
        n_threads: usize,
    ) -> &'p [CacheLine] {
        let lines = self.lines(side, terms);
        let n_lines = range.len().div_ceil(width::<K>(side)) * lines;
        if buffer.len() < n_lines {
            // Replace the buffer instead of growing it: its old contents need no copy.
            *buffer = Vec::new();
            *buffer = vec![CacheLine([0; CACHE_LINE_BYTES]); n_lines];
        }
        let slivers = &mut buffer[..n_lines];
        let pack = |(i, sliver)| self.pack_sliver(side, range, i, terms, sliver);
        if n_threads == 1 {
            slivers.chunks_exact_mut(lines).enumerate().for_each(pack);
        } else {
            slivers.par_chunks_exact_mut(lines).enumerate().for_each(pack);
        }
        slivers
    }

    /// Packs sliver `i` of a range of an operand.
    fn pack_sliver(
        &self,
        side: Side,
        range: &Range<usize>,
        i: usize,
        terms: &Range<usize>,
        mut sliver: &mut [CacheLine],
    ) {
        let of = if side == Side::A { self.a.t() } else { self.b };
        let first = range.start + i * width::<K>(side);
        let n = width::<K>(side).min(range.end - first);
        for terms in parts(terms.clone(), self.kc) {
            let to = sliver.split_off_mut(..lines::<K>(side, terms.len())).expect("a sliver has all of the terms");
            let block = of.part(terms.start, terms.len(), first, n);
            match side {
                Side::A => self.kernel.pack_a(block, to),
                Side::B => self.kernel.pack_b(block, to),
            }
        }
    }

    /// Returns the cache lines of a sliver with these terms.
    fn lines(&self, side: Side, terms: &Range<usize>) -> usize {
        parts(terms.clone(), self.kc).map(|terms| lines::<K>(side, terms.len())).sum()
    }

    /// Multiplies the shared operand with all `n` rows or columns of the other.
    fn multiply(&self, shared: &Packed<'_>, n: usize, n_threads: usize) {
        let side = if shared.side == Side::A { Side::B } else { Side::A };
        let n_slivers = n.div_ceil(width::<K>(side));
        let most = (K::BLOCK_LINES / lines::<K>(side, self.kc)).max(1);
        let most = if self.is_rounded() && self.a.cols > self.kc {
            most.min(SUMS / (shared.range.len().next_multiple_of(width::<K>(shared.side)) * width::<K>(side))).max(1)
        } else {
            most
        };
        let wanted = if n_threads == 1 { 1 } else { BLOCKS * n_threads };
        let size = even_parts(n_slivers, most.min(n_slivers.div_ceil(wanted))) * width::<K>(side);
        let compute = |i: usize| {
            let mut buffer = BLOCK.take();
            if buffer.is_empty() {
                buffer.resize(K::BLOCK_LINES, CacheLine([0; CACHE_LINE_BYTES]));
            }
            let mut sums = BLOCK_SUMS.take();
            // SAFETY: blocks are disjoint, and `gemm` borrows the output mutably.
            unsafe { self.block(shared, side, i * size..((i + 1) * size).min(n), &mut buffer, &mut sums) };
            BLOCK.set(buffer);
            BLOCK_SUMS.set(sums);
        };
        let n_blocks = n.div_ceil(size);
        if n_threads == 1 {
            (0..n_blocks).for_each(compute);
        } else {
            (0..n_blocks).into_par_iter().with_max_len(1).for_each(compute);
        }
    }

    /// Packs these rows or columns, one range of terms at a time, and multiplies them with the shared operand.
    ///
    /// # Safety
    ///
    /// This part of the output must be valid and owned by the caller.
    unsafe fn block(
        &self,
        shared: &Packed<'_>,
        side: Side,
        range: Range<usize>,
        buffer: &mut Vec<CacheLine>,
        sums: &mut Vec<f32>,
    ) {
        let shared_lines = self.lines(shared.side, &shared.terms);
        let n_slivers = range.len().div_ceil(width::<K>(side));
        let mut before = 0;
        for terms in parts(shared.terms.clone(), self.kc) {
            let slivers = self.pack(side, &range, &terms, buffer, 1);
            let (of_block, of_shared) = (lines::<K>(side, terms.len()), lines::<K>(shared.side, terms.len()));
            self.kernel.begin();
            for (i, one) in shared.slivers.chunks_exact(shared_lines).enumerate() {
                let one = (shared.range.start + i * width::<K>(shared.side), &one[before..before + of_shared]);
                for (j, other) in slivers.chunks_exact(of_block).enumerate() {
                    let other = (range.start + j * width::<K>(side), other);
                    let tile_idx = if terms.len() == self.a.cols { 0 } else { i * n_slivers + j };
                    let ((row, a), (col, b), (end_row, end_col)) = match side {
                        Side::A => (other, one, (range.end, shared.range.end)),
                        Side::B => (one, other, (shared.range.end, range.end)),
                    };
                    let (n_rows, n_cols) = (K::MR.min(end_row - row), K::NR.min(end_col - col));
                    let tile = TileProduct { row, col, n_rows, n_cols, a, b, terms: terms.clone() };
                    // SAFETY: the slivers have these terms; the caller guarantees valid memory for this part of the output.
                    unsafe {
                        match self.out.data {
                            OutData::F32(out) => self.add_to_output(out, &tile),
                            OutData::Bf16(out) => self.add_and_round(out, &tile, tile_sums::<K>(sums, tile_idx)),
                        }
                    }
                }
            }
            self.kernel.end();
            if self.out.store == Store::Streamed {
                // SAFETY: a fence has no preconditions. It makes streamed stores visible to threads that synchronize with
                // this one.
                unsafe { std::arch::x86_64::_mm_sfence() };
            }
            before += of_shared;
        }
    }

    /// Multiplies two slivers into the output.
    ///
    /// # Safety
    ///
    /// As for [`BlockedGemm::block`]; the slivers must have the tile's terms.
    unsafe fn add_to_output(&self, out: *mut f32, tile: &TileProduct<'_>) {
        let accumulate = if tile.terms.start > 0 { Accumulate::Add } else { self.accumulate };
        let stride = self.out.row_stride;
        // SAFETY: the caller's contract.
        unsafe {
            let data = out.add(tile.row * stride + tile.col);
            // Partial sums are read again.
            let is_final = accumulate == Accumulate::Overwrite && tile.terms.end == self.a.cols;
            let store = if is_final { self.out.store } else { Store::Cached };
            let to = Tile { data, stride, n_rows: tile.n_rows, n_cols: tile.n_cols, store };
            self.kernel.multiply(tile.terms.len(), tile.a, tile.b, to, self.scale, accumulate);
        }
    }

    /// Multiplies two slivers into `sums`. Writes the sums to the output, rounded, if they have all terms.
    ///
    /// # Safety
    ///
    /// As for [`BlockedGemm::add_to_output`].
    unsafe fn add_and_round(&self, out: *mut bf16, tile: &TileProduct<'_>, sums: &mut [f32]) {
        let accumulate = if tile.terms.start > 0 { Accumulate::Add } else { Accumulate::Overwrite };
        let store = Store::Cached;
        let to = Tile { data: sums.as_mut_ptr(), stride: K::NR, n_rows: tile.n_rows, n_cols: tile.n_cols, store };
        // SAFETY: the sums have MR rows of NR; the rest is the caller's contract.
        unsafe { self.kernel.multiply(tile.terms.len(), tile.a, tile.b, to, self.scale, accumulate) };
        if tile.terms.end < self.a.cols {
            return;
        }
        vectorised!(for (i, sums) in sums.chunks_exact(K::NR).enumerate().take(tile.n_rows) {
            // SAFETY: the caller's contract: this thread owns these elements of the row.
            let row = unsafe {
                let first = out.add((tile.row + i) * self.out.row_stride + tile.col);
                std::slice::from_raw_parts_mut(first, tile.n_cols)
            };
            write_bf16(sums, row, self.accumulate);
        });
    }
}

/// Tile of the output, and the slivers that are multiplied into it.
struct TileProduct<'a> {
    row: usize,
    col: usize,
    n_rows: usize,
    n_cols: usize,
    a: &'a [CacheLine],
    b: &'a [CacheLine],
    terms: Range<usize>,
}

/// Returns the sums of tile `i` of a block in a buffer, which grows if needed.
fn tile_sums<K: Kernel>(sums: &mut Vec<f32>, i: usize) -> &mut [f32] {
    let (start, end) = (i * K::MR * K::NR, (i + 1) * K::MR * K::NR);
    if sums.len() < end {
        sums.resize(end, 0.0);
    }
    &mut sums[start..end]
}

/// Returns the rows or columns of a sliver.
fn width<K: Kernel>(side: Side) -> usize {
    if side == Side::A { K::MR } else { K::NR }
}

/// Returns the cache lines of a sliver of `kc` terms.
fn lines<K: Kernel>(side: Side, kc: usize) -> usize {
    if side == Side::A { K::lines_a(kc) } else { K::lines_b(kc) }
}
