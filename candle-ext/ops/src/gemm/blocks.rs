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
use super::matrix::{Mat, MatMut, Output, Store, Threads};
use super::operand::Side;
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
    let (k, kc) = (a.cols, terms_per_part::<K>(a.cols));
    let product = BlockedGemm { tiles: TileProducts { kernel, out: out.into(), k, kc, scale, accumulate }, a, b };
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

// SAFETY: only `TileProducts::multiply` uses it; its callers keep the parts disjoint.
unsafe impl Send for Out {}
// SAFETY: as above.
unsafe impl Sync for Out {}

struct BlockedGemm<'a, K: Kernel> {
    tiles: TileProducts<K>,
    a: Mat<'a, K::Operand>,
    b: Mat<'a, K::Operand>,
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
        let kc = self.tiles.kc;
        let fewest_terms = if self.tiles.is_rounded() { k } else { kc };
        let max_shared = (K::MAX_PACKED / fewest_terms).max(1).next_multiple_of(width::<K>(shared));
        for range in parts(0..n_shared, max_shared) {
            let max_terms = (K::MAX_PACKED / range.len() / kc).max(1) * kc;
            let max_terms = max_terms.max(fewest_terms);
            for terms in parts(0..k, max_terms) {
                let slivers = self.pack(shared, &range, &terms, buffer, n_threads);
                let shared = Packed { side: shared, range: range.clone(), terms, slivers };
                self.multiply(&shared, n_blocked, n_threads);
            }
        }
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
        let (lines, kc) = (self.tiles.lines(side, terms), self.tiles.kc);
        let n_lines = range.len().div_ceil(width::<K>(side)) * lines;
        if buffer.len() < n_lines {
            // Replace the buffer instead of growing it: its old contents need no copy.
            *buffer = Vec::new();
            *buffer = vec![CacheLine([0; CACHE_LINE_BYTES]); n_lines];
        }
        let slivers = &mut buffer[..n_lines];
        let of = if side == Side::A { self.a.t() } else { self.b };
        let pack = |(i, sliver): (usize, _)| {
            let first = range.start + i * width::<K>(side);
            let columns = first..(first + width::<K>(side)).min(range.end);
            pack_sliver(self.tiles.kernel, side, of, (terms, columns), kc, sliver);
        };
        if n_threads == 1 {
            slivers.chunks_exact_mut(lines).enumerate().for_each(pack);
        } else {
            slivers.par_chunks_exact_mut(lines).enumerate().for_each(pack);
        }
        slivers
    }

    /// Multiplies the shared operand with all `n` rows or columns of the other.
    fn multiply(&self, shared: &Packed<'_>, n: usize, n_threads: usize) {
        let side = if shared.side == Side::A { Side::B } else { Side::A };
        let n_slivers = n.div_ceil(width::<K>(side));
        let most = (K::BLOCK_LINES / lines::<K>(side, self.tiles.kc)).max(1);
        let most = if self.tiles.is_rounded() && self.tiles.k > self.tiles.kc {
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
        let (mut before, of_shared) = (0, self.tiles.lines(shared.side, &shared.terms));
        for terms in parts(shared.terms.clone(), self.tiles.kc) {
            let n_lines = lines::<K>(side, terms.len());
            let slivers = self.pack(side, &range, &terms, buffer, 1);
            let of_block = Slivers { range: range.clone(), lines: slivers, n_lines, n_lines_before: 0 };
            let (range, lines_before) = (shared.range.clone(), before);
            before += lines::<K>(shared.side, terms.len());
            let of_shared = Slivers { range, lines: shared.slivers, n_lines: of_shared, n_lines_before: lines_before };
            // SAFETY: the slivers have these terms; the rest is the caller's contract.
            unsafe { self.tiles.multiply((shared.side, &of_shared), &of_block, terms, sums) };
        }
    }
}

