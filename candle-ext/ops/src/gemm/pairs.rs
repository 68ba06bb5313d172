//! Pairs of bf16 terms, as the instructions that multiply bf16 read them.

use std::arch::x86_64::{
    __m512, _mm256_maskz_loadu_epi16, _mm512_castsi512_ps, _mm512_cvtepu16_epi32, _mm512_maskz_loadu_epi16,
    _mm512_or_si512, _mm512_setzero_ps, _mm512_slli_epi32, _mm512_storeu_ps,
};

use half::bf16;

use super::avx512::LANES;
use super::matrix::Mat;
use super::row_bf16::COLUMNS;
use super::transpose::transpose;
use crate::simd::prefetch;

/// Terms of 16 pairs.
pub(super) const DEPTH: usize = 2 * LANES;
/// Prefetch distance in elements along a column. Packing reads columns side by side, which hardware prefetchers miss.
const AHEAD: usize = 8 * DEPTH;

/// Loads 32 terms of 16 columns of a matrix [k, n], with zeros past its end.
///
/// Register p has terms 2p (low halves) and 2p + 1 (high halves) of all columns; the lanes are not floats.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
pub(super) fn pairs(block: Mat<'_, bf16>, first_k: usize, first_col: usize) -> [__m512; LANES] {
    let Mat { data, rows, cols, row_stride, col_stride } = block;
    let n_terms = rows.saturating_sub(first_k).min(DEPTH);
    let n_cols = cols.saturating_sub(first_col).min(LANES);
    let mut registers = [_mm512_setzero_ps(); LANES];
    if n_terms == 0 || n_cols == 0 {
        return registers;
    }
    let from = data.as_ptr().wrapping_add(first_k * row_stride + first_col * col_stride);
    // SAFETY: element (k, j) of the block is at k row_stride + j col_stride; `Mat` has checked the bounds. Masks and
    // counts exclude the others.
    unsafe {
        if col_stride == 1 {
            let lanes = ((1u32 << n_cols) - 1) as u16;
            for (p, register) in registers.iter_mut().enumerate().take(n_terms.div_ceil(2)) {
                let from = from.wrapping_add(2 * p * row_stride);
                prefetch(from.wrapping_add(DEPTH * row_stride), 1);
                prefetch(from.wrapping_add((DEPTH + 1) * row_stride), 1);
                let odd_lanes = if 2 * p + 1 < n_terms { lanes } else { 0 };
                let even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from.cast()));
                let odd = _mm256_maskz_loadu_epi16(odd_lanes, from.wrapping_add(row_stride).cast());
                let odd = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(odd));
                *register = _mm512_castsi512_ps(_mm512_or_si512(even, odd));
            }
            return registers;
        }
        for (j, column) in registers.iter_mut().enumerate().take(n_cols) {
            let from = from.add(j * col_stride);
            *column = if row_stride == 1 {
                prefetch(from.wrapping_add(AHEAD), 1);
                load_terms(from, n_terms)
            } else {
                let mut terms = [bf16::ZERO; DEPTH];
                for (k, term) in terms.iter_mut().enumerate().take(n_terms) {
                    *term = *from.add(k * row_stride);
                }
                load_terms(terms.as_ptr(), DEPTH)
            };
        }
        transpose(registers)
    }
}

/// Loads up to 32 contiguous elements, with zeros after `n`.
///
/// # Safety
///
/// The first `n` must be readable.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
pub(super) unsafe fn load_terms(from: *const bf16, n: usize) -> __m512 {
    let lanes = ((1u64 << n.min(DEPTH)) - 1) as u32;
    // SAFETY: the mask excludes elements from `n` on.
    unsafe { _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(lanes, from.cast())) }
}

/// Returns the sums of a row with up to [`COLUMNS`] columns of b, in the order of their terms.
///
/// `add` multiplies two terms of the row, the halves of a number, with those of 16 columns, and adds to 16 sums. Its last argument
/// is the number of terms.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
pub(super) fn row_sums(
    a: &[bf16],
    b: Mat<'_, bf16>,
    add: impl Fn(__m512, u32, __m512, usize) -> __m512,
) -> [f32; COLUMNS] {
    const GROUPS: usize = COLUMNS / LANES;
    let mut sums = [_mm512_setzero_ps(); GROUPS];
    for first in (0..a.len()).step_by(DEPTH) {
        let terms = &a[first..(first + DEPTH).min(a.len())];
        // The next columns: those of a step are as many rows in memory, which hardware prefetchers miss.
        for j in COLUMNS..2 * COLUMNS {
            prefetch(b.data.as_ptr().wrapping_add(j * b.col_stride + first), 1);
        }
        for (group, sum) in sums.iter_mut().enumerate() {
            let columns = pairs(b, first, group * LANES);
            let (whole, last) = terms.as_chunks::<2>();
            for ([even, odd], columns) in whole.iter().zip(&columns) {
                let factor = u32::from(even.to_bits()) | u32::from(odd.to_bits()) << 16;
                *sum = add(*sum, factor, *columns, 2);
            }
            if let [last] = last {
                *sum = add(*sum, u32::from(last.to_bits()), columns[whole.len()], 1);
            }
        }
    }
    let mut out = [0.0; COLUMNS];
    for (out, sum) in out.chunks_exact_mut(LANES).zip(sums) {
        // SAFETY: the chunk is as long as a register.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), sum) };
    }
    out
}
