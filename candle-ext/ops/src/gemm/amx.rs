//! Kernel for processors with AMX, which multiplies bf16 sixteen times as fast as AVX-512 multiplies f32.
//!
//! Each f32 is split into three bf16 (24 bits of mantissa are 3 times 8). Two such sums multiplied have nine terms; the
//! six largest are computed. The others are below 2^-25 of the result. Sums are f32, as in every kernel.
//!
//! Numbers below 2^-108 lose low bits. Infinities, and values above 3.39e38, which bf16 rounds to infinity, become NaN.

use std::arch::asm;
use std::arch::x86_64::{
    __cpuid_count, __m512, __m512i, _mm512_add_epi32, _mm512_and_si512, _mm512_castps_si512, _mm512_castsi512_ps,
    _mm512_loadu_ps, _mm512_maskz_loadu_ps, _mm512_or_si512, _mm512_permutex2var_epi16, _mm512_set_epi16,
    _mm512_set1_epi32, _mm512_setzero_ps, _mm512_srli_epi32, _mm512_store_si512, _mm512_sub_ps,
};
use std::mem::MaybeUninit;
use std::sync::LazyLock;

use super::accumulate::Accumulate;
use super::avx512::{LANES, load_strided, mask, write_lanes};
use super::blocks::{CacheLine, Kernel, Tile};
use super::matrix::Mat;
use super::packed;
use super::transpose::transpose;

/// Rows and columns of a tile: two by two AMX tiles.
pub(super) const SIDE: usize = 32;
/// Terms of one AMX multiplication.
const DEPTH: usize = 32;
/// bf16 summands of an f32.
pub(super) const PARTS: usize = packed::AMX_PARTS;
/// Cache lines of a sliver for DEPTH terms: PARTS times two AMX tiles of 16 lines.
const STEP: usize = PARTS * 2 * 16;

/// Proof that the processor has AMX and that the operating system lets this process use it.
#[derive(Clone, Copy)]
pub(super) struct Amx(());

impl Amx {
    pub(super) fn detect() -> Option<Self> {
        static IS_HERE: LazyLock<bool> = LazyLock::new(|| {
            const AMX_BF16: u32 = 1 << 22;
            const AMX_TILE: u32 = 1 << 24;
            // Leaf 7 exists on every processor with AVX-512.
            let features = || __cpuid_count(7, 0).edx;
            is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && features() & (AMX_BF16 | AMX_TILE) == AMX_BF16 | AMX_TILE
                && permitted()
        });
        IS_HERE.then_some(Self(()))
    }

    /// Configures the tiles of the calling thread.
    pub(super) fn configure(self, config: &'static AmxConfig) {
        // SAFETY: the processor has AMX, and the configuration is valid.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const *config, options(nostack, preserves_flags)) };
    }
}

/// Requests the AMX tile registers from Linux, for all threads of the process.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call takes two numbers; an older Linux returns an error.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// Configuration of the tiles, in the layout of LDTILECFG.
#[repr(C, align(64))]
pub(super) struct AmxConfig {
    pub(super) palette: u8,
    pub(super) start_row: u8,
    pub(super) reserved: [u8; 14],
    pub(super) row_bytes: [u16; 16],
    pub(super) rows: [u8; 16],
}

/// All eight tiles have 16 rows of 64 bytes.
static CONFIG: AmxConfig = AmxConfig {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

impl Kernel for Amx {
    type Operand = f32;
    const MR: usize = SIDE;
    const NR: usize = SIDE;
    const KC: usize = 512;
    const BLOCK_LINES: usize = packed::BLOCK_LINES;
    const MAX_PACKED: usize = packed::MAX_PACKED;

    fn lines_a(kc: usize) -> usize {
        kc.div_ceil(DEPTH) * STEP
    }

    fn lines_b(kc: usize) -> usize {
        kc.div_ceil(DEPTH) * STEP
    }

    fn pack_a(self, block: Mat<'_>, to: &mut [CacheLine]) {
        // SAFETY: the processor has AVX-512.
        unsafe { pack_a(block, to) };
    }

    fn pack_b(self, block: Mat<'_>, to: &mut [CacheLine]) {
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
        // SAFETY: the processor has AMX and AVX-512; the rest is the caller's contract.
        unsafe {
            multiply(kc.div_ceil(DEPTH), a, b, &tile, &mut sums);
            sums.write(tile, scale, accumulate);
        }
    }

    fn begin(self) {
        self.configure(&CONFIG);
    }

    fn end(self) {
        // SAFETY: the processor has AMX. Releasing the registers makes context switches cheap.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags)) };
    }
}

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

/// Loads 16 columns and 32 terms of a matrix, one register per term, with zeros past its end.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn terms(block: Mat<'_>, first_k: usize, first_col: usize) -> [[__m512; LANES]; 2] {
    let Mat { data, rows: kc, cols: n, row_stride, col_stride } = block;
    let n_cols = n.saturating_sub(first_col).min(LANES);
    let from = data.as_ptr();
    let mut all = [[_mm512_setzero_ps(); LANES]; 2];
    for (half, rows) in all.iter_mut().enumerate() {
        let first_k = first_k + half * LANES;
        let n_terms = kc.saturating_sub(first_k).min(LANES);
        if n_terms == 0 || n_cols == 0 {
            continue;
        }
        // SAFETY: element (k, j) of the block is at k row_stride + j col_stride; `Mat` has checked the bounds. Masks
        // and counts exclude the others.
        unsafe {
            let from = from.add(first_k * row_stride + first_col * col_stride);
            if col_stride == 1 {
                for (k, row) in rows.iter_mut().enumerate().take(n_terms) {
                    *row = _mm512_maskz_loadu_ps(mask(n_cols), from.add(k * row_stride));
                }
            } else {
                let mut columns = [_mm512_setzero_ps(); LANES];
                if row_stride == 1 && n_terms == LANES && n_cols == LANES {
                    for (j, column) in columns.iter_mut().enumerate() {
                        *column = _mm512_loadu_ps(from.add(j * col_stride));
                    }
                } else {
                    for (j, column) in columns.iter_mut().enumerate().take(n_cols) {
                        *column = load_strided(from.add(j * col_stride), row_stride, n_terms);
                    }
                }
                *rows = transpose(columns);
            }
        }
    }
    all
}

