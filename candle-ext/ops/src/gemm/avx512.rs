//! The f32 product on processors with AVX-512: blocks of b are packed once and shared, slivers of a by whoever uses them.
//!
//! The scheme is Goto's (Anatomy of High-Performance Matrix Multiplication, 2008) with the loops turned: a sliver of a
//! lies in the first cache while the packed block of b streams past it from the second. No sum is split among threads:
//! the bits of a result do not depend on their number.

use std::arch::x86_64::{
    __m512, _MM_HINT_T0, _mm_prefetch, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps,
    _mm512_mul_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps,
};
use std::cell::RefCell;

use rayon::prelude::*;

use super::transpose::transpose;
use super::{Mat, MatMut, Old, Threads};

/// Rows of a tile: 28 of the 32 registers hold its sums, two a row.
const MR: usize = 14;
/// Columns of a tile.
const NR: usize = 32;
/// Floats in a register.
const LANES: usize = 16;
/// Terms that are summed before a tile is added to the output: a sliver of a is then 21 KiB.
const MAX_KC: usize = 384;
/// Columns of b that are packed at once: 960 KiB with the above.
const MAX_NC: usize = 640;
/// Products of fewer operations than this are not worth waking another thread.
const PARALLEL_FROM: usize = 1 << 20;

thread_local! {
    static A_SLIVER: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    static B_BLOCK: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Tells whether [`gemm`] may be called.
pub(super) fn is_here() -> bool {
    is_x86_feature_detected!("avx512f")
}

/// out = [out +] scale a b; the shapes agree and no dimension is 0.
pub(super) fn gemm(out: MatMut<'_>, old: Old, a: Mat<'_>, b: Mat<'_>, scale: f32, threads: Threads) {
    assert!(is_here(), "this product needs AVX-512");
    let is_parallel = threads == Threads::All && out.rows * out.cols * a.cols >= PARALLEL_FROM;
    let (nc, kc) = (even_parts(out.cols, MAX_NC).next_multiple_of(NR), even_parts(a.cols, MAX_KC));
    let out = Out { data: out.data.as_mut_ptr(), rows: out.rows, row_stride: out.row_stride };
    // Taken out: while other threads compute, this one may be given another product to do.
    let mut block = B_BLOCK.take();
    block.resize(nc * kc, 0.0);
    for first_col in (0..b.cols).step_by(nc) {
        let cols = first_col..(first_col + nc).min(b.cols);
        for first_k in (0..a.cols).step_by(kc) {
            let terms = first_k..(first_k + kc).min(a.cols);
            let keeps = old == Old::Keep || first_k > 0;
            let task = Task { out, a, first_k, kc: terms.len(), first_col, n_cols: cols.len(), scale, keeps };
            let pack = |(i, sliver): (usize, &mut [f32])| task.pack_b(b, i, sliver);
            let n_slivers = cols.len().div_ceil(NR);
            let packed = &mut block[..n_slivers * NR * terms.len()];
            if is_parallel {
                packed.par_chunks_mut(NR * terms.len()).enumerate().for_each(pack);
            } else {
                packed.chunks_mut(NR * terms.len()).enumerate().for_each(pack);
            }
            let packed = &*packed;
            let n_rows = out.rows.div_ceil(MR);
            // SAFETY: each number is of other rows of the output, which this call has borrowed mutably.
            let compute = |i: usize| unsafe { task.rows(i, packed) };
            if is_parallel {
                (0..n_rows).into_par_iter().for_each(compute);
            } else {
                (0..n_rows).for_each(compute);
            }
        }
    }
    B_BLOCK.set(block);
}

/// The size of the fewest parts of at most `max` that `n` falls into, nearly equal.
fn even_parts(n: usize, max: usize) -> usize {
    n.div_ceil(n.div_ceil(max))
}

/// The output, for tasks that write different rows of it.
#[derive(Clone, Copy)]
struct Out {
    data: *mut f32,
    rows: usize,
    row_stride: usize,
}

// SAFETY: `Task::rows` is the only user, and its caller keeps rows apart.
unsafe impl Send for Out {}
// SAFETY: as above.
unsafe impl Sync for Out {}

/// A block of the product: some terms of some columns.
#[derive(Clone, Copy)]
struct Task<'a> {
    out: Out,
    a: Mat<'a>,
    first_k: usize,
    kc: usize,
    first_col: usize,
    n_cols: usize,
    scale: f32,
    keeps: bool,
}

impl Task<'_> {
    /// Packs the i-th sliver of NR columns of the block: NR floats for each term, zeros past the last column.
    fn pack_b(&self, b: Mat<'_>, i: usize, sliver: &mut [f32]) {
        let first_col = self.first_col + i * NR;
        let n_cols = NR.min(self.first_col + self.n_cols - first_col);
        let block = b.part(self.first_k, self.kc, first_col, n_cols);
        // SAFETY: `gemm` made sure of AVX-512.
        unsafe { pack::<NR>(block, sliver) };
    }

    /// Computes the i-th MR rows of the block from the packed columns.
    ///
    /// # Safety
    ///
    /// Nobody else may use these rows of the output; they must be there for all of the task's columns.
    unsafe fn rows(&self, i: usize, packed: &[f32]) {
        let first_row = i * MR;
        let n_rows = MR.min(self.out.rows - first_row);
        A_SLIVER.with_borrow_mut(|sliver| {
            // A whole register is stored for each term: the last one reaches past the sliver.
            sliver.resize(MR * MAX_KC + LANES, 0.0);
            let block = self.a.part(first_row, n_rows, self.first_k, self.kc).t();
            // SAFETY: `gemm` made sure of AVX-512.
            unsafe { pack::<MR>(block, &mut sliver[..MR * self.kc + LANES]) };
            for (j, columns) in packed.chunks_exact(NR * self.kc).enumerate() {
                let n_cols = NR.min(self.n_cols - j * NR);
                // SAFETY: the slivers have kc terms, and the caller answers for the rows of the output.
                unsafe {
                    let start = first_row * self.out.row_stride + self.first_col + j * NR;
                    let tile = Tile { data: self.out.data.add(start), stride: self.out.row_stride, n_rows, n_cols };
                    multiply(self.kc, sliver.as_ptr(), columns.as_ptr(), tile, self.scale, self.keeps);
                }
            }
        });
    }
}

