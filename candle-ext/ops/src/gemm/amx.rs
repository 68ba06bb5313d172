//! Kernel for processors with AMX, which multiplies bf16 sixteen times as fast as AVX-512 multiplies f32.
//!
//! Each f32 is split into three bf16 (24 bits of mantissa are 3 times 8). Two such sums multiplied have nine terms; the
//! six largest are computed. The others are below 2^-25 of the result. Sums are f32, as in every kernel.
//!
//! Numbers below 2^-108 lose low bits. Infinities, and values above 3.39e38, which bf16 rounds to infinity, become NaN.

use std::arch::asm;
use std::arch::x86_64::{__cpuid_count, _mm512_loadu_ps};
use std::mem::MaybeUninit;
use std::sync::LazyLock;

use super::accumulate::Accumulate;
use super::amx_packing::{DEPTH, SIDE, STEP, pack_a, pack_b};
use super::avx512::{LANES, write_lanes};
use super::kernel::{CacheLine, Kernel, Tile};
use super::matrix::Mat;
use super::packed;

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
