//! Kernel for processors with AVX-512: f32 by FMA.

use std::arch::x86_64::{
    __m512, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps, _mm512_mul_ps,
    _mm512_set1_ps, _mm512_setzero_ps, _mm512_stream_ps,
};

use super::accumulate::Accumulate;
use super::kernel::{CacheLine, Kernel, Tile};
use super::matrix::{Mat, Store};
use super::packed;
use super::transpose::transpose;

/// Rows of a tile. Its sums fill 28 of the 32 registers, two per row.
pub(super) const MR: usize = 14;
/// Columns of a tile.
pub(super) const NR: usize = 32;
/// Floats per register.
pub(super) const LANES: usize = 16;

/// Proof that the processor has AVX-512: its foundation, and the instructions for 16-bit elements, which only Xeon Phi lacks.
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

impl Avx512 {
    pub(super) fn detect() -> Option<Self> {
        let has_all = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl");
        has_all.then_some(Self(()))
    }
}

impl Kernel for Avx512 {
    type Operand = f32;
    const MR: usize = MR;
    const NR: usize = NR;
    const KC: usize = 384;
    const BLOCK_LINES: usize = packed::BLOCK_LINES;
    const MAX_PACKED: usize = packed::MAX_PACKED;

    fn lines_a(kc: usize) -> usize {
        (kc * MR).div_ceil(LANES)
    }

    fn lines_b(kc: usize) -> usize {
        (kc * NR).div_ceil(LANES)
    }

    fn pack_a(self, block: Mat<'_>, to: &mut [CacheLine]) {
        // SAFETY: the processor has AVX-512.
        unsafe { pack::<MR>(block, to) };
    }

    fn pack_b(self, block: Mat<'_>, to: &mut [CacheLine]) {
        // SAFETY: the processor has AVX-512.
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
        // SAFETY: the processor has AVX-512; the rest is the caller's contract.
        unsafe {
            match tile.n_rows {
                1 => multiply::<1>(kc, a.as_ptr().cast(), b.as_ptr().cast(), tile, scale, accumulate),
                _ => multiply::<MR>(kc, a.as_ptr().cast(), b.as_ptr().cast(), tile, scale, accumulate),
            }
        }
    }
}

/// Packs a matrix [k, n] with n <= W: W floats per row, zeros past the last column.
#[target_feature(enable = "avx512f")]
fn pack<const W: usize>(block: Mat<'_>, to: &mut [CacheLine]) {
    let Mat { data, rows: kc, cols: n, row_stride, col_stride } = block;
    assert!(to.len() * LANES >= kc * W && n <= W, "the sliver is long enough");
    let (from, to) = (data.as_ptr(), to.as_mut_ptr().cast::<f32>());
    for first in (0..W).step_by(LANES) {
        let (lanes, room) = (n.saturating_sub(first).min(LANES), mask((W - first).min(LANES)));
        let to = to.wrapping_add(first);
        // SAFETY: element (k, j) of the block is at k row_stride + j col_stride; `Mat` has checked the bounds. Masks
        // exclude the others. Stores stay in the row of `to`.
        unsafe {
            if col_stride == 1 {
                for k in 0..kc {
                    let row = _mm512_maskz_loadu_ps(mask(lanes), from.wrapping_add(k * row_stride + first));
                    _mm512_mask_storeu_ps(to.add(k * W), room, row);
                }
            } else {
                for k in (0..kc).step_by(LANES) {
                    let terms = LANES.min(kc - k);
                    let mut tile = [_mm512_setzero_ps(); LANES];
                    let from = from.wrapping_add(first * col_stride + k * row_stride);
                    if row_stride == 1 && lanes == LANES && terms == LANES {
                        for (j, column) in tile.iter_mut().enumerate() {
                            *column = _mm512_loadu_ps(from.add(j * col_stride));
                        }
                    } else {
                        for (j, column) in tile.iter_mut().enumerate().take(lanes) {
                            *column = load_strided(from.wrapping_add(j * col_stride), row_stride, terms);
                        }
                    }
                    let tile = transpose(tile);
                    if terms == LANES {
                        for (row, values) in tile.into_iter().enumerate() {
                            _mm512_mask_storeu_ps(to.add((k + row) * W), room, values);
                        }
                    } else {
                        for (row, values) in tile.into_iter().enumerate().take(terms) {
                            _mm512_mask_storeu_ps(to.add((k + row) * W), room, values);
                        }
                    }
                }
            }
        }
    }
}

/// Loads `n` floats at distance `stride`, at most a register.
///
/// # Safety
///
/// These floats must be readable.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn load_strided(from: *const f32, stride: usize, n: usize) -> __m512 {
    // SAFETY: the caller's contract.
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

/// Returns the mask of the first `n` lanes.
pub(super) fn mask(n: usize) -> u16 {
    (((1u32 << n.min(LANES)) - 1) & 0xffff) as u16
}

/// Multiplies two packed slivers into a tile.
///
/// # Safety
///
/// As for [`Kernel::multiply`].
#[target_feature(enable = "avx512f")]
unsafe fn multiply<const ROWS: usize>(
    kc: usize,
    a: *const f32,
    b: *const f32,
    tile: Tile,
    scale: f32,
    accumulate: Accumulate,
) {
    let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
    tile.prefetch();
    // SAFETY: the caller's contract.
    unsafe {
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
        for (i, halves) in sums.into_iter().enumerate().take(tile.n_rows) {
            for (half, sum) in halves.into_iter().enumerate() {
                write_lanes(tile, i, half, sum, scale, accumulate);
            }
        }
    }
}

/// Computes tile = [tile +] scale sum for register `half` of row `i`.
///
/// # Safety
///
/// The tile must be valid and owned by this thread, and have the row.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) unsafe fn write_lanes(tile: Tile, i: usize, half: usize, sum: __m512, scale: f32, accumulate: Accumulate) {
    let lanes = mask(tile.n_cols.saturating_sub(half * LANES));
    let to = tile.data.wrapping_add(i * tile.stride + half * LANES);
    let scale = _mm512_set1_ps(scale);
    // SAFETY: the caller's contract, within the lanes.
    unsafe {
        let value = match accumulate {
            Accumulate::Add => _mm512_fmadd_ps(sum, scale, _mm512_maskz_loadu_ps(lanes, to)),
            Accumulate::Overwrite => _mm512_mul_ps(sum, scale),
        };
        if tile.store == Store::Streamed && lanes == mask(LANES) && to.addr().is_multiple_of(64) {
            _mm512_stream_ps(to, value);
        } else {
            _mm512_mask_storeu_ps(to, lanes, value);
        }
    }
}
