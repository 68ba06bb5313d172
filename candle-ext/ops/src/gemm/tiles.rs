//! Matmuls of packed slivers, tile by tile.

use std::ops::Range;

use half::bf16;

use super::accumulate::Accumulate;
use super::kernel::{CacheLine, Kernel, Tile};
use super::matrix::Side;
use super::matrix::{Mat, MatMut, Output, Store};
use super::packed::CACHE_LINE_BYTES;
use crate::floats::write_bf16;
use crate::simd::vectorised;

/// Returns the terms of each partial sum but the last, of `k` terms in all.
pub(super) fn terms_per_part<K: Kernel>(k: usize) -> usize {
    even_parts(k, K::KC).next_multiple_of(K::DEPTH)
}

/// Splits `whole` into ranges of at most `size`.
pub(super) fn parts(whole: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    let end = whole.end;
    whole.step_by(size).map(move |start| start..(start + size).min(end))
}

/// Returns the size of nearly equal parts, the fewest of at most `max` that cover `n`.
pub(super) fn even_parts(n: usize, max: usize) -> usize {
    n.div_ceil(n.div_ceil(max))
}

/// Output, shared by tasks that write disjoint parts.
#[derive(Clone, Copy)]
pub(super) struct TileOutput {
    data: OutData,
    row_stride: usize,
    store: Store,
}

#[derive(Clone, Copy)]
pub(super) enum OutData {
    F32(*mut f32),
    Bf16(*mut bf16),
}

impl From<Output<'_>> for TileOutput {
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
unsafe impl Send for TileOutput {}
// SAFETY: as above.
unsafe impl Sync for TileOutput {}

/// Packed slivers of one operand, and the place of some terms in them.
pub(super) struct Slivers<'a> {
    /// Rows of a, or columns of b.
    pub(super) range: Range<usize>,
    pub(super) lines: &'a [CacheLine],
    /// Cache lines of a sliver.
    pub(super) n_lines: usize,
    /// Cache lines of a sliver before the terms.
    pub(super) n_lines_before: usize,
}

impl Slivers<'_> {
    /// Lists the slivers from these terms on, with their first row or column. Each has `width` rows or columns.
    fn each(&self, width: usize) -> impl Iterator<Item = (usize, &[CacheLine])> {
        let firsts = self.range.clone().step_by(width);
        firsts.zip(self.lines.chunks_exact(self.n_lines)).map(|(first, sliver)| (first, &sliver[self.n_lines_before..]))
    }
}

/// Output of a matmul, and how slivers are multiplied into it.
pub(super) struct TileProducts<K: Kernel> {
    pub(super) kernel: K,
    pub(super) out: TileOutput,
    /// Terms of a sum.
    pub(super) k: usize,
    /// Terms of each partial sum but the last.
    pub(super) kc: usize,
    pub(super) scale: f32,
    pub(super) accumulate: Accumulate,
}

impl<K: Kernel> TileProducts<K> {
    /// Returns true if sums are rounded to the output's dtype.
    pub(super) fn is_rounded(&self) -> bool {
        matches!(self.out.data, OutData::Bf16(_))
    }

    /// Returns the cache lines of a sliver with these terms.
    pub(super) fn lines(&self, side: Side, terms: &Range<usize>) -> usize {
        lines_of_parts::<K>(side, terms, self.kc)
    }

    /// Multiplies each sliver of the operand `side` with each of the other.
    ///
    /// # Safety
    ///
    /// This kernel must have packed the slivers with this `kc`: those of the whole ranges, and these terms, one partial sum. This
    /// part of the output must be valid and owned by the caller.
    pub(super) unsafe fn multiply(
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
pub(super) fn pack_sliver<K: Kernel>(
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
/// The bits are those of [`gemm`](super::blocks::gemm).
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
pub(super) fn width<K: Kernel>(side: Side) -> usize {
    if side == Side::A { K::MR } else { K::NR }
}

/// Returns the number of cache lines of a sliver with these terms, of which `kc` are added up at a time.
fn lines_of_parts<K: Kernel>(side: Side, terms: &Range<usize>, kc: usize) -> usize {
    parts(terms.clone(), kc).map(|terms| lines::<K>(side, terms.len())).sum()
}

/// Returns the cache lines of a sliver of `kc` terms.
pub(super) fn lines<K: Kernel>(side: Side, kc: usize) -> usize {
    if side == Side::A { K::lines_a(kc) } else { K::lines_b(kc) }
}
