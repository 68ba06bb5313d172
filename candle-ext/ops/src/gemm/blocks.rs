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

use rayon::prelude::*;

use super::matrix::{Accumulate, Mat, MatMut, Threads};
use super::packed::CACHE_LINE_BYTES;

/// Packing and multiplication for one instruction set.
pub(super) trait Kernel: Copy + Send + Sync {
    /// Rows of a tile.
    const MR: usize;
    /// Columns of a tile.
    const NR: usize;
    /// Most terms per partial sum.
    const KC: usize;
    /// Cache lines of a block, which shares the L2 cache with the streamed operand.
    const BLOCK_LINES: usize;
    /// Elements of the shared operand that are packed at once, approximately.
    const MAX_PACKED: usize;

    /// Returns the cache lines of a packed sliver of MR rows with `kc` terms.
    fn lines_a(kc: usize) -> usize;

    /// Returns the cache lines of a packed sliver of NR columns with `kc` terms.
    fn lines_b(kc: usize) -> usize;

    /// Packs a matrix [k, n], the transpose of n rows of a, with n <= MR.
    fn pack_a(self, block: Mat<'_>, to: &mut [CacheLine]);

    /// Packs a matrix [k, n] of columns of b, with n <= NR.
    fn pack_b(self, block: Mat<'_>, to: &mut [CacheLine]);

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
pub(super) struct CacheLine([u8; CACHE_LINE_BYTES]);

/// Address and valid size of a tile in the output.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub(super) data: *mut f32,
    pub(super) stride: usize,
    pub(super) n_rows: usize,
    pub(super) n_cols: usize,
}

/// FLOPs below which a single thread computes the GEMM: waking another one would take longer.
const PARALLEL_FROM: usize = 1 << 20;
/// Fewest blocks per thread. More blocks balance the load better.
const BLOCKS: usize = 2;

thread_local! {
    static SHARED: RefCell<Vec<CacheLine>> = const { RefCell::new(Vec::new()) };
    static BLOCK: RefCell<Vec<CacheLine>> = const { RefCell::new(Vec::new()) };
}

/// Computes out = [out +] scale a b. The shapes must agree, and no dimension may be 0.
pub(super) fn gemm<K: Kernel>(
    kernel: K,
    out: MatMut<'_>,
    accumulate: Accumulate,
    a: Mat<'_>,
    b: Mat<'_>,
    scale: f32,
    threads: Threads,
) {
    let is_parallel = threads == Threads::All && out.rows * out.cols * a.cols >= PARALLEL_FROM;
    let n_threads = if is_parallel { rayon::current_num_threads() } else { 1 };
    let product = BlockedGemm {
        kernel,
        out: Out { data: out.data.as_mut_ptr(), row_stride: out.row_stride },
        a,
        b,
        kc: even_parts(a.cols, K::KC),
        scale,
        accumulate,
    };
    // Taken out of the thread-local: while it waits for other threads, this one may run another GEMM.
    let mut shared = SHARED.take();
    product.run(&mut shared, n_threads);
    SHARED.set(shared);
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
    data: *mut f32,
    row_stride: usize,
}

// SAFETY: only `BlockedGemm::block` uses it; its caller keeps the parts disjoint.
unsafe impl Send for Out {}
// SAFETY: as above.
unsafe impl Sync for Out {}

struct BlockedGemm<'a, K> {
    kernel: K,
    out: Out,
    a: Mat<'a>,
    b: Mat<'a>,
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
        let max_shared = (K::MAX_PACKED / self.kc).next_multiple_of(width::<K>(shared));
        for range in parts(0..n_shared, max_shared) {
            let max_terms = (K::MAX_PACKED / range.len() / self.kc).max(1) * self.kc;
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
        let wanted = if n_threads == 1 { 1 } else { BLOCKS * n_threads };
        let size = even_parts(n_slivers, most.min(n_slivers.div_ceil(wanted))) * width::<K>(side);
        let compute = |i: usize| {
            let mut buffer = BLOCK.take();
            if buffer.is_empty() {
                buffer.resize(K::BLOCK_LINES, CacheLine([0; CACHE_LINE_BYTES]));
            }
            // SAFETY: blocks are disjoint, and `gemm` borrows the output mutably.
            unsafe { self.block(shared, side, i * size..((i + 1) * size).min(n), &mut buffer) };
            BLOCK.set(buffer);
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
    unsafe fn block(&self, shared: &Packed<'_>, side: Side, range: Range<usize>, buffer: &mut Vec<CacheLine>) {
        let shared_lines = self.lines(shared.side, &shared.terms);
        let mut before = 0;
        for terms in parts(shared.terms.clone(), self.kc) {
            let slivers = self.pack(side, &range, &terms, buffer, 1);
            let (of_block, of_shared) = (lines::<K>(side, terms.len()), lines::<K>(shared.side, terms.len()));
            let accumulate = if terms.start > 0 { Accumulate::Add } else { self.accumulate };
            self.kernel.begin();
            for (i, one) in shared.slivers.chunks_exact(shared_lines).enumerate() {
                let one = (shared.range.start + i * width::<K>(shared.side), &one[before..before + of_shared]);
                for (j, other) in slivers.chunks_exact(of_block).enumerate() {
                    let other = (range.start + j * width::<K>(side), other);
                    let ends = (shared.range.end, range.end);
                    // SAFETY: the slivers have these terms; the caller guarantees valid memory for this part of the output.
                    unsafe {
                        match side {
                            Side::A => self.tile(terms.len(), other, one, (ends.1, ends.0), accumulate),
                            Side::B => self.tile(terms.len(), one, other, ends, accumulate),
                        }
                    }
                }
            }
            self.kernel.end();
            before += of_shared;
        }
    }

    /// Multiplies a sliver of a, given with its first row, and one of b, given with its first column.
    ///
    /// # Safety
    ///
    /// As for [`BlockedGemm::block`]; the slivers must have `kc` terms.
    unsafe fn tile(
        &self,
        kc: usize,
        (row, a): (usize, &[CacheLine]),
        (col, b): (usize, &[CacheLine]),
        (end_row, end_col): (usize, usize),
        accumulate: Accumulate,
    ) {
        let (n_rows, n_cols) = (K::MR.min(end_row - row), K::NR.min(end_col - col));
        // SAFETY: the caller's contract.
        unsafe {
            let data = self.out.data.add(row * self.out.row_stride + col);
            let tile = Tile { data, stride: self.out.row_stride, n_rows, n_cols };
            self.kernel.multiply(kc, a, b, tile, self.scale, accumulate);
        }
    }
}

/// Returns the rows or columns of a sliver.
fn width<K: Kernel>(side: Side) -> usize {
    if side == Side::A { K::MR } else { K::NR }
}

/// Returns the cache lines of a sliver of `kc` terms.
fn lines<K: Kernel>(side: Side, kc: usize) -> usize {
    if side == Side::A { K::lines_a(kc) } else { K::lines_b(kc) }
}
