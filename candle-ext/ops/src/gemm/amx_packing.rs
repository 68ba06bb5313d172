//! Packing of f32 as three bf16, in AMX's layouts.

use std::arch::x86_64::{
    __m512, __m512i, _mm512_add_epi32, _mm512_and_si512, _mm512_castps_si512, _mm512_castsi512_ps, _mm512_loadu_ps,
    _mm512_maskz_loadu_ps, _mm512_or_si512, _mm512_permutex2var_epi16, _mm512_set_epi16, _mm512_set1_epi32,
    _mm512_setzero_ps, _mm512_srli_epi32, _mm512_store_si512, _mm512_sub_ps,
};

use super::avx512::{LANES, load_strided, mask};
use super::kernel::CacheLine;
use super::matrix::Mat;
use super::packed;
use super::transpose::transpose;
use crate::simd::prefetch;

/// Rows and columns of a tile: two by two AMX tiles.
pub(super) const SIDE: usize = 32;
/// Terms of one AMX multiplication.
pub(super) const DEPTH: usize = 32;
/// bf16 summands of an f32.
pub(super) const PARTS: usize = packed::AMX_PARTS;
/// Prefetch distance in elements along a row.
const AHEAD: usize = 2 * DEPTH;
/// Cache lines of a sliver for DEPTH terms: PARTS times two AMX tiles of 16 lines.
pub(super) const STEP: usize = PARTS * 2 * 16;

/// Splits each number into three bf16 that add up to it, largest first, in the high halves of the lanes.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn split(x: __m512) -> [__m512i; PARTS] {
    let high = nearest(x);
    let rest = _mm512_sub_ps(x, _mm512_castsi512_ps(high));
    let middle = nearest(rest);
    let rest = _mm512_sub_ps(rest, _mm512_castsi512_ps(middle));
    // The remainder fits into bf16. Truncation keeps a NaN a NaN; rounding by addition might not.
    [high, middle, high_half(_mm512_castps_si512(rest))]
}

/// Rounds to the nearest bf16, in the high half of each lane.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn nearest(x: __m512) -> __m512i {
    high_half(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000)))
}

#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn high_half(bits: __m512i) -> __m512i {
    _mm512_and_si512(bits, _mm512_set1_epi32(0xffff_0000_u32 as i32))
}

/// Packs pairs of bf16: `first` in the low half of each lane, `second` in the high half.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn pair(first: __m512i, second: __m512i) -> __m512i {
    _mm512_or_si512(_mm512_srli_epi32::<16>(first), second)
}

/// Loads 16 columns and 16 terms of a matrix, one register per term, with zeros past its end.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn terms(block: Mat<'_>, first_k: usize, first_col: usize) -> [__m512; LANES] {
    let Mat { data, rows: kc, cols: n, row_stride, col_stride } = block;
    let (n_terms, n_cols) = (kc.saturating_sub(first_k).min(LANES), n.saturating_sub(first_col).min(LANES));
    if n_terms == 0 || n_cols == 0 {
        return [_mm512_setzero_ps(); LANES];
    }
    let from = data.as_ptr().wrapping_add(first_k * row_stride + first_col * col_stride);
    // SAFETY: element (k, j) of the block is at k row_stride + j col_stride; `Mat` has checked the bounds. Masks and
    // counts exclude the others.
    unsafe {
        match (n_terms == LANES && n_cols == LANES, col_stride == 1) {
            (true, true) => load_lines(from, row_stride, SIDE),
            (true, false) if row_stride == 1 => transpose(load_lines(from, col_stride, SIDE * col_stride)),
            (_, true) => {
                let mut rows = [_mm512_setzero_ps(); LANES];
                for (k, row) in rows.iter_mut().enumerate().take(n_terms) {
                    *row = _mm512_maskz_loadu_ps(mask(n_cols), from.wrapping_add(k * row_stride));
                }
                rows
            }
            (_, false) => {
                let mut columns = [_mm512_setzero_ps(); LANES];
                for (j, column) in columns.iter_mut().enumerate().take(n_cols) {
                    *column = load_strided(from.wrapping_add(j * col_stride), row_stride, n_terms);
                }
                transpose(columns)
            }
        }
    }
}

/// Loads 16 lines of 16 floats, and prefetches the lines `ahead` elements further on.
///
/// # Safety
///
/// The lines must be readable.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn load_lines(from: *const f32, stride: usize, ahead: usize) -> [__m512; LANES] {
    let mut lines = [_mm512_setzero_ps(); LANES];
    for (i, line) in lines.iter_mut().enumerate() {
        prefetch(from.wrapping_add(i * stride + ahead), LANES);
        // SAFETY: the caller's contract.
        *line = unsafe { _mm512_loadu_ps(from.add(i * stride)) };
    }
    lines
}

