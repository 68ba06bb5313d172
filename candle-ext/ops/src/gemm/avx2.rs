//! Kernel for processors with AVX2 and FMA but without AVX-512.
//!
//! It sums terms in the order of the AVX-512 kernel, so that both give the same bits.

use std::arch::x86_64::{
    __m256, _mm_castps_si128, _mm_castsi128_ps, _mm_loadl_epi64, _mm_loadu_ps, _mm_storel_epi64, _mm_storeu_ps,
    _mm256_castps256_ps128, _mm256_extractf128_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_mul_ps,
    _mm256_permute2f128_ps, _mm256_set_m128, _mm256_set1_ps, _mm256_setzero_ps, _mm256_shuffle_ps, _mm256_storeu_ps,
    _mm256_unpackhi_ps, _mm256_unpacklo_ps,
};

use super::accumulate::Accumulate;
use super::avx512::Avx512;
use super::kernel::{CacheLine, Kernel, Tile};
use super::matrix::Mat;

/// Rows of a tile. Its sums fill 12 of the 16 registers, two per row.
const MR: usize = 6;
/// Columns of a tile.
const NR: usize = 16;
/// Floats per register.
const LANES: usize = 8;
/// Floats per cache line.
const CACHE_LINE_FLOATS: usize = 16;

/// Proof that the processor has AVX2 and FMA.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    pub(super) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")).then_some(Self(()))
    }
}

impl Kernel for Avx2 {
    type Operand = f32;
    const MR: usize = MR;
    const NR: usize = NR;
    /// Terms per partial sum, equal to AVX-512's: otherwise the bits would differ.
    const KC: usize = Avx512::KC;
    /// Cache lines of a block: 256 KiB, half of the L2 cache of a typical processor with AVX2 only.
    const BLOCK_LINES: usize = 4 << 10;
    const MAX_PACKED: usize = 1 << 20;

    fn lines_a(kc: usize) -> usize {
        (kc * MR).div_ceil(CACHE_LINE_FLOATS)
    }

    fn lines_b(kc: usize) -> usize {
        kc
    }

    fn pack_a(self, block: Mat<'_>, to: &mut [CacheLine]) {
        // SAFETY: the processor has AVX2.
        unsafe { pack::<MR>(block, to) };
    }

    fn pack_b(self, block: Mat<'_>, to: &mut [CacheLine]) {
        // SAFETY: the processor has AVX2.
        unsafe { pack::<NR>(block, to) };
    }

    unsafe fn multiply(
        self,
        kc: usize,
        a: &[CacheLine],
        b: &[CacheLine],
        tile: Tile,
        scale: f32,
        accumulate: Accumulate,
    ) {
        // SAFETY: the processor has AVX2 and FMA; the rest is the caller's contract.
        unsafe {
            match tile.n_rows {
                1 => multiply::<1>(kc, a.as_ptr().cast(), b.as_ptr().cast(), tile, scale, accumulate),
                _ => multiply::<MR>(kc, a.as_ptr().cast(), b.as_ptr().cast(), tile, scale, accumulate),
            }
        }
    }
}

/// Packs a matrix [k, n] with n <= W: W floats per row, zeros past the last column. W is 6 or a multiple of 8.
#[target_feature(enable = "avx2")]
fn pack<const W: usize>(block: Mat<'_>, to: &mut [CacheLine]) {
    let Mat { data, rows: kc, cols: n, row_stride, col_stride } = block;
    assert!(to.len() * CACHE_LINE_FLOATS >= kc * W && n <= W, "the sliver is long enough");
    let (from, to) = (data.as_ptr(), to.as_mut_ptr().cast::<f32>());
    for first in (0..W).step_by(LANES) {
        let room = (W - first).min(LANES);
        let lanes = n.saturating_sub(first).min(room);
        let to = to.wrapping_add(first);
        // SAFETY: element (k, j) of the block is at k row_stride + j col_stride; `Mat` has checked the bounds. No
        // others are read. Stores stay in the row of `to`.
        unsafe {
            if lanes < room || (col_stride != 1 && row_stride != 1) {
                for k in 0..kc {
                    let row = std::slice::from_raw_parts_mut(to.add(k * W), room);
                    for (j, value) in row.iter_mut().enumerate() {
                        *value = if j < lanes { *from.add(k * row_stride + (first + j) * col_stride) } else { 0.0 };
                    }
                }
            } else if col_stride == 1 {
                for k in 0..kc {
                    store(to.add(k * W), room, load(from.add(k * row_stride + first), room));
                }
            } else {
                for k in (0..kc).step_by(LANES) {
                    let terms = LANES.min(kc - k);
                    let mut columns = [_mm256_setzero_ps(); LANES];
                    for (j, column) in columns.iter_mut().enumerate().take(lanes) {
                        let from = from.add((first + j) * col_stride + k);
                        *column = if terms == LANES { _mm256_loadu_ps(from) } else { load_some(from, terms) };
                    }
                    for (i, row) in transpose(columns).into_iter().enumerate().take(terms) {
                        store(to.add((k + i) * W), room, row);
                    }
                }
            }
        }
    }
}

/// Loads `n` floats, 6 or 8.
///
/// # Safety
///
/// `n` floats must be readable at `from`.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn load(from: *const f32, n: usize) -> __m256 {
    // SAFETY: the caller's contract.
    unsafe {
        if n == LANES {
            return _mm256_loadu_ps(from);
        }
        _mm256_set_m128(_mm_castsi128_ps(_mm_loadl_epi64(from.add(4).cast())), _mm_loadu_ps(from))
    }
}