/// Packed slivers of one operand, and the place of some terms in them.
struct Slivers<'a> {
    /// Rows of a, or columns of b.
    range: Range<usize>,
    lines: &'a [CacheLine],
    /// Cache lines of a sliver.
    n_lines: usize,
    /// Cache lines of a sliver before the terms.
    n_lines_before: usize,
}

impl Slivers<'_> {
    /// Lists the slivers from these terms on, with their first row or column. Each has `width` rows or columns.
    fn each(&self, width: usize) -> impl Iterator<Item = (usize, &[CacheLine])> {
        let firsts = self.range.clone().step_by(width);
        firsts.zip(self.lines.chunks_exact(self.n_lines)).map(|(first, sliver)| (first, &sliver[self.n_lines_before..]))
    }
}

/// Output of a matmul, and how slivers are multiplied into it.
struct TileProducts<K: Kernel> {
    kernel: K,
    out: Out,
    /// Terms of a sum.
    k: usize,
    /// Terms of each partial sum but the last.
    kc: usize,
    scale: f32,
    accumulate: Accumulate,
}

impl<K: Kernel> TileProducts<K> {
    /// Returns true if sums are rounded to the output's dtype.
    fn is_rounded(&self) -> bool {
        matches!(self.out.data, OutData::Bf16(_))
    }

    /// Returns the cache lines of a sliver with these terms.
    fn lines(&self, side: Side, terms: &Range<usize>) -> usize {
        lines_of_parts::<K>(side, terms, self.kc)
    }

