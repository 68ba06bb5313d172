//! Kernel for processors with AVX512_BF16: bf16 with f32 sums, two terms per instruction and lane.
//!
//! Subnormal numbers count as zero.

use std::arch::x86_64::{
    __cpuid, __m512, __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_loadu_si512, _mm512_mask_storeu_ps, _mm512_set1_epi32,
    _mm512_setzero_ps,
};

use half::bf16;

use super::accumulate::Accumulate;
use super::avx512::{Avx512, LANES, MR, NR, mask, write_lanes};
use super::kernel::{CacheLine, Kernel, Tile};
use super::matrix::Mat;
use super::packed;
use super::pairs::{pairs, row_sums};
use super::row_bf16::{COLUMNS, RowKernel};

/// Proof that the processor has AVX512_BF16.
#[derive(Clone, Copy)]
pub(super) struct Avx512Bf16(Avx512);

impl Avx512Bf16 {
    pub(super) fn detect() -> Option<Self> {
        let has_all = is_x86_feature_detected!("avx512bf16")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl");
        Avx512::detect().filter(|_| has_all).map(Self)
    }

    /// Returns true if the instructions multiply bf16 faster than FMA multiplies f32.
    ///
    /// On Intel's Sapphire Rapids they start every second cycle and FMA twice a cycle: half the FLOPs of f32. AMD's
    /// processors start as many of them as of FMA.
    pub(super) fn is_faster_than_f32(self) -> bool {
        const INTEL: [&[u8; 4]; 3] = [b"Genu", b"ineI", b"ntel"];
        let leaf = __cpuid(0);
        [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes) != INTEL.map(|part| *part)
    }

    /// Returns the kernel of f32.
    pub(super) fn f32(self) -> Avx512 {
        self.0
    }
}

impl Kernel for Avx512Bf16 {
    type Operand = bf16;
    const MR: usize = MR;
    const NR: usize = NR;
    const KC: usize = 768;
    const DEPTH: usize = 2;
    const BLOCK_LINES: usize = packed::BLOCK_LINES;
    const MAX_PACKED: usize = 2 * packed::MAX_PACKED;

    fn lines_a(kc: usize) -> usize {
        (kc.div_ceil(2) * MR).div_ceil(LANES)
    }

    fn lines_b(kc: usize) -> usize {
        (kc.div_ceil(2) * NR).div_ceil(LANES)
    }

    fn pack_a(self, block: Mat<'_, bf16>, to: &mut [CacheLine]) {
        // SAFETY: the processor has AVX-512.
        unsafe { pack::<MR>(block, to) };
    }

    fn pack_b(self, block: Mat<'_, bf16>, to: &mut [CacheLine]) {
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
        // SAFETY: the processor has AVX512_BF16; the rest is the caller's contract.
        unsafe {
            match tile.n_rows {
                1 => multiply::<1>(kc.div_ceil(2), a.as_ptr().cast(), b.as_ptr().cast(), tile, scale, accumulate),
                _ => multiply::<MR>(kc.div_ceil(2), a.as_ptr().cast(), b.as_ptr().cast(), tile, scale, accumulate),
            }
        }
    }
}

/// Packs a matrix [k, n] with n <= W: W pairs of terms per two rows, zeros past the last row and column.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn pack<const W: usize>(block: Mat<'_, bf16>, to: &mut [CacheLine]) {
    let n_pairs = block.rows.div_ceil(2);
    assert!(to.len() * LANES >= n_pairs * W && block.cols <= W, "the sliver is long enough");
    let to = to.as_mut_ptr().cast::<f32>();
    for first_pair in (0..n_pairs).step_by(LANES) {
        for first_col in (0..W).step_by(LANES) {
            let room = mask((W - first_col).min(LANES));
            let registers = pairs(block, first_pair * 2, first_col);
            for (p, pairs) in registers.into_iter().enumerate().take(n_pairs - first_pair) {
                // SAFETY: the row of pairs is within the sliver (asserted above).
                unsafe { _mm512_mask_storeu_ps(to.add((first_pair + p) * W + first_col), room, pairs) };
            }
        }
    }
}

/// Multiplies two packed slivers into a tile.
///
/// # Safety
///
/// As for [`Kernel::multiply`].
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn multiply<const ROWS: usize>(
    n_pairs: usize,
    a: *const i32,
    b: *const i32,
    tile: Tile,
    scale: f32,
    accumulate: Accumulate,
) {
    let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
    tile.prefetch();
    // SAFETY: the caller's contract. Any bits are bf16.
    unsafe {
        let as_bf16 = |pairs: __m512i| std::mem::transmute::<__m512i, __m512bh>(pairs);
        let (mut a, mut b) = (a, b);
        for _ in 0..n_pairs {
            let left = as_bf16(_mm512_loadu_si512(b.cast()));
            let right = as_bf16(_mm512_loadu_si512(b.add(LANES).cast()));
            for (i, [low, high]) in sums.iter_mut().enumerate() {
                let factor = as_bf16(_mm512_set1_epi32(*a.add(i)));
                *low = _mm512_dpbf16_ps(*low, factor, left);
                *high = _mm512_dpbf16_ps(*high, factor, right);
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

impl RowKernel for Avx512Bf16 {
    fn row_sums(self, a: &[bf16], b: Mat<'_, bf16>) -> [f32; COLUMNS] {
        // SAFETY: the processor has AVX512_BF16.
        unsafe { sums(a, b) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn sums(a: &[bf16], b: Mat<'_, bf16>) -> [f32; COLUMNS] {
    row_sums(
        a,
        b,
        #[inline(always)]
        |sum, factor, columns, _| {
            // SAFETY: the processor has AVX512_BF16. Any bits are bf16.
            unsafe {
                let factor = std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(factor as i32));
                _mm512_dpbf16_ps(sum, factor, std::mem::transmute::<__m512, __m512bh>(columns))
            }
        },
    )
}