/// Packs a matrix [k, n] in AMX's layout of a right operand. For each 32 terms: PARTS times two tiles of 16 columns,
/// each 16 lines of pairs of terms.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn pack_b(block: Mat<'_>, to: &mut [CacheLine]) {
    assert!(to.len() >= block.rows.div_ceil(DEPTH) * STEP && block.cols <= SIDE, "the sliver is long enough");
    for (step, to) in to.chunks_exact_mut(STEP).enumerate().take(block.rows.div_ceil(DEPTH)) {
        for side in 0..2 {
            for half in 0..2 {
                let rows = terms(block, step * DEPTH + half * LANES, side * LANES);
                for (p, pair_of_terms) in rows.chunks_exact(2).enumerate() {
                    let (first, second) = (split(pair_of_terms[0]), split(pair_of_terms[1]));
                    for part in 0..PARTS {
                        let line = &mut to[(part * 2 + side) * LANES + half * LANES / 2 + p];
                        // SAFETY: a cache line is as wide as a register, and aligned.
                        unsafe { _mm512_store_si512((&raw mut *line).cast(), pair(first[part], second[part])) };
                    }
                }
            }
        }
    }
}

/// Packs rows, given as their transpose [k, n], in AMX's layout of a left operand. For each 32 terms: PARTS times two
/// tiles of 16 rows, each 16 lines of 32 terms.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn pack_a(block: Mat<'_>, to: &mut [CacheLine]) {
    assert!(to.len() >= block.rows.div_ceil(DEPTH) * STEP && block.cols <= SIDE, "the sliver is long enough");
    for (step, to) in to.chunks_exact_mut(STEP).enumerate().take(block.rows.div_ceil(DEPTH)) {
        for side in 0..2 {
            if block.row_stride == 1 {
                pack_rows(block, step * DEPTH, side, to);
            } else {
                pack_columns(block, step * DEPTH, side, to);
            }
        }
    }
}

/// Packs 32 terms of 16 rows of a row-major matrix.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn pack_rows(block: Mat<'_>, first_k: usize, side: usize, to: &mut [CacheLine]) {
    // The high 16 bits of each lane of one register, then of the other.
    let high_halves = _mm512_set_epi16(
        63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9,
        7, 5, 3, 1,
    );
    let n_terms = block.rows - first_k;
    for line in 0..LANES {
        let row = side * LANES + line;
        let mut halves = [_mm512_setzero_ps(); 2];
        if row < block.cols {
            // SAFETY: row `row` begins at row col_stride. Masks exclude elements past its end; `Mat` has checked the
            // bounds.
            unsafe {
                let from = block.data.as_ptr().add(row * block.col_stride + first_k);
                prefetch(from.wrapping_add(AHEAD), DEPTH);
                halves[0] = _mm512_maskz_loadu_ps(mask(n_terms), from);
                halves[1] = _mm512_maskz_loadu_ps(mask(n_terms.saturating_sub(LANES)), from.wrapping_add(LANES));
            }
        }
        let (first, second) = (split(halves[0]), split(halves[1]));
        for part in 0..PARTS {
            let terms = _mm512_permutex2var_epi16(first[part], high_halves, second[part]);
            let line = &mut to[(part * 2 + side) * LANES + line];
            // SAFETY: a cache line is as wide as a register, and aligned.
            unsafe { _mm512_store_si512((&raw mut *line).cast(), terms) };
        }
    }
}

/// Packs 32 terms of 16 rows of a column-major matrix.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn pack_columns(block: Mat<'_>, first_k: usize, side: usize, to: &mut [CacheLine]) {
    // Pairs of terms, one lane per row; the transpose puts a row's pairs next to each other.
    let mut pairs = [[_mm512_setzero_ps(); LANES]; PARTS];
    for half in 0..2 {
        let rows = terms(block, first_k + half * LANES, side * LANES);
        for (p, pair_of_terms) in rows.chunks_exact(2).enumerate() {
            let (first, second) = (split(pair_of_terms[0]), split(pair_of_terms[1]));
            for part in 0..PARTS {
                pairs[part][half * LANES / 2 + p] = _mm512_castsi512_ps(pair(first[part], second[part]));
            }
        }
    }
    for (part, pairs) in pairs.into_iter().enumerate() {
        let lines = &mut to[(part * 2 + side) * LANES..][..LANES];
        for (line, row) in lines.iter_mut().zip(transpose(pairs)) {
            // SAFETY: a cache line is as wide as a register, and aligned.
            unsafe { _mm512_store_si512((&raw mut *line).cast(), _mm512_castps_si512(row)) };
        }
    }
}
