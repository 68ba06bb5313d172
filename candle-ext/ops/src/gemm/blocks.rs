//! The loops around a kernel that multiplies packed slivers: both sides are packed once, by all threads; then each thread
//! multiplies rows of its own.
//!
//! The scheme is Goto's (Anatomy of High-Performance Matrix Multiplication, 2008) with the loops turned: a sliver of a
//! lies in the first cache while a block of b streams past it from the second. No sum is split among threads, and terms are
//! summed in blocks that depend on their number alone: the bits of a result do not depend on the threads.

use std::cell::RefCell;
use std::ops::Range;

use rayon::prelude::*;

use super::{Mat, MatMut, Old, Threads};

/// How one kind of processor packs and multiplies.
pub(super) trait Kernel: Copy + Send + Sync {
    /// Rows of a tile.
    const MR: usize;
    /// Columns of a tile.
    const NR: usize;
    /// Terms that are summed before a tile is added to the output, at most.
    const KC: usize;

    /// What a sliver of MR rows with `kc` terms takes when it is packed.
    fn lines_a(kc: usize) -> usize;

    /// The same for NR columns.
    fn lines_b(kc: usize) -> usize;

    /// Packs a matrix [k, n], the transpose of n rows of a, at most MR.
    fn pack_a(self, block: Mat<'_>, to: &mut [Line]);

    /// Packs a matrix [k, n], columns of b, at most NR.
    fn pack_b(self, block: Mat<'_>, to: &mut [Line]);

    /// tile = [tile +] scale a b for packed slivers of `kc` terms.
    ///
    /// # Safety
    ///
    /// The slivers must be of that many terms, the tile's rows and columns must be there for this thread alone, and
    /// [`Kernel::begin`] must have been called on it.
    unsafe fn multiply(self, kc: usize, a: &[Line], b: &[Line], tile: Tile, scale: f32, old: Old);

    /// Called by a thread before it multiplies.
    fn begin(self) {}

    /// Called by a thread after it has multiplied.
    fn end(self) {}
}

/// A cache line of packed numbers.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line([u8; 64]);

/// Where a tile lies in the output, and how much of it is there.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub(super) data: *mut f32,
    pub(super) stride: usize,
    pub(super) n_rows: usize,
    pub(super) n_cols: usize,
}

/// Columns of b that stream past the slivers of a band: with their terms about half of a second cache.
const BLOCK_B: usize = 1 << 16;
/// Elements of a and of b that are packed at once.
const MAX_PACKED: usize = 1 << 21;
/// Products of fewer operations than this are not worth waking another thread.
const PARALLEL_FROM: usize = 1 << 20;
/// Bands that a thread computes: more of them even out what else the machine does.
const BANDS: usize = 2;

thread_local! {
    static PACKED: RefCell<[Vec<Line>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
}

/// out = [out +] scale a b; the shapes agree and no dimension is 0.
pub(super) fn gemm<K: Kernel>(
    kernel: K,
    out: MatMut<'_>,
    old: Old,
    a: Mat<'_>,
    b: Mat<'_>,
    scale: f32,
    threads: Threads,
) {
    let is_parallel = threads == Threads::All && out.rows * out.cols * a.cols >= PARALLEL_FROM;
    let n_threads = if is_parallel { rayon::current_num_threads() } else { 1 };
    let product = Product {
        kernel,
        out: Out { data: out.data.as_mut_ptr(), row_stride: out.row_stride },
        a,
        b,
        kc: even_parts(a.cols, K::KC),
        scale,
        old,
    };
    // Taken out: while other threads compute, this one may be given another product to do.
    let mut packed = PACKED.take();
    product.run(&mut packed, n_threads);
    PACKED.set(packed);
}

/// Ranges of at most `size` that make up `whole`.
fn parts(whole: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    let end = whole.end;
    whole.step_by(size).map(move |start| start..(start + size).min(end))
}

/// The size of the fewest parts of at most `max` that `n` falls into, nearly equal.
fn even_parts(n: usize, max: usize) -> usize {
    n.div_ceil(n.div_ceil(max))
}

/// The output, for tasks that write different parts of it.
#[derive(Clone, Copy)]
struct Out {
    data: *mut f32,
    row_stride: usize,
}

// SAFETY: `Product::band` is the only user, and its caller keeps its parts apart.
unsafe impl Send for Out {}
// SAFETY: as above.
unsafe impl Sync for Out {}

struct Product<'a, K> {
    kernel: K,
    out: Out,
    a: Mat<'a>,
    b: Mat<'a>,
    kc: usize,
    scale: f32,
    old: Old,
}

/// What is packed: some terms of some rows and columns.
struct Packed<'a> {
    rows: Range<usize>,
    cols: Range<usize>,
    terms: Range<usize>,
    a: &'a [Line],
    b: &'a [Line],
}