/// Packs a matrix [k, n], n at most W: W floats for each of its rows, zeros past the last column. W that is no multiple of
/// a register's floats needs room for one register more.
#[target_feature(enable = "avx512f")]
fn pack<const W: usize>(block: Mat<'_>, to: &mut [f32]) {
    let Mat { data, rows: kc, cols: n, row_stride, col_stride } = block;
    assert!(to.len() >= kc * W + if W.is_multiple_of(LANES) { 0 } else { LANES }, "the sliver has room");
    let (from, to) = (data.as_ptr(), to.as_mut_ptr());
    for first in (0..W).step_by(LANES) {
        let lanes = n.saturating_sub(first).min(LANES);
        // SAFETY: element (k, j) of the block lies at k row_stride + j col_stride, as `Mat` has checked for all of them;
        // masks leave the others out. Stores stay in `to` by the assertion: those past a row of W are of the next row,
        // which is written later, or of the register more.
        unsafe {
            if col_stride == 1 {
                for k in 0..kc {
                    let row = _mm512_maskz_loadu_ps(mask(lanes), from.wrapping_add(k * row_stride + first));
                    _mm512_storeu_ps(to.add(k * W + first), row);
                }
            } else {
                for k in (0..kc).step_by(LANES) {
                    let terms = LANES.min(kc - k);
                    let mut tile = [_mm512_setzero_ps(); LANES];
                    for (j, column) in tile.iter_mut().enumerate().take(lanes) {
                        let at = from.wrapping_add((first + j) * col_stride + k * row_stride);
                        *column = load_strided(at, row_stride, terms);
                    }
                    for (row, values) in transpose(tile).into_iter().enumerate().take(terms) {
                        _mm512_storeu_ps(to.add((k + row) * W + first), values);
                    }
                }
            }
        }
    }
}

/// # Safety
///
/// `n` floats, at most a register, must lie at `from`, `stride` apart.
#[target_feature(enable = "avx512f")]
unsafe fn load_strided(from: *const f32, stride: usize, n: usize) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe {
        if stride == 1 {
            return _mm512_maskz_loadu_ps(mask(n), from);
        }
        let mut values = [0.0; LANES];
        for (i, value) in values.iter_mut().enumerate().take(n) {
            *value = *from.add(i * stride);
        }
        _mm512_loadu_ps(values.as_ptr())
    }
}

/// The first `n` lanes.
fn mask(n: usize) -> u16 {
    (((1u32 << n.min(LANES)) - 1) & 0xffff) as u16
}

/// Where a tile lies in the output, and how much of it is there.
#[derive(Clone, Copy)]
struct Tile {
    data: *mut f32,
    stride: usize,
    n_rows: usize,
    n_cols: usize,
}

/// tile = [tile +] scale a b for slivers a [kc, MR] and b [kc, NR].
///
/// # Safety
///
/// The slivers must have that many floats, and the tile's rows and columns must be there for this thread alone.
#[target_feature(enable = "avx512f")]
unsafe fn multiply(kc: usize, a: *const f32, b: *const f32, tile: Tile, scale: f32, keeps: bool) {
    let mut sums = [[_mm512_setzero_ps(); 2]; MR];
    // SAFETY: the caller's promise; prefetching touches nothing.
    unsafe {
        for row in 0..tile.n_rows {
            let row = tile.data.add(row * tile.stride).cast_const().cast();
            _mm_prefetch::<_MM_HINT_T0>(row);
            _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(64));
        }
        let (mut a, mut b) = (a, b);
        for _ in 0..kc {
            let (left, right) = (_mm512_loadu_ps(b), _mm512_loadu_ps(b.add(LANES)));
            for (i, [low, high]) in sums.iter_mut().enumerate() {
                let factor = _mm512_set1_ps(*a.add(i));
                *low = _mm512_fmadd_ps(factor, left, *low);
                *high = _mm512_fmadd_ps(factor, right, *high);
            }
            a = a.add(MR);
            b = b.add(NR);
        }
        let scale = _mm512_set1_ps(scale);
        for (i, halves) in sums.into_iter().enumerate().take(tile.n_rows) {
            for (half, sum) in halves.into_iter().enumerate() {
                let lanes = mask(tile.n_cols.saturating_sub(half * LANES));
                let to = tile.data.wrapping_add(i * tile.stride + half * LANES);
                let value = match keeps {
                    true => _mm512_fmadd_ps(sum, scale, _mm512_maskz_loadu_ps(lanes, to)),
                    false => _mm512_mul_ps(sum, scale),
                };
                _mm512_mask_storeu_ps(to, lanes, value);
            }
        }
    }
}