/// Loads `n` floats, at most 8.
///
/// # Safety
///
/// `n` floats must be readable at `from`.
#[target_feature(enable = "avx2")]
unsafe fn load_some(from: *const f32, n: usize) -> __m256 {
    let mut values = [0.0; LANES];
    // SAFETY: the caller's contract.
    unsafe {
        for (i, value) in values.iter_mut().enumerate().take(n) {
            *value = *from.add(i);
        }
        _mm256_loadu_ps(values.as_ptr())
    }
}

/// Stores `n` floats, 6 or 8.
///
/// # Safety
///
/// `n` floats must be writable at `to`.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn store(to: *mut f32, n: usize, values: __m256) {
    // SAFETY: the caller's contract. A masked store would take many times as long.
    unsafe {
        if n == LANES {
            return _mm256_storeu_ps(to, values);
        }
        _mm_storeu_ps(to, _mm256_castps256_ps128(values));
        _mm_storel_epi64(to.add(4).cast(), _mm_castps_si128(_mm256_extractf128_ps::<1>(values)));
    }
}

/// Transposes: row i of the result holds lane i of every register.
#[target_feature(enable = "avx2")]
#[inline]
fn transpose(rows: [__m256; LANES]) -> [__m256; LANES] {
    // Each 128-bit half h of fours[4 g + c] holds column 4 h + c of rows 4 g to 4 g + 3.
    let mut fours = rows;
    for g in 0..2 {
        let [r0, r1, r2, r3] = [rows[4 * g], rows[4 * g + 1], rows[4 * g + 2], rows[4 * g + 3]];
        let (low01, high01) = (_mm256_unpacklo_ps(r0, r1), _mm256_unpackhi_ps(r0, r1));
        let (low23, high23) = (_mm256_unpacklo_ps(r2, r3), _mm256_unpackhi_ps(r2, r3));
        fours[4 * g] = _mm256_shuffle_ps::<0x44>(low01, low23);
        fours[4 * g + 1] = _mm256_shuffle_ps::<0xee>(low01, low23);
        fours[4 * g + 2] = _mm256_shuffle_ps::<0x44>(high01, high23);
        fours[4 * g + 3] = _mm256_shuffle_ps::<0xee>(high01, high23);
    }
    let mut columns = rows;
    for c in 0..4 {
        columns[c] = _mm256_permute2f128_ps::<0x20>(fours[c], fours[4 + c]);
        columns[4 + c] = _mm256_permute2f128_ps::<0x31>(fours[c], fours[4 + c]);
    }
    columns
}

/// Multiplies two packed slivers into a tile.
///
/// # Safety
///
/// As for [`Kernel::multiply`].
#[target_feature(enable = "avx2,fma")]
unsafe fn multiply<const ROWS: usize>(
    kc: usize,
    a: *const f32,
    b: *const f32,
    tile: Tile,
    scale: f32,
    accumulate: Accumulate,
) {
    let mut sums = [[_mm256_setzero_ps(); 2]; ROWS];
    tile.prefetch();
    // SAFETY: the caller's contract.
    unsafe {
        let (mut a, mut b) = (a, b);
        for _ in 0..kc {
            let (left, right) = (_mm256_loadu_ps(b), _mm256_loadu_ps(b.add(LANES)));
            for (i, [low, high]) in sums.iter_mut().enumerate() {
                let factor = _mm256_set1_ps(*a.add(i));
                *low = _mm256_fmadd_ps(factor, left, *low);
                *high = _mm256_fmadd_ps(factor, right, *high);
            }
            a = a.add(MR);
            b = b.add(NR);
        }
        if tile.n_cols < NR {
            return add_part(sums, tile, scale, accumulate);
        }
        let scale = _mm256_set1_ps(scale);
        for (i, halves) in sums.into_iter().enumerate().take(tile.n_rows) {
            for (half, sum) in halves.into_iter().enumerate() {
                let to = tile.data.add(i * tile.stride + half * LANES);
                let value = match accumulate {
                    Accumulate::Add => _mm256_fmadd_ps(sum, scale, _mm256_loadu_ps(to)),
                    Accumulate::Overwrite => _mm256_mul_ps(sum, scale),
                };
                _mm256_storeu_ps(to, value);
            }
        }
    }
}

/// Writes the sums of a tile with fewer columns, rounded as for a full one.
///
/// # Safety
///
/// The tile's rows and columns must be valid and owned by this thread.
#[target_feature(enable = "avx2,fma")]
unsafe fn add_part<const ROWS: usize>(sums: [[__m256; 2]; ROWS], tile: Tile, scale: f32, accumulate: Accumulate) {
    for (i, halves) in sums.into_iter().enumerate().take(tile.n_rows) {
        let mut values = [0.0f32; NR];
        // SAFETY: `values` holds a tile's row; the rest is the caller's contract.
        unsafe {
            _mm256_storeu_ps(values.as_mut_ptr(), halves[0]);
            _mm256_storeu_ps(values.as_mut_ptr().add(LANES), halves[1]);
            for (j, sum) in values.into_iter().enumerate().take(tile.n_cols) {
                let to = tile.data.add(i * tile.stride + j);
                *to = if accumulate == Accumulate::Add { sum.mul_add(scale, *to) } else { sum * scale };
            }
        }
    }
}