impl<K: Kernel> Product<'_, K> {
    fn run(&self, [a_buffer, b_buffer]: &mut [Vec<Line>; 2], n_threads: usize) {
        let (m, n, k) = (self.a.rows, self.b.cols, self.a.cols);
        let max_rows = (MAX_PACKED / self.kc).next_multiple_of(K::MR);
        let max_cols = (MAX_PACKED / self.kc).next_multiple_of(K::NR);
        let widest = m.min(max_rows).max(n.min(max_cols));
        let max_terms = (MAX_PACKED / widest / self.kc).max(1) * self.kc;
        for rows in parts(0..m, max_rows) {
            for terms in parts(0..k, max_terms) {
                let max_cols = (MAX_PACKED / terms.len()).next_multiple_of(K::NR);
                for (i, cols) in parts(0..n, max_cols).enumerate() {
                    let a = (i == 0).then_some(&mut *a_buffer);
                    self.pack(a, b_buffer, &rows, &cols, &terms, n_threads);
                    let packed = Packed { rows: rows.clone(), cols, terms: terms.clone(), a: a_buffer, b: b_buffer };
                    self.multiply(&packed, n_threads);
                }
            }
        }
    }

    /// Lines of a sliver with all of these terms.
    fn lines(&self, terms: &Range<usize>, lines: fn(usize) -> usize) -> usize {
        parts(terms.clone(), self.kc).map(|terms| lines(terms.len())).sum()
    }

    fn pack(
        &self,
        a: Option<&mut Vec<Line>>,
        b: &mut Vec<Line>,
        rows: &Range<usize>,
        cols: &Range<usize>,
        terms: &Range<usize>,
        n_threads: usize,
    ) {
        let (a_lines, b_lines) = (self.lines(terms, K::lines_a), self.lines(terms, K::lines_b));
        let a_slivers = a.into_iter().flat_map(|a| slivers(a, rows.len().div_ceil(K::MR), a_lines));
        let jobs: Vec<(Side, usize, &mut [Line])> = slivers(b, cols.len().div_ceil(K::NR), b_lines)
            .enumerate()
            .map(|(i, sliver)| (Side::B, i, sliver))
            .chain(a_slivers.enumerate().map(|(i, sliver)| (Side::A, i, sliver)))
            .collect();
        let pack = |(side, i, mut sliver): (Side, usize, &mut [Line])| {
            let (of, n, width, lines): (_, _, _, fn(usize) -> usize) = match side {
                Side::A => (self.a.t(), rows, K::MR, K::lines_a),
                Side::B => (self.b, cols, K::NR, K::lines_b),
            };
            let first = n.start + i * width;
            for terms in parts(terms.clone(), self.kc) {
                let block = of.part(terms.start, terms.len(), first, width.min(n.end - first));
                let to = sliver.split_off_mut(..lines(terms.len())).expect("a sliver has all of the terms");
                match side {
                    Side::A => self.kernel.pack_a(block, to),
                    Side::B => self.kernel.pack_b(block, to),
                }
            }
        };
        if n_threads == 1 { jobs.into_iter().for_each(pack) } else { jobs.into_par_iter().for_each(pack) }
    }

    fn multiply(&self, packed: &Packed<'_>, n_threads: usize) {
        let n_slivers = packed.rows.len().div_ceil(K::MR);
        let n_columns = packed.cols.len().div_ceil(K::NR);
        let wanted = if n_threads == 1 { 1 } else { BANDS * n_threads };
        let n_bands = wanted.min(n_slivers);
        let n_col_parts = wanted.div_ceil(n_bands).min(n_columns);
        let part = |i: usize, n_parts: usize, whole: usize| i * whole / n_parts..(i + 1) * whole / n_parts;
        // SAFETY: bands do not overlap, and the output is borrowed mutably by `gemm`.
        let compute = |i: usize| unsafe {
            let slivers = part(i / n_col_parts, n_bands, n_slivers);
            let columns = part(i % n_col_parts, n_col_parts, n_columns);
            self.band(packed, slivers, columns);
        };
        let n = n_bands * n_col_parts;
        if n_threads == 1 {
            (0..n).for_each(compute);
        } else {
            (0..n).into_par_iter().with_max_len(1).for_each(compute);
        }
    }

    /// Computes these rows and columns, given in slivers.
    ///
    /// # Safety
    ///
    /// Nobody else may use that part of the output, and it must be there.
    unsafe fn band(&self, packed: &Packed<'_>, slivers: Range<usize>, columns: Range<usize>) {
        let Packed { rows, cols, terms, a, b } = packed;
        let (a_lines, b_lines) = (self.lines(terms, K::lines_a), self.lines(terms, K::lines_b));
        let block = (BLOCK_B / (K::NR * self.kc)).max(1);
        self.kernel.begin();
        for columns in parts(columns, block) {
            let mut before = (0, 0);
            for terms in parts(terms.clone(), self.kc) {
                let kc = terms.len();
                let old = if terms.start > 0 { Old::Keep } else { self.old };
                for i in slivers.clone() {
                    let first_row = rows.start + i * K::MR;
                    let n_rows = K::MR.min(rows.end - first_row);
                    let a = &a[i * a_lines + before.0..][..K::lines_a(kc)];
                    for j in columns.clone() {
                        let first_col = cols.start + j * K::NR;
                        let n_cols = K::NR.min(cols.end - first_col);
                        let b = &b[j * b_lines + before.1..][..K::lines_b(kc)];
                        // SAFETY: the slivers have kc terms, and the caller answers for the part of the output.
                        unsafe {
                            let data = self.out.data.add(first_row * self.out.row_stride + first_col);
                            let tile = Tile { data, stride: self.out.row_stride, n_rows, n_cols };
                            self.kernel.multiply(kc, a, b, tile, self.scale, old);
                        }
                    }
                }
                before = (before.0 + K::lines_a(kc), before.1 + K::lines_b(kc));
            }
        }
        self.kernel.end();
    }
}

/// Which matrix a sliver is of.
#[derive(Clone, Copy)]
enum Side {
    A,
    B,
}

/// The first `n` pieces of `lines` lines each, of a buffer that grows if need be.
fn slivers(buffer: &mut Vec<Line>, n: usize, lines: usize) -> impl Iterator<Item = &mut [Line]> {
    if buffer.len() < n * lines {
        buffer.resize(n * lines, Line([0; 64]));
    }
    buffer[..n * lines].chunks_mut(lines)
}