    /// Multiplies each sliver of the operand `side` with each of the other.
    ///
    /// # Safety
    ///
    /// The slivers must have these terms, one partial sum. This part of the output must be valid and owned by the caller.
    unsafe fn multiply(
        &self,
        (side, outer): (Side, &Slivers<'_>),
        inner: &Slivers<'_>,
        terms: Range<usize>,
        sums: &mut Vec<f32>,
    ) {
        let (of_outer, of_inner) = if side == Side::A { (K::MR, K::NR) } else { (K::NR, K::MR) };
        let n_inner = inner.range.len().div_ceil(of_inner);
        self.kernel.begin();
        for (i, one) in outer.each(of_outer).enumerate() {
            for (j, other) in inner.each(of_inner).enumerate() {
                let tile_idx = if terms.len() == self.k { 0 } else { i * n_inner + j };
                let ((row, a), (col, b), (end_row, end_col)) = match side {
                    Side::A => (one, other, (outer.range.end, inner.range.end)),
                    Side::B => (other, one, (inner.range.end, outer.range.end)),
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
    }

    /// Multiplies two slivers into the output.
    ///
    /// # Safety
    ///
    /// As for [`TileProducts::multiply`]; the slivers must have the tile's terms.
    unsafe fn add_to_output(&self, out: *mut f32, tile: &TileProduct<'_>) {
        let accumulate = if tile.terms.start > 0 { Accumulate::Add } else { self.accumulate };
        let stride = self.out.row_stride;
        // SAFETY: the caller's contract.
        unsafe {
            let data = out.add(tile.row * stride + tile.col);
            // Partial sums are read again.
            let is_final = accumulate == Accumulate::Overwrite && tile.terms.end == self.k;
            let store = if is_final { self.out.store } else { Store::Cached };
            let to = Tile { data, stride, n_rows: tile.n_rows, n_cols: tile.n_cols, store };
            self.kernel.multiply(tile.terms.len(), tile.a, tile.b, to, self.scale, accumulate);
        }
    }

    /// Multiplies two slivers into `sums`. Writes the sums to the output, rounded, if they have all terms.
    ///
    /// # Safety
    ///
    /// As for [`TileProducts::add_to_output`].
    unsafe fn add_and_round(&self, out: *mut bf16, tile: &TileProduct<'_>, sums: &mut [f32]) {
        let accumulate = if tile.terms.start > 0 { Accumulate::Add } else { Accumulate::Overwrite };
        let store = Store::Cached;
        let to = Tile { data: sums.as_mut_ptr(), stride: K::NR, n_rows: tile.n_rows, n_cols: tile.n_cols, store };
        // SAFETY: the sums have MR rows of NR; the rest is the caller's contract.
        unsafe { self.kernel.multiply(tile.terms.len(), tile.a, tile.b, to, self.scale, accumulate) };
        if tile.terms.end < self.k {
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

/// Packs some terms and columns of a matrix [k, n]: b itself, or the transpose of a.
fn pack_sliver<K: Kernel>(
    kernel: K,
    side: Side,
    of: Mat<'_, K::Operand>,
    (terms, columns): (&Range<usize>, Range<usize>),
    kc: usize,
    mut sliver: &mut [CacheLine],
) {
    for terms in parts(terms.clone(), kc) {
        let to = sliver.split_off_mut(..lines::<K>(side, terms.len())).expect("a sliver has all of the terms");
        let block = of.part(terms.start, terms.len(), columns.start, columns.len());
        match side {
            Side::A => kernel.pack_a(block, to),
            Side::B => kernel.pack_b(block, to),
        }
    }
}

/// Packs a whole operand, a [m, k] or b [k, n], into a buffer.
pub(super) fn pack_operand<K: Kernel>(kernel: K, side: Side, of: Mat<'_, K::Operand>, buffer: &mut Vec<CacheLine>) {
    let of = if side == Side::A { of.t() } else { of };
    let (terms, kc) = (0..of.rows, terms_per_part::<K>(of.rows));
    let n_lines = lines_of_parts::<K>(side, &terms, kc);
    buffer.resize(of.cols.div_ceil(width::<K>(side)) * n_lines, CacheLine([0; CACHE_LINE_BYTES]));
    for (columns, sliver) in parts(0..of.cols, width::<K>(side)).zip(buffer.chunks_exact_mut(n_lines)) {
        pack_sliver(kernel, side, of, (&terms, columns), kc, sliver);
    }
}

/// Computes out = [out +] scale a b on the calling thread, for operands with `k` terms from [`pack_operand`].
///
/// The bits are those of [`gemm`].
pub(super) fn gemm_of_packed<K: Kernel>(
    kernel: K,
    out: MatMut<'_>,
    accumulate: Accumulate,
    [a, b]: [&[CacheLine]; 2],
    k: usize,
    scale: f32,
) {
    let (rows, cols, kc) = (out.rows, out.cols, terms_per_part::<K>(k));
    let tiles = TileProducts { kernel, out: Output::F32(out).into(), k, kc, scale, accumulate };
    let [of_a, of_b] = [Side::A, Side::B].map(|side| tiles.lines(side, &(0..k)));
    assert!(a.len() == rows.div_ceil(K::MR) * of_a && b.len() == cols.div_ceil(K::NR) * of_b, "the shapes agree");
    let mut before = [0; 2];
    for terms in parts(0..k, kc) {
        let a = Slivers { range: 0..rows, lines: a, n_lines: of_a, n_lines_before: before[0] };
        let b = Slivers { range: 0..cols, lines: b, n_lines: of_b, n_lines_before: before[1] };
        before[0] += lines::<K>(Side::A, terms.len());
        before[1] += lines::<K>(Side::B, terms.len());
        // SAFETY: `out` is borrowed mutably, and its constructor checked its size. The slivers have all terms.
        unsafe { tiles.multiply((Side::A, &a), &b, terms, &mut Vec::new()) };
    }
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

/// Returns the cache lines of a sliver with these terms, in parts of at most `kc`.
fn lines_of_parts<K: Kernel>(side: Side, terms: &Range<usize>, kc: usize) -> usize {
    parts(terms.clone(), kc).map(|terms| lines::<K>(side, terms.len())).sum()
}

/// Returns the cache lines of a sliver of `kc` terms.
fn lines<K: Kernel>(side: Side, kc: usize) -> usize {
    if side == Side::A { K::lines_a(kc) } else { K::lines_b(kc) }
}
