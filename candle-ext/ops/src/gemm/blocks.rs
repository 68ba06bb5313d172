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

use super::accumulate::Accumulate;
use super::kernel::{CacheLine, Kernel};
use super::matrix::Side;
use super::matrix::{Mat, Output, Threads};
use super::packed::{CACHE_LINE_BYTES, SUMS};
use super::tiles::{Slivers, TileProducts, even_parts, lines, pack_sliver, parts, terms_per_part, width};

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
