//! Pairs of bf16 terms, as the instructions that multiply bf16 read them.

use std::arch::x86_64::{
    __m512, _mm256_maskz_loadu_epi16, _mm512_castsi512_ps, _mm512_cvtepu16_epi32, _mm512_maskz_loadu_epi16,
    _mm512_or_si512, _mm512_setzero_ps, _mm512_slli_epi32,
};

use half::bf16;

use super::avx512::LANES;
use super::matrix::Mat;
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