/// Packs a matrix [k, n] in AMX's layout of a right operand. For each 32 terms: PARTS times two tiles of 16 columns,
/// each 16 lines of pairs of terms.
#[target_feature(enable = "avx512f,avx512bw")]
fn pack_b(block: Mat<'_>, to: &mut [CacheLine]) {
    assert!(to.len() >= block.rows.div_ceil(DEPTH) * STEP && block.cols <= SIDE, "the sliver is long enough");
    for (step, to) in to.chunks_exact_mut(STEP).enumerate().take(block.rows.div_ceil(DEPTH)) {
        for side in 0..2 {
            let halves = terms(block, step * DEPTH, side * LANES);
            for (half, rows) in halves.iter().enumerate() {
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
fn pack_a(block: Mat<'_>, to: &mut [CacheLine]) {
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
    let halves = terms(block, first_k, side * LANES);
    // Pairs of terms, one lane per row; the transpose puts a row's pairs next to each other.
    let mut pairs = [[_mm512_setzero_ps(); LANES]; PARTS];
    for (half, rows) in halves.iter().enumerate() {
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

/// Sums of a tile, which `tilestored` writes.
#[repr(C, align(64))]
pub(super) struct Sums(MaybeUninit<[[f32; SIDE]; SIDE]>);

impl Sums {
    #[inline]
    pub(super) fn unwritten() -> Self {
        Self(MaybeUninit::uninit())
    }

    #[inline]
    pub(super) fn as_mut_ptr(&mut self) -> *mut f32 {
        self.0.as_mut_ptr().cast()
    }

    /// Computes tile = [tile +] scale sums.
    ///
    /// # Safety
    ///
    /// The processor must have AVX-512, and all sums must be written. The tile must be valid and owned by this thread.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn write(&self, tile: Tile, scale: f32, accumulate: Accumulate) {
        let sums = self.0.as_ptr().cast::<f32>();
        for i in 0..tile.n_rows {
            for half in 0..SIDE / LANES {
                // SAFETY: the caller's contract.
                unsafe {
                    let sum = _mm512_loadu_ps(sums.add(i * SIDE + half * LANES));
                    write_lanes(tile, i, half, sum, scale, accumulate);
                }
            }
        }
    }
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
            // low a, high b
            "tileloadd tmm4, [{a} + {line} + 4096]",
            "tileloadd tmm6, [{b} + {line}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b} + {line} + 1024]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a} + {line} + 5120]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            // middle a, high b
            "tileloadd tmm4, [{a} + {line} + 2048]",
            "tileloadd tmm5, [{a} + {line} + 3072]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            // middle a, middle b
            "tileloadd tmm6, [{b} + {line} + 2048]",
            "tileloadd tmm7, [{b} + {line} + 3072]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            // high a, middle b
            "tileloadd tmm4, [{a} + {line}]",
            "tileloadd tmm5, [{a} + {line} + 1024]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            // high a, low b
            "tileloadd tmm6, [{b} + {line} + 4096]",
            "tileloadd tmm7, [{b} + {line} + 5120]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            // high a, high b
            "tileloadd tmm6, [{b} + {line}]",
            "tileloadd tmm7, [{b} + {line} + 1024]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a}, 6144",
            "add {b}, 6144",
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
