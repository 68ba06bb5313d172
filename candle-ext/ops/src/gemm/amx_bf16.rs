//! Kernel for processors with AMX: bf16 with f32 sums.
//!
//! A tile multiplication adds 32 terms to each sum. Subnormal numbers count as zero.

use std::arch::asm;
use std::arch::x86_64::{__m512, _mm512_castps_si512, _mm512_store_si512};

use half::bf16;

use super::accumulate::Accumulate;
use super::amx::{Amx, Sums};
use super::amx_packing::SIDE;
use super::avx512::LANES;
use super::kernel::{CacheLine, Kernel, Tile};
use super::matrix::Mat;
use super::packed;
use super::pairs::{DEPTH, load_terms, pairs};
use super::transpose::transpose;
use crate::simd::prefetch;

/// Cache lines of a sliver for DEPTH terms: two AMX tiles of 16 lines.
const STEP: usize = 2 * LANES;
/// Prefetch distance in elements along a row.
const AHEAD: usize = 8 * DEPTH;

/// Proof that the processor has AMX.
#[derive(Clone, Copy)]
pub(super) struct AmxBf16(pub(super) Amx);

impl Kernel for AmxBf16 {
    type Operand = bf16;
    const MR: usize = SIDE;
    const NR: usize = SIDE;
    const KC: usize = 1024;
    const DEPTH: usize = DEPTH;
    const BLOCK_LINES: usize = packed::BLOCK_LINES;
    const MAX_PACKED: usize = packed::AMX_PARTS * packed::MAX_PACKED;

    fn lines_a(kc: usize) -> usize {
        kc.div_ceil(DEPTH) * STEP
    }

    fn lines_b(kc: usize) -> usize {
        kc.div_ceil(DEPTH) * STEP
    }

    fn pack_a(self, block: Mat<'_, bf16>, to: &mut [CacheLine]) {
        // SAFETY: the processor has AVX-512.
        unsafe { pack_a(block, to) };
    }

    fn pack_b(self, block: Mat<'_, bf16>, to: &mut [CacheLine]) {
        // SAFETY: the processor has AVX-512.
        unsafe { pack_b(block, to) };
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
        let mut sums = Sums::unwritten();
        // SAFETY: the processor has AMX; the rest is the caller's contract.
        unsafe {
            multiply(kc.div_ceil(DEPTH), a, b, &tile, &mut sums);
            sums.write(tile, scale, accumulate);
        }
    }

    fn begin(self) {
        self.0.begin();
    }

    fn end(self) {
        self.0.end();
    }
}

/// Packs rows, given as their transpose [k, n], in AMX's layout of a left operand. For each 32 terms: two tiles of 16
/// rows, each 16 lines of 32 terms.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn pack_a(block: Mat<'_, bf16>, to: &mut [CacheLine]) {
    assert!(to.len() >= block.rows.div_ceil(DEPTH) * STEP && block.cols <= SIDE, "the sliver is long enough");
    for (step, to) in to.chunks_exact_mut(STEP).enumerate().take(block.rows.div_ceil(DEPTH)) {
        for (side, to) in to.chunks_exact_mut(LANES).enumerate() {
            if block.row_stride == 1 {
                for (line, to) in to.iter_mut().enumerate() {
                    store(to, row_terms(block, step * DEPTH, side * LANES + line));
                }
            } else {
                // The transpose puts a row's pairs next to each other.
                let columns = pairs(block, step * DEPTH, side * LANES);
                for (to, row) in to.iter_mut().zip(transpose(columns)) {
                    store(to, row);
                }
            }
        }
    }
}

/// Loads 32 contiguous terms of a row, with zeros past the end of the matrix.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn row_terms(block: Mat<'_, bf16>, first_k: usize, row: usize) -> __m512 {
    let n_terms = if row < block.cols { block.rows - first_k } else { 0 };
    let from = block.data.as_ptr().wrapping_add(row * block.col_stride + first_k);
    prefetch(from.wrapping_add(AHEAD), 1);
    // SAFETY: row `row` begins at row col_stride; `Mat` has checked the bounds.
    unsafe { load_terms(from, n_terms) }
}

/// Packs a matrix [k, n] in AMX's layout of a right operand. For each 32 terms: two tiles of 16 columns, each 16 lines
/// of pairs of terms.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn pack_b(block: Mat<'_, bf16>, to: &mut [CacheLine]) {
    assert!(to.len() >= block.rows.div_ceil(DEPTH) * STEP && block.cols <= SIDE, "the sliver is long enough");
    for (step, to) in to.chunks_exact_mut(STEP).enumerate().take(block.rows.div_ceil(DEPTH)) {
        for (side, to) in to.chunks_exact_mut(LANES).enumerate() {
            let pairs = pairs(block, step * DEPTH, side * LANES);
            to.iter_mut().zip(pairs).for_each(|(to, pairs)| store(to, pairs));
        }
    }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn store(to: &mut CacheLine, register: __m512) {
    // SAFETY: a cache line is as wide as a register, and aligned.
    unsafe { _mm512_store_si512((&raw mut *to).cast(), _mm512_castps_si512(register)) };
}

/// Multiplies two packed slivers, and prefetches the tile.
///
/// # Safety
///
/// As for [`Kernel::multiply`].
#[inline]
unsafe fn multiply(n_steps: usize, a: &[CacheLine], b: &[CacheLine], tile: &Tile, sums: &mut Sums) {
    assert!(n_steps > 0 && a.len() >= n_steps * STEP && b.len() >= n_steps * STEP, "the slivers have all steps");
    tile.prefetch();
    // SAFETY: slivers and sums are as long as the tiles that are read and written.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "2:",
            "tileloadd tmm4, [{a} + {line}]",
            "tileloadd tmm6, [{b} + {line}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b} + {line} + 1024]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a} + {line} + 1024]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a}, 2048",
            "add {b}, 2048",
            "dec {n}",
            "jnz 2b",
            "tilestored [{sums} + {row}], tmm0",
            "tilestored [{sums} + {row} + 64], tmm1",
            "tilestored [{sums} + {row} + 2048], tmm2",
            "tilestored [{sums} + {row} + 2112], tmm3",
            a = inout(reg) a.as_ptr() => _,
            b = inout(reg) b.as_ptr() => _,
            n = inout(reg) n_steps => _,
            line = in(reg) 64usize,
            row = in(reg) 4 * SIDE,
            sums = in(reg) sums.as_mut_ptr(),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}
